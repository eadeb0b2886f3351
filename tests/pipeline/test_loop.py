"""The loop, in virtual time and in process, against a plain for loop that knows no pools."""

import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import CheckpointError, DeadlineError
from contracts.freshness import FreshnessPolicy
from contracts.roles import Runtime
from contracts.weights import WeightVersion
from contracts.wire import encode_tree
from pipeline.config import parse_config
from pipeline.inline import InlineRuntime
from pipeline.loop import Loop, reduce_statistics
from pipeline.testing import (
    RUN_ID,
    FakeRolloutWorker,
    FakeTeacher,
    FakeTrainer,
    ListRecorder,
    fake_request,
    fake_version,
    fake_weights,
)
from pipeline.virtual_time import VirtualRuntime, fake_runtime
from pipeline.workers.spec import WorkerSpec, WorkerSpecs

ITEMS = 3
UNIT = {"generate": 4, "score": 1, "accumulate": 2, "update": 1, "publish": 1}


def plain_run(lag: int, steps: int, *, items: int = ITEMS, frozen: bool = False, skips=frozenset()) -> WeightVersion:
    """Generate, score, train, one after another, each step with the weights of ``lag`` steps ago."""
    trainer, teacher = FakeTrainer(FreshnessPolicy(RUN_ID, lag, frozen), skips), FakeTeacher()
    history = [(trainer.versions[0], trainer.publish())]
    for step in range(steps):
        version, tree = history[0] if frozen or step < lag else history[step - lag]
        writer = FakeRolloutWorker()
        writer.load(version, tree, 0)
        for item in range(items):
            rollout = writer.generate(fake_request(step, item, version, items=items))
            trainer.accumulate(rollout, teacher.score(rollout))
        history.append((trainer.update().version, trainer.publish()))
    return history[-1][0]


def loop_on(runtime: Runtime, policy: FreshnessPolicy, steps: int, **settings) -> Loop:
    items = settings.setdefault("micro_batches", ITEMS)
    return Loop(
        **{
            "request": partial(fake_request, items=items),
            "policy": policy,
            "runtime": runtime,
            "recorder": ListRecorder(),
            "version": fake_version(0, fake_weights()),
            "steps": steps,
            "deadline": 1000.0,
        }
        | settings
    )


def virtual_loop(lag: int, steps: int, *, workers: int = 1, durations=None, frozen=False, **settings) -> Loop:
    policy = FreshnessPolicy(RUN_ID, lag, frozen)
    return loop_on(
        fake_runtime(policy, rollout_workers=workers, durations=durations or UNIT), policy, steps, **settings
    )


def jitter(seed: int, method: str):
    return lambda step, item: random.Random(f"{seed} {method} {step} {item}").randrange(9)


@settings(max_examples=40, deadline=None)
@given(
    lag=st.integers(0, 3),
    items=st.integers(1, 4),
    workers=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    seed=st.integers(0, 2**16),
)
def test_no_timing_and_no_number_of_workers_changes_the_final_weights(lag, items, workers, seed):
    policy = FreshnessPolicy(RUN_ID, lag)
    durations = {method: jitter(seed, method) for method in (*UNIT, "load")}
    runtime = fake_runtime(policy, rollout_workers=workers[0], teacher_workers=workers[1], durations=durations)
    loop = loop_on(runtime, policy, 5, micro_batches=items)
    assert loop.run() == plain_run(lag, 5, items=items)
    assert loop.recorder.of_kind("refuse") == []


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("workers", [1, 3])
def test_in_process_the_final_weights_are_those_of_the_plain_loop_too(lag, workers):
    policy = FreshnessPolicy(RUN_ID, lag)
    config = parse_config(
        {
            "run": {"name": "test"},
            "task": {"name": "split", "prompt_length": 1, "completion_length": 3},
            "teacher": {"steps": 1},
            "diffusion": {"block_size": 3},
            "training": {"steps": 1},
            "runner": {"kind": "inline", "rollout": {"count": workers}},
        }
    )
    roles = (WorkerSpec(FakeRolloutWorker, ()), WorkerSpec(FakeTeacher, ()), WorkerSpec(FakeTrainer, (policy,)))
    runtime = InlineRuntime(WorkerSpecs(*roles), config)
    runtime.rollout.publish(fake_version(0, fake_weights()), runtime.put("weights 0", encode_tree(fake_weights())))
    assert loop_on(runtime, policy, 4).run() == plain_run(lag, 4)


def test_frozen_writes_every_step_with_the_first_weights():
    loop = virtual_loop(0, 4, frozen=True)
    assert loop.run() == plain_run(0, 4, frozen=True) != plain_run(0, 4)


def writers(loop: Loop) -> list[set[str]]:
    updates = loop.recorder.of_kind("update")
    return [{part["written_by"].split("@")[1].split(":")[0] for part in update["items"]} for update in updates]


@pytest.mark.parametrize(
    ("lag", "frozen", "expected"),
    [(0, False, "01234"), (1, False, "00123"), (2, False, "00012"), (3, False, "00001"), (0, True, "00000")],
)
def test_lag_is_a_schedule(lag, frozen, expected):
    loop = virtual_loop(lag, 5, workers=3, frozen=frozen)
    loop.run()
    assert writers(loop) == [{step} for step in expected]
    assert [values["lag"] for _, values in loop.recorder.values] == [
        step - int(writer) for step, writer in enumerate(expected)
    ]


@pytest.mark.parametrize(("lag", "workers"), [(0, 1), (0, 4), (2, 4)])
def test_items_are_trained_in_index_order_whatever_order_they_are_written_in(lag, workers):
    durations = UNIT | {"generate": lambda step, item: 20 - 6 * item}
    loop = virtual_loop(lag, 3, workers=workers, durations=durations)
    loop.run()
    assert [[part["item"] for part in update["items"]] for update in loop.recorder.of_kind("update")] == [[0, 1, 2]] * 3


class Clocked(FakeTrainer):
    """Notes the tick at which each call starts."""

    def __init__(self, policy, notes, *, name):
        super().__init__(policy, name=name)
        self.notes = notes

    def accumulate(self, rollout, targets):
        self.notes.append((self.step, self.next_item))
        return super().accumulate(rollout, targets)


def test_an_item_is_trained_while_later_items_of_its_step_are_still_being_written():
    notes = []
    policy = FreshnessPolicy(RUN_ID)
    runtime = fake_runtime(policy, durations=UNIT, trainer=WorkerSpec(Clocked, (policy, notes)))
    loop = loop_on(runtime, policy, 1)
    ends = []
    loop.after_step = lambda version: ends.append(runtime.waiter.ticks)
    loop.run()
    # One rollout worker: items written at 4, 8, 12; scored 1 later; two trained before the last is there.
    assert notes == [(0, 0), (0, 1), (0, 2)] and ends == [12 + 1 + 2 + 1 + 1]
    one_after_another = 3 * 4 + 3 * 1 + 3 * 2 + 1 + 1
    assert ends[0] < one_after_another


def test_a_teacher_scores_what_is_ready_and_does_not_wait_for_a_lower_index():
    policy = FreshnessPolicy(RUN_ID)
    durations = UNIT | {"generate": lambda step, item: (20, 1)[item], "score": 5}
    runtime = fake_runtime(policy, rollout_workers=2, durations=durations)
    loop = loop_on(runtime, policy, 1, micro_batches=2)
    loop.run()
    # Item 1 is scored in the shadow of item 0: 20 + 5 + two accumulations + update + publish.
    assert runtime.waiter.ticks == 20 + 5 + 2 * 2 + 1 + 1


def requested_before_any_result(loop: Loop) -> list[tuple[int, int, int]]:
    """(step, item, step of the writing version) of each request made at once."""
    made = []
    request, wait = loop.request, loop.runtime.waiter.wait

    def note(step, item, version):
        made.append((step, item, version.step))
        return request(step, item, version)

    def first_wait(handles, timeout):
        seen.extend(made)
        loop.runtime.waiter.wait = wait
        return wait(handles, timeout)

    seen: list[tuple[int, int, int]] = []
    loop.request, loop.runtime.waiter.wait = note, first_wait
    loop.run()
    assert len(set(made)) == len(made)
    return seen


def resumed_loop(lag: int, at: int, steps: int, *, workers: int = 2) -> Loop:
    """A loop that goes on at step ``at`` with the versions that a checkpoint of that step carries."""
    first = virtual_loop(lag, at, workers=workers)
    version = first.run()
    return loop_on(first.runtime, first.policy, steps, version=version, versions=dict(first.versions))


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_at_any_resume_step_the_first_capacity_is_that_of_the_open_step_and_the_lag(lag, at):
    requests = requested_before_any_result(resumed_loop(lag, at, 12))
    assert requests == [(step, item, max(0, step - lag)) for step in range(at, at + lag + 1) for item in range(ITEMS)]


def test_nothing_is_requested_beyond_the_last_step():
    assert requested_before_any_result(virtual_loop(3, 2)) == [(s, i, 0) for s in range(2) for i in range(ITEMS)]


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_resumed_run_ends_with_the_weights_of_one_that_never_stopped(lag, at):
    loop = resumed_loop(lag, at, 6)
    assert loop.run() == plain_run(lag, 6)


@pytest.mark.parametrize(("lag", "frozen", "missing"), [(2, False, r"\[1, 2\]"), (0, True, r"\[0\]")])
def test_going_on_without_the_versions_that_lag_behind_is_refused_before_anything_runs(lag, frozen, missing):
    policy = FreshnessPolicy(RUN_ID, lag, frozen)
    with pytest.raises(CheckpointError, match=missing):
        loop_on(fake_runtime(policy), policy, 9, version=fake_version(3, fake_weights()))


@pytest.mark.parametrize(("lag", "frozen"), [(0, False), (1, False), (2, False), (0, True)])
def test_published_versions_are_kept_as_long_as_a_step_may_be_written_by_them_and_no_longer(lag, frozen):
    loop = virtual_loop(lag, 6, frozen=frozen)
    kept = []
    loop.after_step = lambda version: kept.append((set(loop.versions), loop.runtime.rollout.published.steps))
    loop.run()
    expected = [{0, step} if frozen else set(range(max(0, step - lag), step + 1)) for step in range(1, 7)]
    assert kept == [(steps, steps) for steps in expected]


def test_a_skipped_window_still_advances_and_publishes_its_unchanged_weights():
    policy = FreshnessPolicy(RUN_ID)
    trainer = WorkerSpec(FakeTrainer, (policy, frozenset({1, 2})))
    loop = loop_on(fake_runtime(policy, trainer=trainer), policy, 5)
    seen = []
    loop.after_step = lambda version: seen.append((version.step, version.fingerprint))
    assert loop.run() == plain_run(0, 5, skips=frozenset({1, 2}))
    steps, prints = zip(*seen, strict=True)
    assert steps == (1, 2, 3, 4, 5)
    assert prints[0] == prints[1] == prints[2] and len(set(prints)) == 3
    assert [event["skipped"] for event in loop.recorder.of_kind("update")] == ["", "zero weight", "zero weight", "", ""]
    assert writers(loop) == [{"0"}, {"1"}, {"2"}, {"3"}, {"4"}]


def test_after_step_sees_each_version_once_when_it_can_already_be_used():
    loop = virtual_loop(1, 4)
    seen = []

    def use(version):
        published, tree = loop.runtime.rollout.published.load_arguments(version)[:2]
        seen.append(version.step)
        assert published == version == loop.version and tree.done

    loop.after_step = use
    loop.run()
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("slow", "name"),
    [
        ("generate", r"rollout\.generate\(fake/1/0\)"),
        ("score", r"teacher\.score\(rollout\.generate\(fake/1/0\)\)"),
        ("accumulate", r"trainer\.accumulate\(rollout\.generate\(fake/1/0\), teacher\.score"),
        ("update", r"trainer\.update\(\)"),
        ("publish", r"trainer\.publish\(\)"),
    ],
)
def test_a_wait_that_runs_out_names_what_it_waited_for(slow, name):
    durations = UNIT | {slow: lambda step, item: 10**6 if step == 1 else 1}
    with pytest.raises(DeadlineError, match=name):
        virtual_loop(0, 3, durations=durations, deadline=50.0).run()


def test_the_deadline_is_for_one_result_and_not_for_the_run():
    loop = virtual_loop(0, 20, deadline=5.0)
    loop.run()
    assert loop.runtime.waiter.ticks > 20 * 5


def test_an_error_in_a_worker_ends_the_run_as_itself():
    class Broken(FakeRolloutWorker):
        def generate(self, request):
            raise ZeroDivisionError("in the model")

    policy = FreshnessPolicy(RUN_ID)
    with pytest.raises(ZeroDivisionError, match="in the model"):
        loop_on(fake_runtime(policy, rollout=WorkerSpec(Broken, ())), policy, 2).run()


@pytest.mark.parametrize("lag", [0, 1])
def test_every_tick_of_a_run_is_waited_for_one_stage(lag):
    loop = virtual_loop(lag, 6, workers=2, durations=UNIT | {"load": 1})
    loop.run()
    total = loop.runtime.waiter.ticks
    assert sum(loop.waited.values()) == total
    assert all(loop.waited[stage] > 0 for stage in ("rollout", "teacher", "trainer"))
    assert sum(values["seconds"] for _, values in loop.recorder.values) == total - UNIT["publish"]
    trainer = loop.runtime.trainer.busy
    assert (trainer["accumulate"], trainer["update"], trainer["publish"]) == (6 * ITEMS * 2, 6, 6)
    # The trainer is never waited for longer than it works; at lag 1 less, since others then work beside it.
    assert loop.waited["trainer"] == sum(trainer.values())


def test_a_step_reports_rows_and_statistics_of_all_its_items():
    loop = virtual_loop(0, 2)
    loop.run()
    for step, values in loop.recorder.values:
        assert (values["rows_trained"], values["rows_weighted"]) == (2 * ITEMS, 2 * ITEMS), step
        assert values["rollout/completion_length"] == 3.0 and values["rollout/tokens"] == 3.0 * 2 * ITEMS


class Gapped(FakeTrainer):
    """Reports a stated gap for each step."""

    gaps = (0.5, 0.01, float("nan"), 0.02)

    def update(self):
        report = super().update()
        return replace(report, metrics={**report.metrics, "distill/log_prob_gap": self.gaps[report.step]})


@pytest.mark.parametrize(("lag", "expected"), [(0, [0, 2, 3]), (1, [0])])
def test_a_gap_beyond_rounding_is_an_alarm_where_the_trainers_own_weights_wrote_the_step(lag, expected):
    policy = FreshnessPolicy(RUN_ID, lag)
    runtime = fake_runtime(policy, trainer=WorkerSpec(Gapped, (policy,)))
    loop = loop_on(runtime, policy, 4, gap_tolerance=0.01)
    loop.run()
    alarms = loop.recorder.of_kind("alarm")
    assert [alarm["step"] for alarm in alarms] == expected
    assert (alarms[0]["value"], alarms[0]["tolerance"]) == (0.5, 0.01)


def test_the_loop_opens_no_step_when_all_are_closed():
    loop = virtual_loop(0, 0)
    assert loop.run() == fake_version(0, fake_weights())
    assert loop.runtime.waiter.ticks == 0 and loop.recorder.events == []


class Part:
    def __init__(self, **statistics):
        self.statistics = statistics


def test_statistics_are_divided_once_after_they_are_added():
    parts = [Part(a=(1.0, 1.0), b=(0.0, 0.0)), Part(a=(1.0, 9.0)), Part(c=(3.0, 2.0))]
    # The mean of the means would be 0.556.
    assert reduce_statistics(parts) == {"a": 0.2, "c": 1.5}


def test_runtimes_have_the_shape_of_the_protocol():
    policy = FreshnessPolicy(RUN_ID)
    assert isinstance(fake_runtime(policy), Runtime) and isinstance(fake_runtime(policy), VirtualRuntime)
