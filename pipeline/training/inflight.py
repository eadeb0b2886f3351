"""A bounded queue of device steps: the host runs ahead of the device, but not far."""

from collections import deque
from collections.abc import Callable

import jax


class InflightQueue:
    """Steps that were dispatched and not waited for yet, oldest first.

    Args:
        limit: Steps queued at most; ≥ 1.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._steps: deque[tuple[jax.Array, Callable[[], None] | None]] = deque()
        self._settling = False

    def __len__(self) -> int:
        return len(self._steps)

    def make_room(self) -> None:
        """Waits for the oldest steps until one more may be dispatched."""
        while len(self._steps) >= self._limit:
            self._settle_oldest()

    def push(self, done: jax.Array, then: Callable[[], None] | None = None) -> None:
        """Queues a dispatched step.

        Args:
            done: An output of the step that nobody donates.
            then: Called once the step has run; may raise.
        """
        self._steps.append((done, then))

    def drain(self) -> None:
        """Waits for every queued step; does nothing when called by what a step calls, so that order is kept."""
        while self._steps and not self._settling:
            self._settle_oldest()

    def discard(self) -> None:
        """Waits for every queued step without calling anything."""
        while self._steps:
            jax.block_until_ready(self._steps.popleft()[0])

    def _settle_oldest(self) -> None:
        done, then = self._steps.popleft()
        jax.block_until_ready(done)
        if then is not None:
            self._settling = True
            try:
                then()
            finally:
                self._settling = False
