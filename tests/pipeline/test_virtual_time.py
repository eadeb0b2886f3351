"""Virtual time: a call takes the ticks that were said, on a worker that is idle, and nothing else takes any."""

import pytest

from contracts.errors import DeadlineError, NotDoneError, StaleBatchError
from contracts.wire import encode_tree
from pipeline.testing import FakeRolloutWorker, fake_request, fake_version, fake_weights
from pipeline.virtual_time import Stage, VirtualRuntime
from pipeline.workers.spec import WorkerSpec


class Worker:
    def __init__(self, *, name: str):
        self.name = name

    def work(self, *arguments):
        return self.name

    def rest(self, *arguments):
        return self.name

    def refuse(self):
        raise StaleBatchError("too old")


def runtime(workers: int = 1, **durations) -> VirtualRuntime:
    stage = Stage(WorkerSpec(Worker, ()), workers, {"work": 5, "rest": 3} | durations)
    return VirtualRuntime(rollout=stage, teacher=stage, trainer=stage)


def finish(runtime: VirtualRuntime, *handles):
    """The tick at which each is done, by waiting for one after another."""
    ends = []
    for handle in handles:
        assert runtime.waiter.wait([handle], 1000.0) == [handle]
        ends.append(runtime.waiter.ticks)
    return ends


def test_one_worker_takes_calls_one_after_another_and_several_at_once():
    for workers, ends in ((1, [5, 10, 15, 20]), (2, [5, 5, 10, 10]), (3, [5, 5, 5, 10])):
        virtual = runtime(workers)
        handles = [virtual.rollout.submit("work") for _ in range(4)]
        assert finish(virtual, *handles) == ends
        assert virtual.rollout.busy == {"work": 20}


def test_pools_do_not_wait_for_each_other():
    virtual = runtime()
    handles = [pool.submit("work") for pool in (virtual.rollout, virtual.teacher, virtual.trainer)]
    assert virtual.waiter.wait(handles, 1000.0) == handles and virtual.waiter.ticks == 5


def test_the_longest_idle_worker_takes_the_next_call():
    virtual = runtime(2)
    first, second = virtual.rollout.submit("work"), virtual.rollout.submit("rest")
    finish(virtual, second, first)
    third = virtual.rollout.submit("work")
    finish(virtual, third)
    assert [handle.result() for handle in (first, second, third)] == ["rollout-0", "rollout-1", "rollout-1"]


def test_a_call_to_every_worker_waits_for_each_and_holds_up_what_comes_after():
    virtual = runtime(2)
    busy = virtual.rollout.submit("work")
    prepared = virtual.rollout.prepare("rest")
    later = virtual.rollout.submit("work")
    assert finish(virtual, busy, *prepared, later) == [5, 8, 8, 13]
    assert [handle.result() for handle in prepared] == ["rollout-0", "rollout-1"]


def test_an_argument_from_the_same_pool_is_waited_for_on_whatever_worker_it_is_made():
    virtual = runtime(2)
    given = virtual.rollout.submit("work")
    assert finish(virtual, virtual.rollout.submit("rest", given)) == [8]


def test_an_argument_from_another_pool_must_be_done():
    virtual = runtime()
    with pytest.raises(NotDoneError):
        virtual.teacher.submit("work", virtual.rollout.submit("work"))


def test_a_result_is_held_back_until_its_tick():
    virtual = runtime()
    handle, other = virtual.rollout.submit("work"), virtual.teacher.submit("rest")
    assert finish(virtual, other) == [3]
    with pytest.raises(NotDoneError):
        handle.result()
    finish(virtual, handle)
    assert handle.result() == "rollout-0"


def test_what_happens_at_one_tick_is_reported_together_in_the_order_given():
    virtual = runtime(3)
    handles = [virtual.rollout.submit("work") for _ in range(3)]
    assert virtual.waiter.wait(handles[::-1], 1000.0) == handles[::-1]


def test_a_wait_ends_at_its_deadline_and_names_what_it_waited_for():
    virtual = runtime()
    handle = virtual.rollout.submit("work")
    with pytest.raises(DeadlineError, match=r"within 4 ticks: rollout\.work\(\)"):
        virtual.waiter.wait([handle], 4.0)
    with pytest.raises(DeadlineError, match="nothing"):
        virtual.waiter.wait([], 4.0)
    assert virtual.waiter.wait([handle], 5.0) == [handle]


def test_work_with_a_failed_argument_takes_no_time_and_fails_alike():
    virtual = runtime(refuse=2)
    refused = virtual.rollout.submit("refuse")
    assert finish(virtual, refused) == [2]
    used = virtual.teacher.submit("work", refused)
    assert finish(virtual, used) == [2]
    with pytest.raises(StaleBatchError, match="too old"):
        used.result()


def test_durations_may_depend_on_step_and_item_and_a_change_of_weights_is_paid_once_a_worker():
    durations = {"generate": lambda step, item: 10 * step + item, "load": 100}
    stage = Stage(WorkerSpec(FakeRolloutWorker, ()), 2, durations)
    virtual = VirtualRuntime(rollout=stage, teacher=stage, trainer=stage)
    version = fake_version(3, fake_weights())
    virtual.rollout.publish(version, virtual.put("weights", encode_tree(fake_weights())))
    handles = [virtual.rollout.submit("generate", fake_request(3, item, version)) for item in range(4)]
    assert finish(virtual, *handles) == [130, 131, 130 + 32, 131 + 33]
    assert virtual.rollout.busy == {"generate": 30 + 31 + 32 + 33, "load": 200}
