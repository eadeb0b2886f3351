"""What a run decides before JAX computes: the variables of its process and of every worker."""

import pytest

from contracts.errors import ConfigError
from launch.environment import driver_environment, quiet_defaults
from launch.overrides import apply_overrides
from launch.recipes import find
from pipeline.config import parse_config


def variables(**overrides) -> dict[str, str]:
    tree = apply_overrides(find("addition").tree, {key.replace("__", "."): value for key, value in overrides.items()})
    return driver_environment(parse_config(tree))


def test_visible_cores_and_the_cache_of_compiled_programs_come_from_the_config(tmp_path):
    found = variables(runner__visible_cores="3", run__cache=str(tmp_path))
    assert found["NPROC"] == "3"
    assert found["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "compiled")
    assert float(found["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]) == 0


def test_the_driver_of_a_ray_run_leaves_accelerators_to_its_workers():
    role = "{platform: cuda, num_gpus: 1}"
    on_gpus = {f"runner__{name}": role for name in ("rollout", "teacher", "trainer")}
    assert variables(**on_gpus, runner__kind="ray")["JAX_PLATFORMS"] == "cpu"
    inline = variables(**on_gpus, runner__kind="inline")
    assert inline["JAX_PLATFORMS"] == "cuda"
    assert "--xla_gpu_deterministic_ops=true" in inline["XLA_FLAGS"]


def test_one_process_has_one_platform():
    with pytest.raises(ConfigError, match="one platform"):
        variables(runner__kind="inline", runner__teacher__platform="tpu")


def test_token_authentication_is_asked_for_only_where_ray_is_started_here():
    assert quiet_defaults(starts_ray=True)["RAY_AUTH_MODE"] == "token"
    assert "RAY_AUTH_MODE" not in quiet_defaults(starts_ray=False)
