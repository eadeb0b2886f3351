"""Pools in this process keep the promises of contracts/roles.py, and Ray's rules for values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contracts.errors import (
    DeadlineError,
    NotDoneError,
    StaleBatchError,
    VersionNotHeldError,
    WeightsError,
)
from contracts.roles import Handle, Runtime
from contracts.wire import decode_tree, encode_tree
from pipeline.config import parse_config
from pipeline.inline import InlineRuntime
from pipeline.testing import FakeRolloutWorker, fake_request, fake_version, fake_weights
from pipeline.workers.spec import WorkerSpec, WorkerSpecs


class Scribe:
    """A worker that notes its calls on a list, shared by all that were made for one test."""

    calls: list[tuple]

    def __init__(self, *, name: str):
        self.name = name
        self.numbers = np.zeros(3, np.float32)
        self.on_device = jnp.zeros(3)

    def note(self, *arguments):
        self.calls.append((self.name, *arguments))
        return arguments

    def numbers_held(self):
        return {"numbers": self.numbers, "nested": [self.numbers.T]}

    def move_numbers(self):
        self.numbers += 1.0

    def weights_held(self):
        return encode_tree({"weights": self.on_device})

    def move_weights(self):
        self.on_device = jax.jit(lambda x: x + 1.0, donate_argnums=0)(self.on_device)

    def write_into(self, values):
        values["numbers"][0] = 9.0

    def append_to(self, values):
        values["nested"].append(1)
        return len(values["nested"])

    def refuse(self, *_):
        raise StaleBatchError("too old")

    def interrupt(self):
        raise KeyboardInterrupt

    def make_a_function(self):
        return lambda: None


class Liar(FakeRolloutWorker):
    """From step 1 on, holds other weights than those it was given."""

    def load(self, version, tree, intent):
        if version.step:
            tree = encode_tree({name: array + 1 for name, array in decode_tree(tree).items()})
        return super().load(version, tree, intent)


def config(rollout: int = 1, teacher: int = 1):
    return parse_config(
        {
            "run": {"name": "test"},
            "task": {"name": "split", "prompt_length": 2, "completion_length": 2},
            "teacher": {"steps": 1},
            "diffusion": {"block_size": 2},
            "training": {"steps": 1},
            "runner": {
                "kind": "inline",
                "rollout": {"count": rollout},
                "teacher": {"count": teacher},
            },
        }
    )


@pytest.fixture
def start(monkeypatch):
    def start(writer: type = Scribe, **counts: int) -> InlineRuntime:
        monkeypatch.setattr(Scribe, "calls", [], raising=False)
        scribe = WorkerSpec(Scribe, ())
        return InlineRuntime(WorkerSpecs(WorkerSpec(writer, ()), scribe, scribe), config(**counts))

    return start


def finish(runtime: Runtime, handle: Handle):
    assert handle in runtime.waiter.wait([handle], 1.0)
    return handle.result()


def test_handles_among_the_arguments_arrive_as_their_values(start):
    runtime = start()
    written = runtime.rollout.submit("note", 1)
    runtime.waiter.wait([written], 1.0)
    stored = runtime.put("two", {"two": 2})
    assert finish(runtime, runtime.trainer.submit("note", written, stored, 3)) == ((1,), {"two": 2}, 3)


def test_nothing_runs_before_it_is_waited_for(start):
    runtime = start()
    handle = runtime.rollout.submit("note", 1)
    assert Scribe.calls == []
    finish(runtime, handle)
    assert Scribe.calls == [("rollout-0", 1)]


def test_one_wait_makes_one_call_and_reports_what_is_done_in_the_order_given(start):
    runtime = start()
    first, second = runtime.rollout.submit("note", 1), runtime.rollout.submit("note", 2)
    assert runtime.waiter.wait([second, first], 1.0) == [first]
    assert Scribe.calls == [("rollout-0", 1)]
    assert runtime.waiter.wait([second], 1.0) == [second]
    assert runtime.waiter.wait([second, first], 1.0) == [second, first]


def test_work_of_one_pool_starts_in_the_order_of_submission(start):
    runtime = start()
    handles = [runtime.rollout.submit("note", number) for number in range(4)]
    finish(runtime, handles[3])
    assert [number for _, number in Scribe.calls] == [0, 1, 2, 3]


def test_the_latest_stage_runs_first(start):
    runtime = start()
    handles = [pool.submit("note", 1) for pool in (runtime.rollout, runtime.teacher, runtime.trainer)]
    for _ in handles:
        handles = [handle for handle in handles if handle not in runtime.waiter.wait(handles, 1.0)]
    assert [name for name, _ in Scribe.calls] == ["trainer-0", "teacher-0", "rollout-0"]


def test_only_the_pool_of_a_waited_handle_runs(start):
    runtime = start()
    runtime.trainer.submit("note", 1)
    finish(runtime, runtime.rollout.submit("note", 2))
    assert Scribe.calls == [("rollout-0", 2)]


def test_workers_of_a_pool_take_turns(start):
    runtime = start(rollout=3)
    for number in range(5):
        finish(runtime, runtime.rollout.submit("note", number))
    assert [name for name, _ in Scribe.calls] == ["rollout-0", "rollout-1", "rollout-2", "rollout-0", "rollout-1"]


def test_prepare_reaches_every_worker_once_before_later_work(start):
    runtime = start(rollout=2)
    handles = runtime.rollout.prepare("note", "ready")
    later = runtime.rollout.submit("note", "work")
    finish(runtime, later)
    assert Scribe.calls == [("rollout-0", "ready"), ("rollout-1", "ready"), ("rollout-0", "work")]
    assert [handle.result() for handle in handles] == [("ready",), ("ready",)]
    assert [handle.name for handle in handles] == ["rollout-0.note()", "rollout-1.note()"]


def test_a_result_is_not_to_be_had_before_its_wait(start):
    handle = start().rollout.submit("note", 1)
    with pytest.raises(NotDoneError, match=r"rollout\.note\(\) is not done; wait for it"):
        handle.result()


def test_a_handle_of_another_pool_must_be_done_before_it_is_an_argument(start):
    runtime = start()
    pending = runtime.rollout.submit("note", 1)
    with pytest.raises(NotDoneError, match=r"teacher\.note\(rollout\.note\(\)\) was submitted before"):
        runtime.teacher.submit("note", pending)


def test_a_handle_of_the_same_pool_need_not_be_done(start):
    runtime = start(rollout=2)
    pending = runtime.rollout.submit("note", 1)
    assert finish(runtime, runtime.rollout.submit("note", pending)) == ((1,),)


def test_an_error_is_raised_by_result_and_by_the_result_of_all_that_used_it(start):
    runtime = start()
    refused = runtime.rollout.submit("refuse")
    assert runtime.waiter.wait([refused], 1.0) == [refused]
    used = runtime.teacher.submit("note", refused)
    assert runtime.waiter.wait([used], 1.0) == [used]
    for handle in (refused, used):
        with pytest.raises(StaleBatchError, match="too old"):
            handle.result()
    assert Scribe.calls == []


def test_a_keyboard_interrupt_is_nobodys_result(start):
    runtime = start()
    with pytest.raises(KeyboardInterrupt):
        runtime.waiter.wait([runtime.rollout.submit("interrupt")], 1.0)


def test_a_wait_for_nothing_or_for_a_closed_pool_names_itself_and_ends(start):
    runtime = start()
    with pytest.raises(DeadlineError, match="nothing"):
        runtime.waiter.wait([], 1.0)
    handle = runtime.rollout.submit("note", fake_request(3, 1, fake_version(3, fake_weights())))
    runtime.close()
    with pytest.raises(DeadlineError, match=r"rollout\.note\(fake/3/1\)"):
        runtime.waiter.wait([handle], 1.0)


def test_arrays_arrive_read_only_in_containers_of_the_receivers_own(start):
    runtime = start()
    values = runtime.rollout.submit("numbers_held")
    held = finish(runtime, values)
    assert not held["numbers"].flags.writeable and not held["nested"][0].flags.writeable
    assert np.shares_memory(held["numbers"], values.result()["numbers"])
    with pytest.raises(ValueError, match="read-only"):
        finish(runtime, runtime.teacher.submit("write_into", values))
    assert finish(runtime, runtime.teacher.submit("append_to", values)) == 2
    assert finish(runtime, runtime.teacher.submit("append_to", values)) == 2


def test_an_argument_arrives_as_it_was_when_it_was_submitted(start):
    runtime = start()
    numbers = np.zeros(3)
    handle = runtime.rollout.submit("note", numbers)
    numbers += 1.0
    (seen,) = finish(runtime, handle)
    np.testing.assert_array_equal(seen, np.zeros(3))
    assert not Scribe.calls[0][1].flags.writeable


def test_what_a_worker_returned_stays_when_the_worker_moves_on(start):
    runtime = start()
    numbers = runtime.rollout.submit("numbers_held")
    weights = runtime.rollout.submit("weights_held")
    finish(runtime, weights)
    finish(runtime, runtime.rollout.submit("move_numbers"))
    finish(runtime, runtime.rollout.submit("move_weights"))
    np.testing.assert_array_equal(numbers.result()["numbers"], np.zeros(3))
    np.testing.assert_array_equal(decode_tree(weights.result())["weights"], np.zeros(3))
    after = runtime.rollout.submit("weights_held")
    np.testing.assert_array_equal(decode_tree(finish(runtime, after))["weights"], np.ones(3))


def test_a_result_that_could_not_be_sent_is_an_error_here_too(start):
    runtime = start()
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        finish(runtime, runtime.rollout.submit("make_a_function"))


def tree_of(step: int) -> dict[str, np.ndarray]:
    return {"weights": fake_weights()["weights"] + np.float32(step)}


def publish(runtime: Runtime, step: int, weights=None):
    weights = tree_of(step) if weights is None else weights
    version = fake_version(step, weights)
    runtime.rollout.publish(version, runtime.put(f"weights {step}", encode_tree(weights)))
    return version


def generate(runtime: Runtime, version, item: int = 0):
    return finish(runtime, runtime.rollout.submit("generate", fake_request(version.step, item, version)))


def loads(runtime: InlineRuntime) -> list[list[tuple[int, int]]]:
    return [worker.loads for worker in runtime.rollout.workers]


def test_a_worker_loads_a_version_once_and_only_before_a_request_that_names_it(start):
    runtime = start(FakeRolloutWorker, rollout=2)
    first = publish(runtime, 0)
    assert loads(runtime) == [[], []]
    assert generate(runtime, first).provenance.version == first
    assert loads(runtime) == [[(1, 0)], []]
    for item in range(1, 4):
        generate(runtime, first, item)
    second = publish(runtime, 1)
    generate(runtime, first)
    assert generate(runtime, second).provenance.version == second
    assert loads(runtime) == [[(1, 0)], [(2, 0), (3, 1)]]


def test_intents_rise_also_when_an_older_version_is_asked_for(start):
    runtime = start(FakeRolloutWorker)
    versions = [publish(runtime, step) for step in range(3)]
    for version in (versions[2], versions[0], versions[1]):
        assert generate(runtime, version).provenance.version == version
    assert loads(runtime) == [[(1, 2), (2, 0), (3, 1)]]


def test_a_version_that_is_not_published_is_refused_with_both_sides(start):
    runtime = start(FakeRolloutWorker)
    published, unknown = publish(runtime, 0), fake_version(1, tree_of(1))
    with pytest.raises(VersionNotHeldError) as caught:
        generate(runtime, unknown)
    assert str(unknown) in str(caught.value) and str(published) in str(caught.value)


def test_other_weights_under_a_published_step_are_refused(start):
    runtime = start(FakeRolloutWorker)
    publish(runtime, 1)
    with pytest.raises(VersionNotHeldError):
        generate(runtime, fake_version(1, tree_of(2)))


def test_a_step_published_again_replaces_what_a_worker_holds(start):
    runtime = start(FakeRolloutWorker)
    before = publish(runtime, 1)
    generate(runtime, before)
    again = publish(runtime, 1, tree_of(7))
    assert generate(runtime, again).provenance.version == again != before
    with pytest.raises(VersionNotHeldError):
        generate(runtime, before)


def test_forgotten_steps_can_no_longer_be_loaded_and_kept_ones_can(start):
    runtime = start(FakeRolloutWorker)
    versions = [publish(runtime, step) for step in range(3)]
    runtime.rollout.forget(frozenset({1, 2}))
    assert generate(runtime, versions[1]).provenance.version == versions[1]
    with pytest.raises(VersionNotHeldError):
        generate(runtime, versions[0])


def test_a_worker_that_holds_other_weights_than_published_writes_nothing(start):
    runtime = start(Liar)
    version = publish(runtime, 1)
    for _ in range(2):
        with pytest.raises(WeightsError, match="acknowledged") as caught:
            generate(runtime, version)
        assert str(version) in str(caught.value)
    assert loads(runtime) == [[(1, 1), (2, 1)]]


def test_after_a_load_that_failed_a_worker_is_not_taken_to_hold_what_it_held_before(start):
    runtime = start(Liar)
    good, bad = publish(runtime, 0), publish(runtime, 1)
    generate(runtime, good)
    with pytest.raises(WeightsError):
        generate(runtime, bad)
    assert generate(runtime, good).provenance.version == good
    assert loads(runtime) == [[(1, 0), (2, 1), (3, 0)]]
