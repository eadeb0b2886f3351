"""One place in a pool: the actor that sits there now, what it is doing, and what it must do next."""

import time
from collections import deque
from typing import Any

import ray

from actors.handles import Kind, RayHandle
from actors.remote import Host
from contracts.weights import WeightVersion


class Seat:
    """A worker, and after its death its replacement.

    Attributes:
      name: of the present worker; a replacement has a suffix.
      todo: calls that only this worker may make, in order, before it is idle.
      running, since: the call under way, and when it was sent (monotonic seconds).
      receipt: the reference that becomes ready when the call under way ends, however it ends.
      started: whether the worker was constructed.
      held: the student version that the worker acknowledged.
      unusable: what kept the worker from being set up; it is given nothing more.
      generation: replacements so far.
      losses: deaths since a worker here last finished a piece of work.
    """

    def __init__(self, role: str, index: int, options: dict[str, Any]):
        self._place = f"{role}-{index}"
        self._options = options
        self._result: ray.ObjectRef | None = None
        self.generation = 0
        self.losses = 0
        self.sit()

    def sit(self) -> None:
        """Create the actor; Ray queues its calls until it is placed and up."""
        self.name = self._place + (f".{self.generation}" if self.generation else "")
        self.actor: Any = ray.remote(Host).options(**self._options).remote(self.name)
        self.todo: deque[RayHandle] = deque()
        self.running: RayHandle | None = None
        self.receipt: ray.ObjectRef | None = None
        self.since = time.monotonic()
        self.held: WeightVersion | None = None
        self.started = False
        self.unusable: BaseException | None = None

    @property
    def idle(self) -> bool:
        return self.started and self.unusable is None and self.running is None and not self.todo

    def send(self, handle: RayHandle) -> None:
        handle.attempts += 1
        self.running, self.since = handle, time.monotonic()
        self.receipt, self._result = self.actor.call.options(num_returns=2).remote(
            handle.method, handle.wire_arguments()
        )

    def finish(self) -> RayHandle:
        """The call under way has succeeded: its handle now has the result."""
        handle, result = self._end()
        handle.keep(result)
        return handle

    def abandon(self) -> RayHandle:
        """The call under way has come to nothing."""
        return self._end()[0]

    def replace(self) -> None:
        """A new actor in the place of one that is dead or as good as dead."""
        self.kill()
        self.generation += 1
        self.sit()

    def kill(self) -> None:
        ray.kill(self.actor, no_restart=True)

    def starting_for(self) -> float:
        """Seconds since the worker was asked to start; 0 once it has."""
        return 0.0 if self.started else time.monotonic() - self.since

    def describe(self, now: float) -> str:
        if self.running is None:
            return f"{self.name} {'unusable' if self.unusable else 'idle'}"
        doing = "starting" if self.running.kind is Kind.START else f"at {self.running.name}"
        return f"{self.name} {doing} for {now - self.since:.1f} s"

    def _end(self) -> tuple[RayHandle, "ray.ObjectRef"]:
        handle, result = self.running, self._result
        assert handle is not None and result is not None
        self.running = self.receipt = self._result = None
        return handle, result
