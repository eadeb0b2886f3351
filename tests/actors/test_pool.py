"""Pools on Ray, of fakes: who gets which work, what is held before it, and what is known in this process."""

import time

import numpy as np
import pytest
import ray
from ray_fakes import Forgetful, Misconfigured, Scribe

from actors.handles import RayHandle
from contracts.errors import (
    ConfigError,
    DeadlineError,
    NotDoneError,
    StaleBatchError,
    VersionNotHeldError,
    WeightsError,
)
from pipeline.testing import fake_request
from pipeline.workers.spec import WorkerSpec


@pytest.fixture(scope="module")
def scribes(make_module_pool):
    """Two workers that no test of this module harms."""
    return make_module_pool(WorkerSpec(Scribe, ()), 2)


def test_a_worker_that_is_busy_is_passed_over(scribes):
    """Chaining work to workers in turn would hold the short pieces behind the long one."""
    long = scribes.submit("rest", 1.5, "long")
    short = [scribes.submit("rest", 0.01, f"short {index}") for index in range(6)]
    names = {name for name, _ in scribes.finish(short)}
    assert not long.done
    busy, label = scribes.finish([long])[0]
    assert label == "long" and names == {"rollout-0", "rollout-1"} - {busy}


def test_work_is_started_in_the_order_of_submission(make_pool, scribes):
    order = []
    handles = [scribes.submit("rest", 0.02, str(index)) for index in range(8)]
    waiting = list(handles)
    while waiting:
        done = scribes.waiter.wait(waiting, 30.0)
        order += [int(handle.result()[1]) for handle in done]
        waiting = [handle for handle in waiting if handle not in done]
    # Two workers: each piece ends at most one place away from where it began.
    assert all(abs(place - index) <= 1 for place, index in enumerate(order))


def test_done_handles_come_in_the_order_given(scribes):
    first, second = scribes.submit("rest", 0.3, "a"), scribes.submit("rest", 0.0, "b")
    scribes.finish([first, second])
    assert scribes.waiter.wait([second, first], 5.0) == [second, first]


def test_the_result_of_one_call_reaches_the_next_without_passing_through_this_process(scribes, monkeypatch):
    fetched = []
    get = ray.get
    monkeypatch.setattr(
        ray, "get", lambda reference, **options: fetched.append(get(reference, **options)) or fetched[-1]
    )
    big = scribes.submit("big", 1_000_000)
    scribes.waiter.wait([big], 30.0)
    total = scribes.submit("total", big)
    scribes.waiter.wait([total], 30.0)
    assert all(value is None for value in fetched), "only receipts are fetched"
    assert total.result() == 1_000_000 * 999_999 / 2


def test_a_stored_value_is_sent_as_a_reference_to_every_worker(scribes):
    tree = scribes.stored(np.ones(1000))
    handle = scribes.submit("total", tree)
    assert handle.wire_arguments() == [tree.reference]
    assert scribes.finish([handle]) == [1000.0]


def test_what_a_worker_raises_arrives_as_itself(scribes):
    with pytest.raises(StaleBatchError) as caught:
        scribes.ask("refuse", "written by step 1; due was step 2")
    assert type(caught.value) is StaleBatchError
    assert str(caught.value) == "written by step 1; due was step 2", "the message, not a traceback"
    assert "ray_fakes.py" in str(caught.value.__cause__), "the remote traceback is its cause"


def test_what_one_call_raised_is_raised_by_those_that_were_to_use_it(scribes):
    refused = scribes.submit("refuse", "no")
    scribes.waiter.wait([refused], 30.0)
    user = scribes.submit("join", refused)
    assert scribes.waiter.wait([user], 30.0) == [user]
    with pytest.raises(StaleBatchError, match="no"):
        user.result()
    assert user.attempts == 0, "it was never sent"


def test_a_call_of_the_same_pool_may_use_a_result_that_is_not_there_yet(scribes):
    first = scribes.submit("rest", 0.2, "first")
    second = scribes.submit("join", first)
    assert scribes.finish([second])[0][0][1] == "first"


def test_a_handle_of_another_pool_that_is_not_done_is_refused_at_once(scribes):
    foreign = RayHandle("teacher.score(r/0/1)")
    with pytest.raises(NotDoneError, match=r"rollout.join\(teacher.score.* before teacher.score"):
        scribes.submit("join", foreign)


def test_a_result_asked_for_too_early_is_named(scribes):
    handle = scribes.submit("rest", 0.0, "x")
    with pytest.raises(NotDoneError, match=r"rollout.rest\(\) is not done"):
        handle.result()
    scribes.finish([handle])


def test_a_wait_that_runs_out_names_what_was_waited_for_and_where_it_is(scribes):
    slow = [scribes.submit("rest", 1.0, "slow") for _ in range(2)]
    version = scribes.published(0)
    queued = scribes.submit("generate", fake_request(0, 3, version))
    with pytest.raises(DeadlineError, match=r"within 0.2 s.*generate\(fake/0/3\) \(queued; rollout-0 at rollout.rest"):
        scribes.waiter.wait([queued], 0.2)
    scribes.finish([*slow, queued])


def test_a_version_is_loaded_before_the_first_request_that_names_it_and_intents_rise(make_pool):
    only = make_pool(WorkerSpec(Scribe, ()), 1)
    versions = [only.published(step, shift=step) for step in (0, 1)]
    for step in (0, 0, 1, 0):
        rollout = only.ask("generate", fake_request(step, 0, versions[step]))
        assert rollout.provenance.version == versions[step]
    loads = only.ask("history")
    assert [step for _, step in loads] == [0, 1, 0], "one load per change of version, an older one included"
    assert [intent for intent, _ in loads] == sorted({intent for intent, _ in loads})

    # Published anew for the same step: the tree that it names now.
    again = only.published(1, shift=7.0)
    assert only.ask("generate", fake_request(1, 0, again)).provenance.version == again

    only.pool.forget(frozenset({1}))
    with pytest.raises(VersionNotHeldError, match="Publish a version before it is named"):
        only.ask("generate", fake_request(0, 0, versions[0]))
    with pytest.raises(VersionNotHeldError):
        only.ask("generate", fake_request(1, 0, versions[1]))


def test_a_worker_that_holds_the_version_is_preferred(scribes):
    versions = [scribes.published(step, shift=step) for step in (0, 1)]
    first = [scribes.submit("generate", fake_request(step, 0, versions[step])) for step in (0, 1)]
    writers = {step: rollout.provenance.worker for step, rollout in enumerate(scribes.finish(first))}
    for step in (1, 0, 1):
        rollout = scribes.ask("generate", fake_request(step, 1, versions[step]))
        assert rollout.provenance.worker == writers[step]


def test_a_worker_that_does_not_hold_what_was_published_is_not_asked_to_write(make_pool):
    liar = make_pool(WorkerSpec(Forgetful, ()), 1)
    version = liar.published(0)
    with pytest.raises(WeightsError, match=f"given weights {version} and acknowledged fake@0:0000"):
        liar.ask("generate", fake_request(0, 0, version))


def test_preparations_run_on_every_worker_before_its_work(scribes):
    handles = scribes.pool.prepare("rest", 0.2, "ready")
    after = scribes.submit("rest", 0.0, "after")
    assert scribes.finish(handles) == [("rollout-0", "ready"), ("rollout-1", "ready")]
    scribes.finish([after])


def test_a_worker_that_cannot_be_made_says_so_in_its_own_words(make_pool):
    with pytest.raises(ConfigError, match="rollout-0 has no use for this config"):
        make_pool(WorkerSpec(Misconfigured, ()), 1)


def test_a_call_costs_milliseconds(scribes):
    scribes.ask("join")
    before = time.perf_counter()
    for _ in range(50):
        scribes.ask("join")
    assert (time.perf_counter() - before) / 50 < 0.1
