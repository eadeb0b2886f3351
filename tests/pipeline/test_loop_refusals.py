"""What the trainer refuses is counted, asked for again, and changes nothing; but not for ever."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from contracts.errors import CorruptBatchError, StaleBatchError, TargetsMismatchError
from contracts.freshness import FreshnessPolicy
from contracts.weights import WeightVersion
from contracts.work import Rollout
from pipeline.loop import MAX_ATTEMPTS, Loop
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
from pipeline.virtual_time import fake_runtime
from pipeline.workers.spec import WorkerSpec

STEPS, ITEMS = 3, 2
UNIT = {"generate": 3, "score": 1, "accumulate": 2, "update": 1, "publish": 1}
Spoil = Callable[[Rollout], Rollout]


class Spoiler(FakeRolloutWorker):
    """Hands over a spoilt rollout as often as the script says, then a good one."""

    def __init__(self, script: dict[tuple[int, int], list[Spoil]], made: list, *, name: str):
        super().__init__(name=name)
        self.script, self.made = script, made

    def generate(self, request):
        self.made.append((request.step, request.item))
        rollout = super().generate(request)
        spoils = self.script.get((request.step, request.item), [])
        return spoils.pop(0)(rollout) if spoils else rollout


class Muddler(FakeTeacher):
    """Once, hands over targets that were made for another rollout."""

    def __init__(self, *, name: str):
        super().__init__(name=name)
        self.left = 1

    def score(self, rollout):
        targets = super().score(rollout)
        if (rollout.provenance.step, rollout.provenance.item) == (1, 1) and self.left:
            self.left -= 1
            return replace(targets, rollout_digest="0" * 32)
        return targets


def of_provenance(**changes) -> Spoil:
    return lambda rollout: replace(rollout, provenance=replace(rollout.provenance, **changes))


def of_version(**changes) -> Spoil:
    def spoil(rollout):
        version = replace(rollout.provenance.version, **changes)
        return replace(rollout, provenance=replace(rollout.provenance, version=version))

    return spoil


def flip_a_token(rollout: Rollout) -> Rollout:
    tokens_BL = rollout.clean.tokens_BL.copy()
    tokens_BL[0, 0] ^= 1
    return replace(rollout, clean=replace(rollout.clean, tokens_BL=tokens_BL))


def loop_with(script: dict[tuple[int, int], Sequence[Spoil]], lag: int = 0, **settings) -> tuple[Loop, list]:
    policy, made = FreshnessPolicy(RUN_ID, lag), []
    spoiler = WorkerSpec(Spoiler, ({key: list(spoils) for key, spoils in script.items()}, made))
    runtime = fake_runtime(policy, rollout_workers=2, durations=UNIT, rollout=spoiler, **settings)
    request = partial(fake_request, items=ITEMS)
    first = fake_version(0, fake_weights())
    return Loop(request, policy, runtime, ListRecorder(), first, STEPS, ITEMS, 100.0), made


def untroubled(lag: int = 0) -> WeightVersion:
    return loop_with({}, lag)[0].run()


@pytest.mark.parametrize(
    ("reason", "spoil"),
    [
        ("stale", of_version(step=0)),
        ("future", of_version(step=2)),
        ("foreign", of_version(run_id="another")),
        ("foreign", of_provenance(run_id="another")),
        ("fingerprint", of_version(fingerprint="f" * 16)),
        ("fingerprint", of_version(base_fingerprint="f" * 16)),
        ("duplicate", of_provenance(item=0)),
        ("future", of_provenance(step=2)),
        ("out_of_order", of_provenance(item=2)),
        ("corrupt", flip_a_token),
    ],
)
def test_a_refused_item_is_counted_asked_for_again_and_leaves_no_trace_in_the_weights(reason, spoil):
    loop, made = loop_with({(1, 1): [spoil]})
    assert loop.run() == untroubled()
    events = loop.recorder.of_kind("refuse")
    assert [(event["reason"], event["step"], event["item"]) for event in events] == [(reason, 1, 1)]
    assert "fake/1/" in events[0]["detail"] or "another/1/" in events[0]["detail"] or "fake/2/" in events[0]["detail"]
    assert made.count((1, 1)) == 2 and len(made) == STEPS * ITEMS + 1


def test_targets_of_another_rollout_are_refused_and_the_item_is_made_again():
    loop, made = loop_with({}, teacher=WorkerSpec(Muddler, ()))
    assert loop.run() == untroubled()
    assert [event["reason"] for event in loop.recorder.of_kind("refuse")] == [TargetsMismatchError.reason]
    assert made.count((1, 1)) == 2


@pytest.mark.parametrize("lag", [0, 1])
def test_items_behind_a_refused_one_wait_for_it_and_are_not_made_again(lag):
    loop, made = loop_with({(0, 0): [flip_a_token], (1, 0): [flip_a_token] * 2}, lag)
    assert loop.run() == untroubled(lag)
    assert {key: made.count(key) for key in made} == {
        (step, item): {(0, 0): 2, (1, 0): 3}.get((step, item), 1) for step in range(STEPS) for item in range(ITEMS)
    }


def test_an_item_that_is_always_refused_ends_the_run_with_the_refusal():
    loop, made = loop_with({(1, 0): [flip_a_token] * 99})
    with pytest.raises(CorruptBatchError, match="fake/1/0"):
        loop.run()
    assert made.count((1, 0)) == MAX_ATTEMPTS == len(loop.recorder.of_kind("refuse"))


def test_attempts_are_counted_by_item_and_not_by_run():
    script = {(step, item): [flip_a_token] * (MAX_ATTEMPTS - 1) for step in range(STEPS) for item in range(ITEMS)}
    loop, made = loop_with(script)
    assert loop.run() == untroubled()
    assert len(made) == STEPS * ITEMS * MAX_ATTEMPTS


class Rejecting(FakeTrainer):
    """Refuses one item for good, and notes what it is left with."""

    def accumulate(self, rollout, targets):
        if rollout.provenance.item == 1:
            raise StaleBatchError(f"rollout {rollout.provenance.request_id} is too old\nand more")
        return super().accumulate(rollout, targets)


def test_a_refusal_is_recorded_by_its_first_line_before_the_run_ends():
    policy = FreshnessPolicy(RUN_ID)
    loop, _ = loop_with({}, trainer=WorkerSpec(Rejecting, (policy,)))
    with pytest.raises(StaleBatchError):
        loop.run()
    assert {event["detail"] for event in loop.recorder.of_kind("refuse")} == {"rollout fake/0/1 is too old"}
    assert loop.recorder.of_kind("update") == []
    np.testing.assert_array_equal(loop.runtime.trainer.workers[0].weights["weights"], fake_weights()["weights"])
