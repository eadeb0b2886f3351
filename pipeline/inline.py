"""Every worker in this process: the local mode, without Ray.

Work is queued when it is submitted and runs when it is waited for, one piece at a time, that of the latest stage first;
so items stream through the stages here as they do on Ray, and a step never holds more of them than it must.

Values cross between workers pickled, with arrays out of band, exactly as they cross Ray's object store: a receiver gets
its own containers around shared read-only arrays. What Ray would refuse (a worker that writes into what it was given, a
result that cannot be sent) fails here too, and what a worker returned does not change when the worker moves on.
"""

import pickle
import time
from collections import deque
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from contracts.errors import DeadlineError, NotDoneError
from contracts.roles import Handle
from contracts.weights import WeightVersion
from contracts.work import RolloutRequest
from pipeline.config import RunConfig
from pipeline.published import Published, check_acknowledged, named_versions
from pipeline.workers.spec import WorkerSpec, WorkerSpecs


class Stored:
    """A value at rest: pickled once, its contiguous arrays beside it as read-only memory that every reader shares."""

    def __init__(self, value: Any):
        buffers: list[pickle.PickleBuffer] = []
        self._head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        self._buffers = [buffer.raw().tobytes() for buffer in buffers]

    def read(self) -> Any:
        return pickle.loads(self._head, buffers=self._buffers)


class InlineHandle:
    """The result of one call in this process.

    Attributes:
      name: the call, with the request that it goes back to.
      pool: whose call it is; None for a stored value.
      method, arguments: what is called, with what; handles, and values at rest.
      worker: index of the worker that must make the call, or None for any.
      done: whether a waiter may report it.
    """

    def __init__(
        self,
        name: str,
        pool: "InlinePool | None" = None,
        method: str = "",
        arguments: "tuple[InlineHandle | Stored, ...]" = (),
        worker: int | None = None,
    ):
        self.name = name
        self.pool = pool
        self.method = method
        self.arguments = arguments
        self.worker = worker
        self.done = False
        self._value: Stored | None = None
        self._error: Exception | None = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def awaited(self) -> list["InlineHandle"]:
        """The handles among the arguments."""
        return [argument for argument in self.arguments if isinstance(argument, InlineHandle)]

    def values(self) -> list[Any]:
        """The arguments as the worker gets them; raises what the work behind one of them raised."""
        return [
            argument.outcome() if isinstance(argument, InlineHandle) else argument.read() for argument in self.arguments
        ]

    def keep(self, value: Any) -> None:
        self._value, self.arguments = Stored(value), ()

    def fail(self, error: Exception) -> None:
        self._error, self.arguments = error, ()

    def result(self) -> Any:
        if not self.done:
            raise NotDoneError(f"{self.name} is not done; wait for it before asking for its result")
        return self.outcome()

    def outcome(self) -> Any:
        """The value, or the error raised: for a later call of the same pool, to which order is guarantee enough."""
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value.read()


class InlinePool:
    """Workers of one role, called one after another, each in its turn."""

    def __init__(self, role: str, spec: WorkerSpec, workers: int):
        self.role = role
        self.workers = [spec.construct(f"{role}-{index}") for index in range(workers)]
        self.queue: deque[InlineHandle] = deque()
        self._turn = cycle(range(workers))
        self.published = Published()
        self._held: list[WeightVersion | None] = [None] * workers

    def submit(self, method: str, *arguments: Any) -> InlineHandle:
        return self._enqueue(method, arguments, None)

    def prepare(self, method: str, *arguments: Any) -> list[InlineHandle]:
        # Workers here are never replaced, so there is no later one to prepare.
        return [self._enqueue(method, arguments, index) for index in range(len(self.workers))]

    def publish(self, version: WeightVersion, tree: Handle) -> None:
        self.published.publish(version, tree)

    def forget(self, kept_steps: frozenset[int]) -> None:
        self.published.forget(kept_steps)

    def close(self) -> None:
        self.queue.clear()
        self.published.clear()
        self.workers.clear()

    def run_next(self) -> InlineHandle:
        """Make the call that has waited longest."""
        handle = self.queue.popleft()
        self.perform(handle, next(self._turn) if handle.worker is None else handle.worker)
        handle.done = True
        return handle

    def perform(self, handle: InlineHandle, index: int) -> None:
        """Make a call on a worker that holds what the call asks for; the handle keeps what it returned or raised."""
        try:
            arguments = handle.values()
            for version in named_versions(arguments):
                self._hold(index, version)
            handle.keep(getattr(self.workers[index], handle.method)(*arguments))
        except Exception as error:  # noqa: BLE001 - whatever the work raised belongs to whoever asks for its result
            handle.fail(error)

    def holds(self, index: int, version: WeightVersion) -> bool:
        return self._held[index] == version

    def _enqueue(self, method: str, arguments: tuple[Any, ...], worker: int | None) -> InlineHandle:
        subjects = ", ".join(filter(None, map(_subject, arguments)))
        owner = self.role if worker is None else f"{self.role}-{worker}"
        name = f"{owner}.{method}({subjects})"
        for argument in arguments:
            if isinstance(argument, InlineHandle) and not argument.done and argument.pool is not self:
                raise NotDoneError(f"{name} was submitted before {argument.name} was done; wait for that first")
        stored = tuple(value if isinstance(value, InlineHandle) else Stored(value) for value in arguments)
        handle = InlineHandle(name, self, method, stored, worker)
        self.queue.append(handle)
        return handle

    def _hold(self, index: int, version: WeightVersion) -> None:
        if self.holds(index, version):
            return
        version, tree, intent = self.published.load_arguments(version)
        self._held[index] = None
        check_acknowledged(f"{self.role}-{index}", version, self.workers[index].load(version, tree.result(), intent))
        self._held[index] = version


class InlineWaiter:
    """Runs what is waited for. Time is this process's own; a call that is under way cannot be cut short."""

    def __init__(self, pools: Sequence[InlinePool]):
        self._pools = pools

    def wait(self, handles: Sequence[Any], timeout: float) -> list[Any]:
        waited = set(handles)
        while not any(handle.done for handle in handles):
            pool = next((pool for pool in self._pools if not waited.isdisjoint(pool.queue)), None)
            if pool is None:
                names = ", ".join(handle.name for handle in handles) or "nothing"
                raise DeadlineError(f"waited for {names}, and no worker has it to do; was its pool closed?")
            pool.run_next()
        return [handle for handle in handles if handle.done]

    def now(self) -> float:
        return time.monotonic()


class InlineRuntime:
    """`contracts.roles.Runtime` in this process.

    Args:
      specs: how each role's worker is made.
      config: the run's settings; ``runner`` says how many workers a role has.
    """

    def __init__(self, specs: WorkerSpecs, config: RunConfig):
        runner = config.runner
        self.trainer = InlinePool("trainer", specs.trainer, 1)
        self.teacher = InlinePool("teacher", specs.teacher, runner.teacher.count)
        self.rollout = InlinePool("rollout", specs.rollout, runner.rollout.count)
        self.waiter = InlineWaiter((self.trainer, self.teacher, self.rollout))

    def put(self, name: str, value: Any) -> InlineHandle:
        return stored_handle(name, value)

    def close(self) -> None:
        for pool in (self.trainer, self.teacher, self.rollout):
            pool.close()


def stored_handle(name: str, value: Any) -> InlineHandle:
    """A handle that is done from the start."""
    handle = InlineHandle(name)
    handle.keep(value)
    handle.done = True
    return handle


def _subject(argument: Any) -> str:
    if isinstance(argument, RolloutRequest):
        return argument.request_id
    return getattr(argument, "name", "")
