"""Published weights: stored once, fetched by each worker before the first request that names them."""

from itertools import count
from typing import Any

from actors.handles import RayHandle
from contracts.errors import VersionNotHeldError, WeightsError
from contracts.weights import WeightVersion


class Broadcast:
    """What a pool has published, and the order of its decisions to load.

    One tree is one object in the store however many workers load it: the reference travels inside the call's argument
    list, where Ray does not replace it by its value.
    """

    def __init__(self) -> None:
        self._published: dict[int, tuple[WeightVersion, RayHandle]] = {}
        self._intents = count(1)

    def publish(self, version: WeightVersion, tree: RayHandle) -> None:
        self._published[version.step] = (version, tree)

    def forget(self, kept_steps: frozenset[int]) -> None:
        self._published = {step: pair for step, pair in self._published.items() if step in kept_steps}

    def clear(self) -> None:
        self._published.clear()

    def load_arguments(self, version: WeightVersion) -> tuple[Any, ...]:
        """Arguments of the ``load`` that makes a worker hold ``version``; each call is one more intent.

        Raises:
          VersionNotHeldError: it is not published, or another version is published for its step.
        """
        published, tree = self._published.get(version.step, (None, None))
        if published != version:
            raise VersionNotHeldError(
                f"weights {version} were asked for; published are "
                f"{[str(other) for other, _ in self._published.values()]}. Publish a version before it is named."
            )
        return (version, tree, next(self._intents))


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
