"""Workers of one role as Ray actors: work goes to an idle one, a dead one is replaced, its item is sent again."""

import time
from collections import deque
from typing import Any

import ray
from ray.exceptions import RayTaskError

from actors.handles import LOST_INPUT, LOST_WORKER, Kind, RayHandle, call_name, fetch, first_words, raised_by_worker
from actors.preparation import Preparations
from actors.remote import actor_options
from actors.seat import Seat
from actors.session import shortage
from contracts.errors import DeadlineError, LimbeckError, NotDoneError, WeightsError, WorkerLostError
from contracts.roles import Recorder
from contracts.weights import WeightVersion
from pipeline.config import RoleSettings, RunnerSettings
from pipeline.published import Published, check_acknowledged, named_versions
from pipeline.workers.spec import WorkerSpec

MAX_LOSSES = 3
"""Deaths of one place in a row, without a finished piece of work between them, that end the run."""
MAX_ATTEMPTS = 3
"""How often one call is sent; a call that kills its worker would otherwise kill every replacement."""


class RayPool:
    """Workers of one role. Nothing happens between calls: a `RayWaiter` drives the pool.

    Args:
      role: names the workers.
      spec: how a worker is made.
      settings, runner: how many, and what each asks of the cluster.
      recorder: told of replacements (``replace``) and of workers that cannot serve (``unusable``).
      replaceable: whether a new worker can take a dead one's place. Not for a trainer, whose state dies with it.
    """

    def __init__(
        self,
        role: str,
        spec: WorkerSpec,
        settings: RoleSettings,
        runner: RunnerSettings,
        recorder: Recorder,
        *,
        replaceable: bool = True,
    ):
        self.role = role
        self.replaceable = replaceable
        self._start_arguments = (spec, settings, runner.visible_cores)
        self._start_deadline = runner.start_deadline
        self._recorder = recorder
        self._queue: deque[RayHandle] = deque()
        self._weights = Published()
        self._preparations = Preparations()
        self._seats = [Seat(role, index, actor_options(settings, runner)) for index in range(settings.count)]
        self.starts = [self._start(seat) for seat in self._seats]

    def submit(self, method: str, *arguments: Any) -> RayHandle:
        handle = self._handle(self.role, Kind.WORK, method, arguments)
        self._queue.append(handle)
        return handle

    def prepare(self, method: str, *arguments: Any) -> list[RayHandle]:
        """See `WorkerPool.prepare`. What the workers answer must be small and, from a replacement, the same again."""
        handles = {seat: self._handle(seat.name, Kind.PREPARE, method, arguments) for seat in self._seats}
        for seat, handle in handles.items():
            if seat.unusable is None:
                seat.todo.append(handle)
            else:
                handle.fail(seat.unusable)
        self._preparations.add(handles)
        return list(handles.values())

    def publish(self, version: WeightVersion, tree: RayHandle) -> None:
        self._weights.publish(version, tree)

    def forget(self, kept_steps: frozenset[int]) -> None:
        self._weights.forget(kept_steps)

    def close(self) -> None:
        """Kill the workers; they are this run's own."""
        for seat in self._seats:
            seat.kill()
        self._seats.clear()
        self._queue.clear()
        self._preparations.clear()
        self._weights.clear()

    # What the waiter needs.

    def in_flight(self) -> "dict[ray.ObjectRef, Seat]":
        """What becomes ready when a call under way ends → who makes it."""
        return {seat.receipt: seat for seat in self._seats if seat.receipt is not None}

    def pump(self) -> None:
        """Send whatever can be sent: first what a worker owes, then the queue, in order, to idle workers.

        Raises:
          DeadlineError: the only worker left is a replacement that does not start.
        """
        for seat in self._seats:
            self._send_owed(seat)
        self._check_starts()
        while self._queue:
            handle = self._queue[0]
            error = handle.input_error or self._unusable()
            if error is not None:
                self._queue.popleft().fail(error)
                continue
            seat = self._idle_seat(handle)
            if seat is None or not all(given.done for given in handle.inputs):
                return
            self._assign(seat, self._queue.popleft())

    def settle(self, seat: Seat) -> None:
        """Take note of how a worker's call ended.

        Raises:
          WorkerLostError: the worker died and cannot, or cannot once more, be replaced.
        """
        assert seat.receipt is not None
        try:
            fetch(seat.receipt, f"the receipt of {seat.name}'s call")
        except RayTaskError as error:
            if isinstance(error.cause, LOST_INPUT):
                self._ask_again_for_inputs(seat, error.cause)
            else:
                self._failed(seat, seat.abandon(), raised_by_worker(error))
        except LOST_WORKER as error:
            self._replace(seat, first_words(error))
        else:
            self._succeeded(seat, seat.finish())

    def whereabouts(self, handle: RayHandle) -> str:
        """Where a call is, for people."""
        now = time.monotonic()
        for seat in self._seats:
            if seat.running is handle:
                return f"{handle.name} ({seat.describe(now)})"
            if handle in seat.todo:
                return f"{handle.name} (next on {seat.describe(now)})"
        doing = ", ".join(seat.describe(now) for seat in self._seats)
        return f"{handle.name} (queued; {doing or 'its pool is closed'})"

    def send_again(self, handle: RayHandle) -> None:
        """Put work whose result was lost at the head of the queue; it is the same request, so the same result.

        Raises:
          WorkerLostError: it was sent too often, or its worker's state has moved on.
        """
        if handle.kind is not Kind.WORK or not self.replaceable or handle.attempts >= MAX_ATTEMPTS:
            raise WorkerLostError(
                f"{handle.name} is lost and cannot be asked for again: it was sent {handle.attempts} times of "
                f"{MAX_ATTEMPTS}, and results of {self.role} workers can{'' if self.replaceable else 'not'} be remade. "
                "Resume the run from its last checkpoint."
            )
        handle.lose()
        self._queue.appendleft(handle)

    # Sending.

    def _handle(self, owner: str, kind: Kind, method: str, arguments: tuple[Any, ...]) -> RayHandle:
        handle = RayHandle(call_name(owner, method, arguments), self, kind, method, arguments)
        for given in handle.inputs:
            if not given.done and given.pool is not self:
                raise NotDoneError(f"{handle.name} was submitted before {given.name} was done; wait for that first")
        return handle

    def _start(self, seat: Seat) -> RayHandle:
        handle = RayHandle(f"{seat.name}.start()", self, Kind.START, "start", self._start_arguments)
        seat.send(handle)
        return handle

    def _send_owed(self, seat: Seat) -> None:
        """Make the next call that only this worker may make, if it is free and the call's inputs are there."""
        if seat.running is not None or not seat.todo or not all(given.done for given in seat.todo[0].inputs):
            return
        handle = seat.todo.popleft()
        if handle.input_error is None:
            seat.send(handle)
        else:
            self._failed(seat, handle, handle.input_error)

    def _idle_seat(self, handle: RayHandle) -> Seat | None:
        """An idle worker, best one that holds the version which the call names."""
        idle = [seat for seat in self._seats if seat.idle]
        wanted = named_versions(handle.arguments)
        return next((seat for seat in idle if seat.held in wanted), idle[0] if idle else None)

    def _assign(self, seat: Seat, handle: RayHandle) -> None:
        """Give a worker a call, after the load of the weights that it names; the load is acknowledged before it."""
        try:
            for version in named_versions(handle.arguments):
                if seat.held != version:
                    arguments = self._weights.load_arguments(version)
                    seat.held = None
                    seat.todo.append(RayHandle(f"{seat.name}.load({version})", self, Kind.LOAD, "load", arguments))
        except LimbeckError as error:
            handle.fail(error)
            return
        seat.todo.append(handle)
        self._send_owed(seat)

    # Ends of calls.

    def _succeeded(self, seat: Seat, handle: RayHandle) -> None:
        if handle.kind is Kind.START:
            seat.started = True
        elif handle.kind is Kind.WORK:
            seat.losses = 0
        else:
            try:
                if handle.kind is Kind.PREPARE:
                    self._preparations.check_answer(handle)
                else:
                    check_acknowledged(seat.name, handle.arguments[0], handle.result())
                    seat.held = handle.arguments[0]
            except WeightsError as error:
                self._failed(seat, handle, error)

    def _failed(self, seat: Seat, handle: RayHandle, error: BaseException) -> None:
        """A call raised: so does whoever asks for its result. A worker that cannot be set up serves no more."""
        handle.fail(error)
        if handle.kind is Kind.LOAD:
            seat.todo.popleft().fail(error)
        elif handle.kind is not Kind.WORK:
            while seat.todo:
                seat.todo.popleft().fail(error)
            seat.unusable = error
            seat.kill()
            self._recorder.event("unusable", role=self.role, worker=seat.name, reason=first_words(error))

    def _unusable(self) -> BaseException | None:
        """Why this pool can do nothing any more, or None."""
        if all(seat.unusable is not None for seat in self._seats):
            return self._seats[0].unusable if self._seats else NotDoneError(f"the {self.role} pool is closed")
        return None

    # Losses.

    def _replace(self, seat: Seat, reason: str) -> None:
        """Put a new worker in the place of a dead one, prepare it like the first, and send its item again.

        Raises:
          WorkerLostError: no worker can take this one's place, or too many have.
        """
        handle = seat.abandon()
        seat.losses += 1
        if not self.replaceable:
            raise WorkerLostError(
                f"{seat.name} died at {handle.name}, and its state with it. Resume the run from its last checkpoint. "
                f"Ray says: {reason}"
            )
        if seat.losses >= MAX_LOSSES:
            raise WorkerLostError(
                f"{seat.name} died at {handle.name}: {seat.losses} losses in this place without a finished piece of work. "
                f"Its last output is in Ray's logs (/tmp/ray/session_latest/logs). Ray says: {reason}"
            )
        dead, work = seat.name, [owed for owed in (handle, *seat.todo) if owed.kind is Kind.WORK]
        seat.replace()
        # Whoever waits for the first start or preparation gets that of the replacement.
        seat.send(handle) if handle.kind is Kind.START else self._start(seat)
        seat.todo.extend(self._preparations.owed_by(seat))
        lost = {"worker": dead, "replacement": seat.name, "at": handle.name, "reason": reason}
        self._recorder.event("replace", role=self.role, **lost)
        for item in work:
            try:
                self.send_again(item)
            except WorkerLostError as error:
                item.fail(error)

    def _ask_again_for_inputs(self, seat: Seat, cause: Exception) -> None:
        """The worker lives, but something that it was given died with its node: have that made again first."""
        handle = seat.abandon()
        handle.attempts -= 1
        # Before its inputs are put at the head of the queue, which may be this one.
        self._queue.appendleft(handle)
        try:
            for given in handle.lost_inputs(cause):
                if given.pool is None or handle.kind is not Kind.WORK:
                    raise WorkerLostError(f"{handle.name} needs {given.name}, which is lost: {first_words(cause)}")
                if given.done:
                    given.pool.send_again(given)
                    self._recorder.event("lost", result=given.name, needed_by=handle.name, reason=first_words(cause))
        except WorkerLostError as error:
            self._queue.remove(handle)
            self._failed(seat, handle, error)

    def _check_starts(self) -> None:
        """Replacements have a deadline, too; while other workers serve, a late one is waited for without ending the run."""
        usable = [seat for seat in self._seats if seat.unusable is None]
        late = [seat for seat in usable if seat.generation and seat.starting_for() > self._start_deadline]
        if late and not any(seat.started for seat in usable):
            raise DeadlineError(
                f"{late[0].name} took a dead worker's place and did not start within {self._start_deadline:g} s; "
                f"{shortage(self.role, self._start_arguments[1])}"
            )
