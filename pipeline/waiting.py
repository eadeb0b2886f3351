"""Waiting for several results at once, beside other work."""

from collections.abc import Sequence
from typing import Any

from contracts.roles import Handle, Waiter


def results_of(waiter: Waiter, handles: Sequence[Handle], deadline: float, beside: Sequence[Handle] = ()) -> list[Any]:
    """What the handles' work returned, in their order.

    Args:
      waiter: of the runtime that does the work.
      handles: what is asked for.
      deadline: seconds without any result, of these or of what runs beside them.
      beside: work in flight before these, which may keep the same workers busy; it stays its owner's to fetch.

    Raises:
      DeadlineError: nothing came within ``deadline`` seconds.
      Exception: what the work raised.
    """
    wait_for_all(waiter, handles, deadline, beside)
    return [handle.result() for handle in handles]


def wait_for_all(waiter: Waiter, handles: Sequence[Handle], deadline: float, beside: Sequence[Handle] = ()) -> None:
    """Wait as `results_of` does, and fetch nothing: for what is too large for this process, or not meant for it."""
    waiting, others = list(handles), list(beside)
    while waiting:
        done = set(waiter.wait([*waiting, *others], deadline))
        waiting = [handle for handle in waiting if handle not in done]
        others = [handle for handle in others if handle not in done]
