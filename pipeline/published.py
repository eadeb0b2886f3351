"""Which student weights a pool has to give, and how a worker comes to hold those that a call names."""

from collections.abc import Sequence
from itertools import count
from typing import Any

from contracts.errors import VersionNotHeldError, WeightsError
from contracts.roles import Handle
from contracts.weights import WeightVersion
from contracts.work import EvaluationRequest, RolloutRequest


class Published:
    """Published trees by step, and the order of the decisions to load them.

    The tree is a handle: one value at rest however many workers load it.
    """

    def __init__(self) -> None:
        self._trees: dict[int, tuple[WeightVersion, Handle]] = {}
        self._intents = count(1)

    def publish(self, version: WeightVersion, tree: Handle) -> None:
        self._trees[version.step] = (version, tree)

    def forget(self, kept_steps: frozenset[int]) -> None:
        self._trees = {step: pair for step, pair in self._trees.items() if step in kept_steps}

    def clear(self) -> None:
        self._trees.clear()

    @property
    def steps(self) -> set[int]:
        return set(self._trees)

    def load_arguments(self, version: WeightVersion) -> tuple[WeightVersion, Handle, int]:
        """Arguments of the ``load`` that makes a worker hold ``version``; each call is one more intent.

        Raises:
          VersionNotHeldError: it is not published, or another version is published for its step.
        """
        published, tree = self._trees.get(version.step, (None, None))
        if tree is None or published != version:
            raise VersionNotHeldError(
                f"weights {version} were asked for; published are {[str(other) for other, _ in self._trees.values()]}. "
                "Publish a version before it is named."
            )
        return version, tree, next(self._intents)


def check_acknowledged(worker: str, version: WeightVersion, acknowledged: Any) -> None:
    """Refuse a worker that does not hold what was published.

    Raises:
      WeightsError: showing both versions.
    """
    if acknowledged != version:
        raise WeightsError(
            f"{worker} was given weights {version} and acknowledged {acknowledged}: it does not hold what was published, "
            "so it was not asked to write. Start the run again from its checkpoint."
        )


def named_versions(arguments: Sequence[Any]) -> list[WeightVersion]:
    """The student weights that a call names, to be held before it is made."""
    return [argument.version for argument in arguments if isinstance(argument, RolloutRequest | EvaluationRequest)]
