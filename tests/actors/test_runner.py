"""A runtime on Ray: what it refuses to start, whom it leaves alone, and that it computes what one process computes."""

import os
import socket
import time
from functools import partial

import pytest
import ray
from ray_fakes import Mortal, Scribe, run_config

from actors.runner import RayRuntime
from actors.session import RaySession, check_answers, start_ray
from contracts.errors import ConfigError, DeadlineError
from contracts.freshness import FreshnessPolicy
from contracts.wire import encode_tree
from pipeline.inline import InlineRuntime
from pipeline.loop import Loop
from pipeline.testing import RUN_ID, FakeTeacher, FakeTrainer, ListRecorder, fake_request, fake_version, fake_weights
from pipeline.workers.spec import WorkerSpec, WorkerSpecs

ITEMS = 3
CPUS = max(4, os.cpu_count() or 1)
"""Of the Ray of these tests."""


def fake_specs(lag: int = 0, rollout: WorkerSpec | None = None) -> WorkerSpecs:
    policy = FreshnessPolicy(RUN_ID, lag)
    return WorkerSpecs(
        rollout or WorkerSpec(Scribe, ()), WorkerSpec(FakeTeacher, ()), WorkerSpec(FakeTrainer, (policy,))
    )


def run(runtime, lag: int, steps: int = 3):
    """The real loop with fake workers; returns the last version."""
    tree = runtime.put("weights", encode_tree(fake_weights()))
    version = fake_version(0, fake_weights())
    runtime.rollout.publish(version, tree)
    recorder = ListRecorder()
    request = partial(fake_request, items=ITEMS)
    policy = FreshnessPolicy(RUN_ID, lag)
    return Loop(request, policy, runtime, recorder, version, steps, ITEMS, 60.0).run(), recorder


@pytest.fixture(scope="module")
def finished(ray_session, tmp_path_factory):
    """A run at lag 1 on two rollout workers, one of which died at item 2: runtime, last version, what was recorded."""
    heard = ListRecorder()
    mortal = WorkerSpec(Mortal, (str(tmp_path_factory.mktemp("run") / "died"), 2))
    runtime = RayRuntime(fake_specs(1, mortal), run_config(rollout={"count": 2}), heard)
    yield runtime, *run(runtime, 1), heard
    runtime.close()


def test_the_loop_on_ray_ends_with_the_weights_of_the_loop_in_one_process_though_a_worker_died(finished):
    _, version, recorder, heard = finished
    assert version == run(InlineRuntime(fake_specs(1), run_config()), 1)[0]
    assert recorder.of_kind("refuse") == []
    assert [values["lag"] for _, values in recorder.values] == [0.0, 1.0, 1.0]
    assert [event["at"] for event in heard.of_kind("replace")] == ["rollout.generate(fake/0/2)"]


def test_closing_a_runtime_kills_its_own_actors_and_leaves_ray_and_others(finished, make_pool):
    runtime = finished[0]
    other = make_pool(WorkerSpec(Scribe, ()), 1)
    actors = [seat.actor for pool in (runtime.rollout, runtime.teacher, runtime.trainer) for seat in pool._seats]
    runtime.close()
    assert ray.is_initialized() and other.ask("join", "alive") == ("alive",)
    for actor in actors:
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(actor.call.remote("save", []), timeout=10.0)


def test_a_request_that_no_node_can_meet_fails_by_its_deadline_naming_both_sides(ray_session):
    greedy = run_config(rollout={"count": 1, "num_cpus": 64.0}, start_deadline=8.0)
    before = time.monotonic()
    with pytest.raises(
        DeadlineError, match=f"did not start .* 8 s: .*rollout worker asks for CPU 64; .*has CPU {CPUS}"
    ):
        RayRuntime(fake_specs(), greedy, ListRecorder())
    assert time.monotonic() - before < 20.0


def test_a_request_beyond_a_machine_that_will_not_grow_is_refused_at_once(ray_session):
    wanting = run_config(teacher={"count": 1, "resources": {"rubies": 2.0}})
    with pytest.raises(ConfigError, match=f"ask for .*rubies 2; this machine has CPU {CPUS}.* too little of rubies"):
        RayRuntime(fake_specs(), wanting, ListRecorder(), RaySession(opened=False, fixed=True))


def test_a_stale_ray_address_was_dropped(ray_session):
    assert "RAY_ADDRESS" not in os.environ and ray.cluster_resources()["CPU"] == CPUS


def test_an_address_where_nothing_listens_is_refused_within_seconds(monkeypatch):
    """Left to itself, Ray retries for two minutes, then ends the process."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    before = time.monotonic()
    with pytest.raises(DeadlineError, match=r"no Ray head answered at runner.address 127.0.0.1:1 within 5 s"):
        start_ray(run_config(address="127.0.0.1:1").runner)
    assert time.monotonic() - before < 20.0


def test_an_address_where_something_else_listens_is_refused_within_seconds():
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(DeadlineError, match="no Ray head answered"):
        check_answers(f"127.0.0.1:{silent.getsockname()[1]}", seconds=1.0)


def test_a_ray_that_runs_answers(ray_session):
    check_answers(ray.get_runtime_context().gcs_address)


def test_a_ray_client_address_is_refused(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match="from inside the cluster"):
        start_ray(run_config(address="ray://head:10001").runner)


def test_a_second_cluster_in_one_process_is_refused(ray_session):
    with pytest.raises(ConfigError, match=r"runner.address is 10.1.2.3:6379, but .* already connected to Ray at"):
        start_ray(run_config(address="10.1.2.3:6379").runner)


def test_joining_what_runs_opens_nothing_and_so_closes_nothing(ray_session):
    joined = start_ray(run_config(address=ray.get_runtime_context().gcs_address).runner)
    joined.close()
    assert ray.is_initialized() and not joined.opened
