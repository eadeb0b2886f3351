"""Which rollouts may be trained on: every verdict, and a model that knows only what an admissible batch is."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.errors import (
    CorruptBatchError,
    DuplicateBatchError,
    FingerprintMismatchError,
    ForeignBatchError,
    FreshnessError,
    FutureBatchError,
    OutOfOrderBatchError,
    StaleBatchError,
    TargetsMismatchError,
)
from contracts.freshness import FreshnessPolicy, TeacherIdentity, check_targets
from contracts.tokens import DiffusionTokenBatch
from contracts.weights import WeightVersion
from contracts.work import CleanSequence, Provenance, Rollout, SamplerSettings, TeacherTargets

SAMPLER = SamplerSettings("threshold", 0.9)


def version(step: int, **changes) -> WeightVersion:
    return replace(WeightVersion("run", step, "base", f"print{step}"), **changes)


def provenance(step: int, item: int, written_by: int, for_run: str = "run", **changes) -> Provenance:
    return Provenance(for_run, step, item, version(written_by, **changes), (0,), SAMPLER, "rollout-0")


def published(policy: FreshnessPolicy, step: int) -> dict[int, WeightVersion]:
    return {kept: version(kept) for kept in policy.steps_kept(step)}


@pytest.mark.parametrize(
    ("lag", "frozen", "writers"),
    [
        (0, False, [0, 1, 2, 3, 4]),
        (1, False, [0, 0, 1, 2, 3]),
        (3, False, [0, 0, 0, 0, 1]),
        (0, True, [0] * 5),
        (2, True, [0] * 5),
    ],
)
def test_the_schedule_says_which_weights_write_each_step(lag, frozen, writers):
    policy = FreshnessPolicy("run", lag, frozen)
    assert [policy.writer_step(step) for step in range(5)] == writers


@given(st.integers(0, 4), st.booleans(), st.integers(0, 30))
def test_every_version_that_the_open_or_a_later_step_needs_is_kept_and_no_more_than_lag_and_two(lag, frozen, step):
    policy = FreshnessPolicy("run", lag, frozen)
    kept = policy.steps_kept(step)
    needed = {policy.writer_step(later) for later in range(step, step + 20) if policy.writer_step(later) <= step}
    assert needed | {step} == kept and len(kept) <= lag + 2


def verdict(policy, seen, *, step, next_item=0, history=None):
    history = published(policy, step) if history is None else history
    try:
        policy.check_rollout(seen, step=step, next_item=next_item, published=history)
    except FreshnessError as refusal:
        return refusal
    return None


# lag, frozen, open step, next item, rollout's (step, item, written by), changes to its version, verdict, both sides
TABLE = [
    (0, False, 3, 1, (3, 1, 3), {}, None, ()),
    (0, False, 0, 0, (0, 0, 0), {}, None, ()),
    (1, False, 3, 0, (3, 0, 2), {}, None, ()),
    (1, False, 0, 0, (0, 0, 0), {}, None, ()),
    (5, False, 3, 0, (3, 0, 0), {}, None, ()),
    (0, True, 3, 0, (3, 0, 0), {}, None, ()),
    # Too old, and too new: of the schedule's weights exactly.
    (0, False, 3, 0, (3, 0, 2), {}, StaleBatchError, ("step 2", "lag 1", "by step 3")),
    (1, False, 3, 0, (3, 0, 1), {}, StaleBatchError, ("step 1", "lag 2", "by step 2")),
    (1, False, 3, 0, (3, 0, 3), {}, FutureBatchError, ("step 3", "by step 2")),
    (2, False, 1, 0, (1, 0, 1), {}, FutureBatchError, ("step 1", "by step 0")),
    (0, True, 3, 0, (3, 0, 3), {}, FutureBatchError, ("step 3", "by step 0")),
    # A negative lag: after a restore the trainer is behind what was written before.
    (0, False, 3, 0, (5, 0, 5), {}, FutureBatchError, ("step 5", "by step 3", "After a restore")),
    (2, False, 3, 0, (5, 0, 4), {}, FutureBatchError, ("step 4", "by step 1")),
    # Of another run.
    (0, False, 3, 0, (3, 0, 3), {"run_id": "other"}, ForeignBatchError, ("'other'", "'run'")),
    # The counter is right and the weights are not.
    (0, False, 3, 0, (3, 0, 3), {"fingerprint": "print2"}, FingerprintMismatchError, ("print2", "print3")),
    (0, False, 0, 0, (0, 0, 0), {"fingerprint": "teacher"}, FingerprintMismatchError, ("teacher", "print0")),
    (0, False, 3, 0, (3, 0, 3), {"base_fingerprint": "b"}, FingerprintMismatchError, ("b+print3", "base+print3")),
    # Applied before, in this step or, with weights that are still due, in an earlier one.
    (0, False, 3, 2, (3, 1, 3), {}, DuplicateBatchError, ("item 1", "item 2")),
    (3, False, 2, 0, (1, 0, 0), {}, DuplicateBatchError, ("step 1", "before step 2")),
    (0, True, 3, 0, (2, 1, 0), {}, DuplicateBatchError, ("step 2", "before step 3")),
    # Of a later step, with weights that are due now.
    (3, False, 2, 0, (3, 0, 0), {}, FutureBatchError, ("step 3", "open step is 2")),
    # Of this step, and too early in it.
    (0, False, 3, 1, (3, 2, 3), {}, OutOfOrderBatchError, ("item 2", "item 1 is next")),
]


@pytest.mark.parametrize(("lag", "frozen", "step", "next_item", "seen", "changes", "expected", "sides"), TABLE)
def test_every_verdict_and_both_sides_in_its_message(lag, frozen, step, next_item, seen, changes, expected, sides):
    policy = FreshnessPolicy("run", lag, frozen)
    refusal = verdict(policy, provenance(*seen, **changes), step=step, next_item=next_item)
    assert (None if refusal is None else type(refusal)) is expected
    assert all(side in str(refusal) for side in sides)
    assert refusal is None or f"run/{seen[0]}/{seen[1]}" in str(refusal)


def test_a_rollout_made_for_another_run_by_these_very_weights_is_foreign():
    refusal = verdict(FreshnessPolicy("run"), provenance(3, 0, 3, for_run="other"), step=3)
    assert type(refusal) is ForeignBatchError and "'other'" in str(refusal)


def test_weights_that_are_no_longer_kept_cannot_be_vouched_for():
    refusal = verdict(FreshnessPolicy("run", 1), provenance(3, 0, 2), step=3, history={3: version(3)})
    assert type(refusal) is StaleBatchError and "no longer kept (kept: [3])" in str(refusal)


SMALL = st.integers(0, 4)


@given(
    lag=st.integers(0, 2),
    frozen=st.booleans(),
    place=st.tuples(SMALL, st.integers(0, 2)),
    seen=st.tuples(SMALL, st.integers(0, 3), SMALL),
    runs=st.tuples(*[st.sampled_from(["run", "run", "run", "other"])] * 2),
    held=st.sampled_from(["", "", "", "x"]),
    forgotten=st.booleans(),
)
def test_exactly_the_admissible_is_admitted_and_every_refusal_is_true(lag, frozen, place, seen, runs, held, forgotten):
    policy = FreshnessPolicy("run", lag, frozen)
    (step, next_item), (for_step, item, writer) = place, seen
    due = 0 if frozen else max(step - lag, 0)
    history = published(policy, step)
    if forgotten:
        history.pop(due)
    written_by = version(writer, run_id=runs[1], fingerprint=f"print{writer}{held}")
    claim = replace(provenance(for_step, item, writer, runs[0]), version=written_by)
    refusal = verdict(policy, claim, step=step, next_item=next_item, history=history)
    truths = {
        ForeignBatchError: runs != ("run", "run"),
        StaleBatchError: writer < due or writer not in history,
        FutureBatchError: writer > due or for_step > step,
        FingerprintMismatchError: held != "",
        DuplicateBatchError: (for_step, item) < (step, next_item),
        OutOfOrderBatchError: for_step == step and item > next_item,
    }
    if refusal is None:
        assert not any(truths.values()) and (for_step, item, writer) == (step, next_item, due)
    else:
        assert truths[type(refusal)]


TEACHER = TeacherIdentity("teacher", "dense", 1.0)


def sealed_rollout() -> Rollout:
    tokens_BL = np.array([[1, 2, 3]], np.int32)
    batch = DiffusionTokenBatch({"noisy_tokens": tokens_BL}, tokens_BL, np.ones((1, 3), np.float32))
    clean = CleanSequence(tokens_BL, np.ones((1, 3), bool), np.array([1], np.int32))
    return Rollout(batch, clean, {}, provenance(0, 0, 0)).seal()


def targets_for(rollout: Rollout, **changes) -> TeacherTargets:
    return replace(TeacherTargets(rollout.digest, "teacher", "dense", 1.0, {}), **changes)


def test_targets_of_this_rollout_by_this_teacher_are_admitted():
    rollout = sealed_rollout()
    check_targets(rollout, targets_for(rollout), TEACHER)


@pytest.mark.parametrize(
    ("changes", "sides"),
    [
        ({"rollout_digest": "0" * 32}, ("0" * 32,)),
        ({"teacher_fingerprint": "student"}, ("student", "teacher")),
        ({"temperature": 2.0}, ("2.0", "1.0")),
    ],
)
def test_other_targets_are_refused_with_both_sides(changes, sides):
    rollout = sealed_rollout()
    with pytest.raises(TargetsMismatchError) as caught:
        check_targets(rollout, targets_for(rollout, **changes), TEACHER)
    assert all(side in str(caught.value) for side in ("run/0/0", *sides))


def test_targets_of_another_kind_are_refused():
    rollout = sealed_rollout()
    with pytest.raises(TargetsMismatchError, match="top_k"):
        check_targets(rollout, targets_for(rollout), replace(TEACHER, kind="top_k"))


@pytest.mark.parametrize("part", ["noisy_tokens", "target_ids", "loss_weights", "tokens_BL", "valid_BL"])
def test_a_rollout_that_changed_after_it_was_sealed_is_corrupt(part):
    rollout = sealed_rollout()
    targets = targets_for(rollout)
    arrays = {
        **rollout.student_batch.model_inputs,
        "target_ids": rollout.student_batch.target_ids,
        "loss_weights": rollout.student_batch.loss_weights,
        **vars(rollout.clean),
    }
    arrays = {name: array.copy() for name, array in arrays.items()}
    arrays[part][0, 1] = 0
    batch = DiffusionTokenBatch({"noisy_tokens": arrays["noisy_tokens"]}, arrays["target_ids"], arrays["loss_weights"])
    clean = CleanSequence(arrays["tokens_BL"], arrays["valid_BL"], arrays["prompt_lengths_B"])
    changed = replace(rollout, student_batch=batch, clean=clean)
    with pytest.raises(CorruptBatchError) as caught:
        check_targets(changed, targets, TEACHER)
    assert rollout.digest in str(caught.value) and changed.content_digest() in str(caught.value)


def test_a_rollout_that_was_never_sealed_is_refused():
    rollout = replace(sealed_rollout(), digest="")
    with pytest.raises(CorruptBatchError):
        check_targets(rollout, targets_for(rollout), TEACHER)
