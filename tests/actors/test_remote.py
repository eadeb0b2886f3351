"""What an actor asks of the cluster, the environment that its process gets, and where it refuses to run."""

import os

import pytest
import ray
from ray.exceptions import GetTimeoutError
from ray_fakes import Scribe

from actors.handles import fetch
from actors.remote import actor_options, asked, check_platform, environment
from contracts.errors import ConfigError, DeadlineError
from pipeline.config import RoleSettings, RunnerSettings
from pipeline.workers.spec import WorkerSpec

RUNNER = RunnerSettings(visible_cores=3)


@pytest.fixture
def driver(monkeypatch):
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/some/cache")


def test_a_worker_sees_the_cores_of_the_config_and_the_flags_of_the_driver(driver):
    assert environment(RoleSettings(), RUNNER) == {
        "JAX_COMPILATION_CACHE_DIR": "/some/cache",
        "JAX_PLATFORMS": "cpu",
        "NPROC": "3",
        "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true",
    }


def test_a_worker_that_shares_a_gpu_computes_deterministically_in_its_share_of_memory(driver):
    shared = RoleSettings(num_gpus=0.5, platform="cuda", memory_fraction=0.4)
    variables = environment(shared, RUNNER)
    assert variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.4" and variables["JAX_PLATFORMS"] == "cuda"
    assert variables["XLA_FLAGS"].split() == ["--xla_cpu_multi_thread_eigen=true", "--xla_gpu_deterministic_ops=true"]


def test_ray_is_asked_to_restart_and_to_retry_nothing():
    """With retries, a reference published at version 5 has been seen to return version-0 weights."""
    options = actor_options(RoleSettings(num_cpus=2.0, resources={"TPU": 4.0}), RUNNER)
    assert (options["max_restarts"], options["max_task_retries"]) == (0, 0)
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (2.0, 0.0, {"TPU": 4.0})


def test_what_a_role_asks_for_is_named_as_ray_counts_it():
    assert asked(RoleSettings(num_cpus=0.5, num_gpus=1.0, platform="cuda")) == {"CPU": 0.5, "GPU": 1.0}
    assert asked(RoleSettings(resources={"TPU": 4.0})) == {"CPU": 0.25, "TPU": 4.0}


def test_a_worker_on_another_platform_than_configured_refuses_to_start(monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    check_platform("rollout-0", RoleSettings(), 2)
    with pytest.raises(ConfigError, match=r"rollout-0 must run on cuda; JAX runs on \['cpu'\]"):
        check_platform("rollout-0", RoleSettings(num_gpus=1.0, platform="cuda"), 2)


def test_a_worker_that_sees_another_number_of_cores_refuses_to_start(monkeypatch):
    monkeypatch.setenv("NPROC", "8")
    with pytest.raises(ConfigError, match=r"must see 2 cores .* NPROC is '8'"):
        check_platform("rollout-0", RoleSettings(), 2)


def test_the_environment_reaches_the_process_before_its_jax(make_pool, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    seen = make_pool(WorkerSpec(Scribe, ()), 1).ask("surroundings")
    assert (seen["NPROC"], seen["OMP_NUM_THREADS"], seen["platform"]) == ("2", "1", "cpu")
    assert seen["devices"] == "2"


def test_a_result_that_does_not_arrive_ends_the_wait_and_is_named(monkeypatch):
    def never(reference, timeout):
        assert timeout == 2.0
        raise GetTimeoutError("get timed out")

    monkeypatch.setattr(ray, "get", never)
    with pytest.raises(DeadlineError, match=r"the result of rollout\.generate\(fake/1/0\) exists .* within 2 s"):
        fetch(ray.ObjectRef.nil(), "rollout.generate(fake/1/0)", 2.0)
