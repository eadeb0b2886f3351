"""The window that is open: what was accumulated since the last update."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from contracts.errors import BatchValueError
from contracts.losses import MetricSums
from contracts.weights import fingerprint
from pipeline.training.accumulator import GradientAccumulator
from pipeline.training.leaves import key_bits, named_leaves


@dataclass
class OpenWindow:
    """One staged batch at depth 1, where the update differentiates; else an accumulator, which outlives its windows.

    Args:
        depth: Micro-batches of a full window.
        micro_batches: How many there are.
        staged: The batch that waits for the update, in a tuple of one; empty otherwise.
        accumulator: Allocated by the first micro-batch and kept, so that memory is the same in every window.
    """

    depth: int
    micro_batches: int = 0
    staged: tuple[Any, ...] = ()
    accumulator: GradientAccumulator | None = None

    def require_room(self) -> None:
        """Raises BatchValueError if the window is full."""
        if self.micro_batches >= self.depth:
            raise BatchValueError(
                f"the open window already has its {self.depth} micro-batches: call update() before accumulate()"
            )

    def require_content(self) -> None:
        """Raises BatchValueError if the window is empty."""
        if self.micro_batches == 0:
            raise BatchValueError("the open window has no micro-batch: call accumulate() before update()")

    def require_closed(self, purpose: str) -> None:
        """Raises BatchValueError if micro-batches wait for their update."""
        if self.micro_batches:
            raise BatchValueError(
                f"the open window holds {self.micro_batches} micro-batches: call update() before {purpose}"
            )

    def accumulator_for(
        self, shapes: MetricSums, allocate: Callable[[MetricSums], GradientAccumulator], replicate: Callable[[Any], Any]
    ) -> GradientAccumulator:
        """The accumulator with a place for every metric of the next micro-batch; `self` is not changed.

        A metric that changed its kind or bounds keeps its place here and is refused where it is added.

        Args:
            shapes: Shapes of that micro-batch's sums.
            allocate: Makes an empty accumulator for such sums.
            replicate: Places small arrays.
        """
        current = self.accumulator
        if current is None:
            return allocate(shapes)
        if self.micro_batches == 0:
            if jax.tree.structure(current.window) == jax.tree.structure(shapes):
                return current
            return replace(current, window=replicate(zeros(shapes)))
        missing = {name: sums for name, sums in shapes.items() if name not in current.window}
        if not missing:
            return current
        return replace(current, window={**current.window, **replicate(zeros(missing))})

    def digest(self) -> str:
        """A fingerprint of everything the window holds, equal exactly while not a bit of it changes."""
        held = named_leaves((jnp.int32(self.micro_batches), self.staged, self.accumulator))
        return fingerprint({name: key_bits(leaf) for name, leaf in held.items()})


def zeros(shapes: MetricSums) -> MetricSums:
    """Sums to which nothing was added, for these shapes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
