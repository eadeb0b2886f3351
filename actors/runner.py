"""A run's workers on Ray."""

import time
from typing import Any

import ray

from actors.handles import RayHandle
from actors.pool import RayPool
from actors.session import ROLES, RaySession, check_fits, settings_of, shortage, start_ray
from actors.waiter import RayWaiter
from contracts.errors import DeadlineError
from contracts.roles import Recorder
from pipeline.config import RunConfig
from pipeline.workers.spec import WorkerSpec, WorkerSpecs


class RayRuntime:
    """`contracts.roles.Runtime` on Ray: one actor a worker, on this machine or on a cluster.

    Every worker is up when the constructor returns.

    Args:
      specs: how each role's worker is made.
      config: the run's settings; ``runner`` says how many workers a role has and what each asks for.
      recorder: told of workers that are replaced.
      session: a Ray that was started before (see `start_ray`); without one, it is started here.

    Raises:
      ConfigError: a request that cannot be met, or a worker on another platform than configured.
      DeadlineError: no Ray at the address, or workers that did not start in time; what they asked for is shown.
    """

    def __init__(self, specs: WorkerSpecs, config: RunConfig, recorder: Recorder, session: RaySession | None = None):
        runner = config.runner
        self._pools: list[RayPool] = []
        self._session = session or start_ray(runner)
        try:
            if self._session.fixed:
                check_fits(runner)
            self.trainer = self._pool("trainer", specs.trainer, config, recorder)
            self.teacher = self._pool("teacher", specs.teacher, config, recorder)
            self.rollout = self._pool("rollout", specs.rollout, config, recorder)
            self.waiter = RayWaiter(self._pools)
            self._await_starts(config)
        except BaseException:
            self.close()
            raise

    def put(self, name: str, value: Any) -> RayHandle:
        handle = RayHandle(name)
        handle.keep(ray.put(value))
        return handle

    def close(self) -> None:
        """Kill this run's actors, no others; leave Ray, and end it if it was started for this run."""
        if ray.is_initialized():
            for pool in self._pools:
                pool.close()
        self._pools.clear()
        self._session.close()

    def _pool(self, role: str, spec: WorkerSpec, config: RunConfig, recorder: Recorder) -> RayPool:
        runner = config.runner
        pool = RayPool(role, spec, settings_of(runner, role), runner, recorder, replaceable=role != "trainer")
        self._pools.append(pool)
        return pool

    def _await_starts(self, config: RunConfig) -> None:
        deadline = time.monotonic() + config.runner.start_deadline
        waiting = [handle for pool in self._pools for handle in pool.starts]
        while waiting:
            try:
                done = self.waiter.wait(waiting, deadline - time.monotonic())
            except DeadlineError as error:
                roles = [role for role in ROLES if any(handle.pool and handle.pool.role == role for handle in waiting)]
                raise DeadlineError(
                    f"{len(waiting)} workers did not start within {config.runner.start_deadline:g} s: "
                    + " ".join(shortage(role, settings_of(config.runner, role)) for role in roles)
                ) from error
            for handle in done:
                handle.result()
            waiting = [handle for handle in waiting if not handle.done]
