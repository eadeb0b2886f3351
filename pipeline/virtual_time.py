"""A runtime on which nothing takes time but what is said to: schedules can be measured exactly, and in no time.

The real loop runs on it unchanged. Time is counted in whole ticks, so sums are exact and equal means equal.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from contracts.errors import DeadlineError
from contracts.freshness import FreshnessPolicy
from contracts.wire import encode_tree
from contracts.work import Rollout, RolloutRequest
from pipeline.inline import InlineHandle, InlinePool, stored_handle
from pipeline.published import named_versions
from pipeline.testing import FakeRolloutWorker, FakeTeacher, FakeTrainer, fake_version, fake_weights
from pipeline.workers.spec import WorkerSpec

Duration = int | Callable[[int, int], int]


@dataclass(frozen=True)
class Stage:
    """One role: its workers, and how long their calls take.

    Attributes:
      spec: how a worker is made.
      workers: how many there are.
      durations: method → ticks, or method → function of (step, item); a method that is not named takes none. ``load``
        is paid by the request that makes a worker change its weights. A call that names no item, such as ``update``,
        counts as at the last item that the pool was given.
    """

    spec: WorkerSpec
    workers: int = 1
    durations: Mapping[str, Duration] = field(default_factory=dict)


class VirtualClock:
    """A `Waiter` over a heap of things that will happen; ``ticks`` is the time."""

    def __init__(self):
        self.ticks = 0
        self._order = count()
        self._future: list[tuple[int, int, Callable[[], None]]] = []

    def after(self, ticks: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._future, (self.ticks + ticks, next(self._order), action))

    def wait(self, handles: Sequence[Any], timeout: float) -> list[Any]:
        until = self.ticks + timeout
        while not any(handle.done for handle in handles):
            if not self._future or self._future[0][0] > until:
                names = ", ".join(handle.name for handle in handles) or "nothing"
                raise DeadlineError(f"none of these was done within {timeout:g} ticks: {names}")
            self._advance()
        # What happens at this very tick is seen together, whatever the order of its heap entries.
        while self._future and self._future[0][0] == self.ticks:
            self._advance()
        return [handle for handle in handles if handle.done]

    def now(self) -> float:
        return float(self.ticks)

    def _advance(self) -> None:
        self.ticks, _, action = heapq.heappop(self._future)
        action()


class VirtualPool(InlinePool):
    """An `InlinePool` whose calls each occupy a worker for a stated time; the longest idle takes the next one."""

    def __init__(self, role: str, stage: Stage, clock: VirtualClock):
        super().__init__(role, stage.spec, stage.workers)
        self.busy: dict[str, int] = {}
        self._clock, self._durations = clock, stage.durations
        self._idle = list(range(stage.workers))
        self._place = (0, 0)

    def close(self) -> None:
        super().close()
        self._idle.clear()

    def _enqueue(self, method: str, arguments: tuple[Any, ...], worker: int | None) -> InlineHandle:
        handle = super()._enqueue(method, arguments, worker)
        self._start_what_can_start()
        return handle

    def _start_what_can_start(self) -> None:
        while self.queue and self._idle:
            handle = self.queue[0]
            index = self._idle[0] if handle.worker is None else handle.worker
            if index not in self._idle or not all(argument.done for argument in handle.awaited):
                return
            self.queue.popleft()
            self._idle.remove(index)
            ticks = self._ticks(handle, index)
            # The worker's state is what it is at the start of a call; only the result is held back.
            self.perform(handle, index)
            self._clock.after(ticks, lambda handle=handle, index=index: self._finish(handle, index))

    def _finish(self, handle: InlineHandle, index: int) -> None:
        handle.done = True
        self._idle.append(index)
        self._start_what_can_start()

    def _ticks(self, handle: InlineHandle, index: int) -> int:
        if any(argument.failed for argument in handle.awaited):
            return 0
        methods = [handle.method]
        for value in handle.values():
            if isinstance(value, RolloutRequest):
                self._place = (value.step, value.item)
            elif isinstance(value, Rollout):
                self._place = (value.provenance.step, value.provenance.item)
            methods += ["load" for version in named_versions([value]) if not self.holds(index, version)]
        total = 0
        for method in methods:
            duration = self._durations.get(method, 0)
            ticks = duration(*self._place) if callable(duration) else duration
            self.busy[method] = self.busy.get(method, 0) + ticks
            total += ticks
        return total


class VirtualRuntime:
    """`contracts.roles.Runtime` in virtual time."""

    def __init__(self, *, rollout: Stage, teacher: Stage, trainer: Stage):
        self.waiter = VirtualClock()
        self.rollout = VirtualPool("rollout", rollout, self.waiter)
        self.teacher = VirtualPool("teacher", teacher, self.waiter)
        self.trainer = VirtualPool("trainer", trainer, self.waiter)

    def put(self, name: str, value: Any) -> InlineHandle:
        return stored_handle(name, value)

    def close(self) -> None:
        for pool in (self.trainer, self.teacher, self.rollout):
            pool.close()


def fake_runtime(
    policy: FreshnessPolicy,
    *,
    rollout_workers: int = 1,
    teacher_workers: int = 1,
    durations: Mapping[str, Duration] | None = None,
    rollout: WorkerSpec | None = None,
    teacher: WorkerSpec | None = None,
    trainer: WorkerSpec | None = None,
) -> VirtualRuntime:
    """The fake roles of `pipeline.testing` in virtual time, version 0 published.

    Args:
      policy: which version writes which step.
      rollout_workers, teacher_workers: how many there are of each.
      durations: method of any role → ticks, or function of (step, item).
      rollout, teacher, trainer: other workers than the usual fakes.
    """
    durations = durations or {}
    runtime = VirtualRuntime(
        rollout=Stage(rollout or WorkerSpec(FakeRolloutWorker, ()), rollout_workers, durations),
        teacher=Stage(teacher or WorkerSpec(FakeTeacher, ()), teacher_workers, durations),
        trainer=Stage(trainer or WorkerSpec(FakeTrainer, (policy,)), 1, durations),
    )
    weights = fake_weights()
    runtime.rollout.publish(fake_version(0, weights, policy.run_id), runtime.put("weights 0", encode_tree(weights)))
    return runtime
