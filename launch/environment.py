"""What is set in the process before the first `import jax`, and inherited by every worker that it starts."""

import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

from contracts.errors import ConfigError
from pipeline.config import RunConfig

CACHE_VARIABLES = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES",
)
"""Forwarded to workers on other machines too, where nothing is inherited."""


def driver_environment(config: RunConfig) -> dict[str, str]:
    """The variables that a run decides.

    `NPROC`: XLA splits reductions by the number of cores it sees, so that number is part of the result. The driver of a
    Ray run computes on the CPU whatever its workers use: an accelerator that it held would be missing for them.

    Raises:
      ConfigError: roles of an inline run on different platforms.
    """
    runner = config.runner
    platforms = {role: getattr(runner, role).platform for role in ("rollout", "teacher", "trainer")}
    if runner.kind == "inline" and len(set(platforms.values())) > 1:
        raise ConfigError(
            f"runner.kind inline runs every role in one process, which has one platform; the config asks for {platforms}. "
            "Set the three alike, or use --runner ray."
        )
    platform = platforms["trainer"] if runner.kind == "inline" else "cpu"
    variables = {
        "NPROC": str(runner.visible_cores),
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": platform,
        "JAX_COMPILATION_CACHE_DIR": str(Path(config.run.cache).expanduser() / "compiled"),
        # Toy programs compile in milliseconds each, and there are hundreds of them.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    if platform == "cuda":
        flags = os.environ.get("XLA_FLAGS", "")
        variables["XLA_FLAGS"] = " ".join(dict.fromkeys([*flags.split(), "--xla_gpu_deterministic_ops=true"]))
    return variables


def quiet_defaults(*, starts_ray: bool) -> dict[str, str]:
    """Choices that Ray would otherwise announce at length; each may be made differently in the caller's environment.

    Args:
      starts_ray: whether this run starts a Ray of its own. Then token authentication is asked for by name, which is what
        Ray does by default after a paragraph about it; a cluster that is joined decides for itself.
    """
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **({"RAY_AUTH_MODE": "token"} if starts_ray else {}),
    }


def apply(config: RunConfig, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment of a run, before JAX computes anything.

    Raises:
      ConfigError: see `driver_environment`.
    """
    variables = driver_environment(config)
    environ.update(variables)
    starts_ray = config.runner.kind == "ray" and config.runner.address is None
    for name, value in quiet_defaults(starts_ray=starts_ray).items():
        environ.setdefault(name, value)
    if "jax" in sys.modules:
        import jax

        # An imported JAX has read its own variables already; XLA reads NPROC and XLA_FLAGS when it first computes.
        for name in ("JAX_PLATFORMS", *CACHE_VARIABLES):
            jax.config.update(name.lower(), _number_or_text(variables[name]))


def _number_or_text(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text
