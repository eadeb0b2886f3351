"""One Ray for all tests of this folder; a test that needs its own starts it in another process."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import ray

from actors.handles import RayHandle
from actors.pool import RayPool
from actors.session import start_ray
from actors.waiter import RayWaiter
from contracts.weights import WeightVersion
from contracts.wire import encode_tree
from pipeline.testing import ListRecorder, fake_version, fake_weights
from pipeline.workers.spec import WorkerSpec

# Ray's workers import the fakes by name: what they inherit is the environment of the Ray that starts them.
FAKES = str(Path(__file__).parent / "fakes")
sys.path.insert(0, FAKES)
os.environ["PYTHONPATH"] = os.pathsep.join([FAKES, *filter(None, [os.environ.get("PYTHONPATH")])])

from ray_fakes import run_config  # noqa: E402


@pytest.fixture(scope="session")
def ray_session():
    """A one-node Ray of four logical CPUs, started as a run would, in the presence of a stale address."""
    os.environ["RAY_ADDRESS"] = "192.0.2.1:6379"
    quarters = {role: {"count": 1, "num_cpus": 4 / 3} for role in ("rollout", "teacher", "trainer")}
    session = start_ray(run_config(**quarters).runner)
    yield session
    session.close()


class OnePool:
    """A pool with its waiter, and the recorder that hears of its losses."""

    def __init__(self, spec: WorkerSpec, count: int, *, role: str = "rollout", replaceable: bool = True):
        config = run_config(**{role: {"count": count}})
        self.recorder = ListRecorder()
        settings = getattr(config.runner, role)
        self.pool = RayPool(role, spec, settings, config.runner, self.recorder, replaceable=replaceable)
        self.waiter = RayWaiter([self.pool])
        self.submit = self.pool.submit

    def stored(self, value, name: str = "stored") -> RayHandle:
        handle = RayHandle(name)
        handle.keep(ray.put(value))
        return handle

    def published(self, step: int, shift: float = 0.0) -> WeightVersion:
        """Publish fake weights for ``step``; returns their version."""
        weights = {"weights": fake_weights()["weights"] + np.float32(shift)}
        version = fake_version(step, weights)
        self.pool.publish(version, self.stored(encode_tree(weights), f"weights {step}"))
        return version

    def finish(self, handles, timeout: float = 60.0) -> list:
        """Wait for every handle; returns results in order."""
        waiting = list(handles)
        while waiting:
            done = self.waiter.wait(waiting, timeout)
            waiting = [handle for handle in waiting if handle not in done]
        return [handle.result() for handle in handles]

    def ask(self, method: str, *arguments):
        return self.finish([self.pool.submit(method, *arguments)])[0]


def _pools():
    pools: list[OnePool] = []

    def make(spec: WorkerSpec, count: int = 1, **options) -> OnePool:
        pools.append(OnePool(spec, count, **options))
        pools[-1].finish(pools[-1].pool.starts)
        return pools[-1]

    yield make
    for made in pools:
        made.pool.close()


@pytest.fixture
def make_pool(ray_session):
    """Makes a pool of fakes that is closed with the test."""
    yield from _pools()


@pytest.fixture(scope="module")
def make_module_pool(ray_session):
    """Makes a pool of fakes that is closed with the last test of its file."""
    yield from _pools()
