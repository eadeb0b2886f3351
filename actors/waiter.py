"""The one place where time passes on Ray: it drives the pools until something that is waited for is done."""

import time
from collections.abc import Sequence

import ray

from actors.handles import RayHandle
from actors.pool import RayPool
from contracts.errors import DeadlineError

LONGEST_SLEEP = 5.0
"""Seconds after which the pools are looked at again, though nothing was heard: a replacement may be overdue."""


class RayWaiter:
    """`contracts.roles.Waiter` over every pool of a runtime."""

    def __init__(self, pools: Sequence[RayPool]):
        self._pools = pools

    def wait(self, handles: Sequence[RayHandle], timeout: float) -> list[RayHandle]:
        """Those that are done, at least one, in the order given.

        Raises:
          DeadlineError: none was done within ``timeout`` seconds.
          WorkerLostError: a worker died that cannot be replaced.
        """
        deadline = time.monotonic() + timeout
        while True:
            for pool in self._pools:
                pool.pump()
            done = [handle for handle in handles if handle.done]
            if done:
                return done
            flying = {receipt: (pool, seat) for pool in self._pools for receipt, seat in pool.in_flight().items()}
            left = deadline - time.monotonic()
            if not flying or left <= 0:
                raise DeadlineError(self._nothing_came(handles, timeout, bool(flying)))
            for receipt in _ready(list(flying), min(left, LONGEST_SLEEP)):
                pool, seat = flying[receipt]
                pool.settle(seat)

    def now(self) -> float:
        return time.monotonic()

    def _nothing_came(self, handles: Sequence[RayHandle], timeout: float, running: bool) -> str:
        places = [handle.pool.whereabouts(handle) if handle.pool else handle.name for handle in handles]
        waited = "; ".join(places) or "nothing"
        if not running:
            return f"waited for {waited}, and no worker has it to do; was its pool closed?"
        return f"nothing came within {timeout:g} s; waited for {waited}"


def _ready(references: "list[ray.ObjectRef]", timeout: float) -> "list[ray.ObjectRef]":
    """Every reference that is ready once the first one is. What died is ready, too: its receipt raises."""
    first, rest = ray.wait(references, num_returns=1, timeout=timeout, fetch_local=False)
    if first and rest:
        more, _ = ray.wait(rest, num_returns=len(rest), timeout=0, fetch_local=False)
        return [*first, *more]
    return first
