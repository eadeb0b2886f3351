"""What every worker of a pool was asked to do before anything else, so that a replacement can be asked the same."""

from actors.handles import Kind, RayHandle
from actors.seat import Seat
from contracts.errors import WeightsError


class Preparations:
    """The calls of `WorkerPool.prepare`, in order, and what was answered."""

    def __init__(self) -> None:
        self._made: list[dict[Seat, RayHandle]] = []
        self._first: dict[RayHandle, RayHandle] = {}

    def add(self, handles: dict[Seat, RayHandle]) -> None:
        self._made.append(handles)

    def clear(self) -> None:
        self._made.clear()
        self._first.clear()

    def owed_by(self, seat: Seat) -> list[RayHandle]:
        """The calls that a new worker in ``seat`` owes: the first worker's own, where they were not answered."""
        return [self._owed(seat, handles[seat]) for handles in self._made]

    def check_answer(self, handle: RayHandle) -> None:
        """Refuse a replacement that answers otherwise than the worker before it: it does not hold the same.

        Raises:
          WeightsError: showing both answers.
        """
        first = self._first.pop(handle, handle)
        if first is not handle and first.result() != handle.result():
            raise WeightsError(f"{handle.name} answered {handle.result()}; {first.name} had answered {first.result()}")

    def _owed(self, seat: Seat, first: RayHandle) -> RayHandle:
        if not first.done:
            return first
        again = RayHandle(f"{seat.name}.{first.method}()", first.pool, Kind.PREPARE, first.method, first.arguments)
        self._first[again] = first
        return again
