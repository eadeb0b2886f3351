"""Workers that die: their work is sent again, to a replacement prepared like the first, a bounded number of times."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from ray.exceptions import OwnerDiedError
from ray_fakes import Fickle, Mortal, Scribe, Stillborn

from contracts.errors import DeadlineError, WeightsError, WorkerLostError
from contracts.wire import encode_tree
from pipeline.testing import fake_request, fake_weights
from pipeline.workers.spec import WorkerSpec


def test_an_item_whose_worker_died_is_written_again_by_a_prepared_replacement(make_pool, tmp_path):
    mortal = make_pool(WorkerSpec(Mortal, (str(tmp_path / "died"), 1)), 1)
    prepared = mortal.pool.prepare("join", "prepared")
    version = mortal.published(0)
    handles = [mortal.submit("generate", fake_request(0, item, version)) for item in range(3)]
    rollouts = mortal.finish(handles)
    oracle = Scribe(name="oracle")
    oracle.load(version, encode_tree(fake_weights()), 1)
    assert [r.digest for r in rollouts] == [oracle.generate(fake_request(0, item, version)).digest for item in range(3)]
    assert [r.provenance.worker for r in rollouts] == ["rollout-0", "rollout-0.1", "rollout-0.1"]
    assert [r.provenance.item for r in rollouts] == [0, 1, 2]
    (event,) = mortal.recorder.of_kind("replace")
    assert (event["worker"], event["replacement"]) == ("rollout-0", "rollout-0.1")
    assert event["at"] == "rollout.generate(fake/0/1)" and event["reason"]
    assert mortal.finish(prepared) == [("prepared",)]
    # The first load was the dead worker's; the replacement's own has a newer intent.
    assert mortal.ask("history") == [(2, 0)]


def test_a_call_that_kills_every_worker_ends_the_run(make_pool, monkeypatch):
    monkeypatch.setattr("actors.pool.MAX_LOSSES", 2)
    victims = make_pool(WorkerSpec(Scribe, ()), 1)
    with pytest.raises(WorkerLostError, match=r"rollout-0.1 died at rollout.die\(\): 2 losses"):
        victims.ask("die")
    assert len(victims.recorder.of_kind("replace")) == 1


def test_a_dead_trainer_is_not_replaced_since_its_state_died_with_it(make_pool):
    trainer = make_pool(WorkerSpec(Scribe, ()), 1, role="trainer", replaceable=False)
    with pytest.raises(WorkerLostError, match=r"trainer-0 died at trainer.die\(\), and its state with it. Resume"):
        trainer.ask("die")
    assert trainer.recorder.of_kind("replace") == []


def test_a_worker_that_dies_while_starting_is_started_again(make_pool, tmp_path):
    once = make_pool(WorkerSpec(Stillborn, (str(tmp_path / "born"),)), 1)
    assert once.ask("rest", 0.0, "alive") == ("rollout-0.1", "alive")
    assert len(once.recorder.of_kind("replace")) == 1


def test_a_replacement_that_answers_its_preparation_otherwise_is_given_no_work(make_pool, tmp_path):
    fickle = make_pool(WorkerSpec(Fickle, (str(tmp_path / "died"),)), 1, role="teacher")
    assert fickle.finish(fickle.pool.prepare("load", {})) == ["first"]
    with pytest.raises(WeightsError, match=r"teacher-0.1.load.* answered second; .* had answered first"):
        fickle.ask("score", None)
    (event,) = fickle.recorder.of_kind("unusable")
    assert event["worker"] == "teacher-0.1"


@ray.remote(num_cpus=0)
class Owner:
    """Owns what it stores: the object dies with this process."""

    def store(self) -> list:
        return [ray.put("lost with its owner" * 10_000)]


def orphan() -> ray.ObjectRef:
    """A reference to an object that is gone."""
    owner = Owner.remote()
    reference = ray.get(owner.store.remote())[0]
    ray.kill(owner)
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        try:
            ray.get(reference)
        except OwnerDiedError:
            return reference
        time.sleep(0.05)
    raise AssertionError("the object outlived its owner")


def test_a_finished_rollout_that_died_with_its_node_is_written_again_for_whoever_needs_it(make_pool):
    """A dead owner stands in for the node: in both cases the callee finds that its argument is gone."""
    scribe = make_pool(WorkerSpec(Scribe, ()), 1)
    version = scribe.published(0)
    rollout = scribe.submit("generate", fake_request(0, 1, version))
    before = scribe.finish([rollout])[0]
    rollout.reference = orphan()
    (seen,) = scribe.ask("join", rollout)
    assert seen.digest == before.digest and rollout.attempts == 2
    (event,) = scribe.recorder.of_kind("lost")
    assert event["result"] == "rollout.generate(fake/0/1)"


def test_a_node_that_dies_with_a_finished_result_costs_time_only():
    """A whole node, in a cluster of its own: the result is noticed missing when it is needed, and made again elsewhere."""
    program = Path(__file__).parent / "fakes" / "node_loss.py"
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert seen["total"] == 1_000_000 * 999_999 / 2
    assert [event["kind"] for event in seen["events"]] == ["lost", "replace"]
    assert seen["events"][0]["result"] == "rollout.big()" and seen["events"][1]["at"] == "rollout.big()"


def test_a_replacement_that_does_not_start_in_time_is_named_with_what_it_asked_for(make_pool, monkeypatch):
    monkeypatch.setattr("actors.waiter.LONGEST_SLEEP", 0.05)
    late = make_pool(WorkerSpec(Scribe, ()), 1)
    late.pool._start_deadline = 0.01
    with pytest.raises(
        DeadlineError, match=r"rollout-0.1 took a dead worker's place .* each rollout worker asks for CPU"
    ):
        late.ask("die")
