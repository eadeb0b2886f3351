"""Everything a trainer needs to go on exactly where it was."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Progress:
    """What has been done, counted on the host.

    Args:
        windows: Windows closed, skipped ones included.
        train_steps: Optimiser updates.
        iter_steps: Micro-batches consumed.
        skips: Reason → windows skipped.
    """

    windows: int = 0
    train_steps: int = 0
    iter_steps: int = 0
    skips: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON."""
        return {**vars(self), "skips": dict(self.skips)}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "Progress":
        """The inverse of `as_json`."""
        return Progress(**fields)


@dataclass(frozen=True)
class TrainerState:
    """A trainer between two windows.

    Args:
        trees: `parameters`, `optimizer`, `counters` (of the model's random streams), as `CheckpointStore` takes them.
        progress: What has been done.
    """

    trees: Mapping[str, Any]
    progress: Progress
