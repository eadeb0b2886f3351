"""A plain worker as a Ray actor: what the actor asks of the cluster, its environment, and the shell around the worker.

A call returns two values. The first, the *receipt*, is small and all that the driver reads: the error or death of a call
shows there. The second is the worker's result, which stays in the object store until another worker, or the loop, asks
for it. The driver owns both, so a worker that dies takes no finished result with it.
"""

import math
import os
from typing import Any

import ray

from actors.handles import fetch
from contracts.errors import ConfigError
from pipeline.config import RoleSettings, RunnerSettings
from pipeline.workers.spec import WorkerSpec

_JAX_NAMES = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def environment(settings: RoleSettings, runner: RunnerSettings) -> dict[str, str]:
    """Environment of a role's processes, set before their first ``import jax``.

    ``JAX_*`` and ``XLA_FLAGS`` of the driver are passed on, so that a worker computes what it would compute here; NPROC
    is set because XLA splits reductions by the number of cores it sees.
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith("JAX_") or name == "XLA_FLAGS"}
    variables |= {
        "JAX_PLATFORMS": settings.platform,
        "NPROC": str(runner.visible_cores),
        "OMP_NUM_THREADS": "1",
    }
    if settings.platform == "cuda" and "xla_gpu_deterministic_ops" not in variables.get("XLA_FLAGS", ""):
        variables["XLA_FLAGS"] = f"{variables.get('XLA_FLAGS', '')} {_DETERMINISTIC}".strip()
    if settings.memory_fraction is not None:
        variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(settings.memory_fraction)
    return variables


def actor_options(settings: RoleSettings, runner: RunnerSettings) -> dict[str, Any]:
    """Options of a role's actors. Ray restarts and retries nothing: a restarted actor would hold other weights."""
    return {
        "num_cpus": settings.num_cpus,
        "num_gpus": settings.num_gpus,
        "resources": dict(settings.resources),
        "max_restarts": 0,
        "max_task_retries": 0,
        "runtime_env": {"env_vars": environment(settings, runner)},
    }


def asked(settings: RoleSettings) -> dict[str, float]:
    """What one actor of this role reserves, in the names under which Ray counts it."""
    wanted = {"CPU": settings.num_cpus, "GPU": settings.num_gpus, **settings.resources}
    return {name: amount for name, amount in wanted.items() if amount}


class Host:
    """The process of one worker. Constructed empty, so that whatever fails in `start` fails with its own type."""

    def __init__(self, name: str):
        self.name = name
        self.worker: Any = None

    def __repr__(self) -> str:
        return self.name

    def start(self, spec: WorkerSpec, settings: RoleSettings, visible_cores: int) -> str:
        """Check that JAX runs where the config says, then construct the worker.

        Raises:
          ConfigError: another platform, device count or number of visible cores than configured.
        """
        check_platform(self.name, settings, visible_cores)
        self.worker = spec.construct(self.name)
        return self.name

    def call(self, method: str, arguments: list[Any]) -> tuple[None, Any]:
        """Call a method of the worker (``start``: of this shell); references among the arguments are fetched first.

        Returns:
          The receipt, which is empty, and the method's result.

        Raises:
          DeadlineError: an argument did not arrive.
        """
        target = self if method == "start" else self.worker
        values = [
            fetch(argument, f"what {self.name}.{method} was given") if isinstance(argument, ray.ObjectRef) else argument
            for argument in arguments
        ]
        return None, getattr(target, method)(*values)


def check_platform(name: str, settings: RoleSettings, visible_cores: int) -> None:
    """Refuse to run where the config does not say: JAX would fall back to another device without a word.

    Raises:
      ConfigError: naming the worker, what it must have and what it has.
    """
    import jax

    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        raise ConfigError(f"{name} must run on {settings.platform}, but JAX cannot: {error}") from error
    found = sorted({device.platform for device in devices})
    if found != [_JAX_NAMES[settings.platform]]:
        raise ConfigError(f"{name} must run on {settings.platform}; JAX runs on {found}. Set the role's platform.")
    # A CPU device is no accelerator that Ray reserves: XLA_FLAGS may show any number of them.
    reserved = {"cpu": 0.0, "cuda": settings.num_gpus, "tpu": settings.resources.get("TPU", 0.0)}[settings.platform]
    if reserved and len(devices) != math.ceil(reserved):
        raise ConfigError(f"{name} reserves {reserved:g} of {settings.platform}; JAX sees {len(devices)} devices")
    if os.environ.get("NPROC") != str(visible_cores):
        raise ConfigError(
            f"{name} must see {visible_cores} cores (runner.visible_cores); NPROC is {os.environ.get('NPROC')!r}"
        )
