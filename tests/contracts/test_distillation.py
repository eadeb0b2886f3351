"""The distillation batch and the teacher's targets belong to the student's predictions, or are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contracts.distillation import DiffusionDistillationBatch, PreparedDiffusionDistillationBatchAdapter
from contracts.errors import BatchTypeError, BatchValueError
from contracts.teacher_targets import DenseLogits
from contracts.tokens import DiffusionTokenBatch


def student(length=3, **changes):
    whole = {
        "model_inputs": {"tokens": np.zeros((2, 4), np.int32)},
        "target_ids": np.array([[1, 2, 3], [0, -100, 2]], np.int32)[:, :length],
        "loss_weights": np.array([[1, 1, 1], [1, 0, 1]], np.float32)[:, :length],
    }
    return DiffusionTokenBatch(**{**whole, **changes})


def parts(**changes):
    return {"student_batch": student(), "teacher_logits": np.zeros((2, 3, 5), np.float32), **changes}


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)])
@pytest.mark.parametrize("hard", [{}, {"hard_target_ids": student().target_ids}, {"hard_target_batch": student()}])
def test_a_batch_is_made_of_any_kind_of_array(kind, hard):
    whole = parts(**hard)
    batch = DiffusionDistillationBatch.create(**jax.tree.map(kind, whole))
    assert batch.validate() is batch


def test_the_hard_loss_reads_the_anchor_or_the_labels_or_the_own_tokens():
    anchor, labels = student(), np.ones((2, 3), np.int32)
    batch = DiffusionDistillationBatch.create(**parts())
    assert batch.hard_batch() is batch.student_batch
    labelled = DiffusionDistillationBatch.create(**parts(hard_target_ids=labels)).hard_batch()
    assert labelled.target_ids is labels
    assert DiffusionDistillationBatch.create(**parts(hard_target_batch=anchor)).hard_batch() is anchor


FAULTS = {
    "student_batch must be a DiffusionTokenBatch, got dict": ({"student_batch": {}}, TypeError),
    "hard_target_batch must be a DiffusionTokenBatch, got dict": ({"hard_target_batch": {}}, TypeError),
    "teacher_logits must be a JAX or NumPy array, got list": ({"teacher_logits": []}, TypeError),
    r"teacher_logits must have shape \[batch, length, vocab\]": ({"teacher_logits": np.zeros((2, 3))}, ValueError),
    r"teacher_logits must align with target_ids .* got \(2, 4, 5\) and \(2, 3\)": (
        {"teacher_logits": np.zeros((2, 4, 5))},
        ValueError,
    ),
    "teacher_logits must have a floating-point dtype": ({"teacher_logits": np.zeros((2, 3, 5), int)}, TypeError),
    "smaller than the vocabulary size 3 of teacher_logits; got 3 at row 0, position 2": (
        {"teacher_logits": np.zeros((2, 3, 3))},
        ValueError,
    ),
    "mutually exclusive": ({"hard_target_ids": np.zeros((2, 3), int), "hard_target_batch": student()}, ValueError),
    r"hard_target_ids must match target_ids shape, got \(2, 2\) and \(2, 3\)": (
        {"hard_target_ids": np.zeros((2, 2), int)},
        ValueError,
    ),
    "must have an integer dtype, got float64": ({"hard_target_ids": np.zeros((2, 3))}, TypeError),
    "active target_ids must be nonnegative": ({"hard_target_ids": -np.ones((2, 3), int)}, ValueError),
    r"hard_target_batch must match target_ids shape, got \(2, 2\) and \(2, 3\)": (
        {"hard_target_batch": student(length=2)},
        ValueError,
    ),
    "loss_weights must be nonnegative": ({"student_batch": student(loss_weights=-np.ones((2, 3)))}, ValueError),
    "loss_weights must be finite": (
        {"hard_target_batch": student(loss_weights=np.full((2, 3), np.inf))},
        ValueError,
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_misaligned_batch_is_refused_with_both_sides(message):
    changes, builtin = FAULTS[message]
    ours = BatchTypeError if builtin is TypeError else BatchValueError
    with pytest.raises(ours, match=message) as caught:
        DiffusionDistillationBatch.create(**parts(**changes))
    assert isinstance(caught.value, builtin)


def test_a_batch_is_rebuilt_by_jit_and_vmap_without_validation():
    batch = DiffusionDistillationBatch(**parts(teacher_logits=np.zeros((2, 9, 5), np.float32)))
    assert jax.jit(lambda b: b)(batch).teacher_logits.shape == (2, 9, 5)
    assert jax.vmap(lambda b: b)(batch).hard_target_ids is None
    with pytest.raises(BatchValueError, match="align"):
        jax.jit(lambda b: b.validate())(batch)


def test_nan_teachers_pass_the_batch_since_a_hard_loss_never_reads_them():
    DiffusionDistillationBatch.create(**parts(teacher_logits=np.full((2, 3, 5), np.nan)))


def test_a_function_is_an_adapter():
    assert isinstance(lambda raw: raw, PreparedDiffusionDistillationBatchAdapter)


def dense(**rows):
    logits = np.zeros((2, 3, 5), np.float32)
    logits[1, 1] = np.nan  # weight 0: anything goes
    for place, row in rows.items():
        logits[int(place[1]), int(place[2])] = row
    return logits


@pytest.mark.parametrize("dtype", [np.float32, np.float64, jnp.bfloat16])
def test_a_dense_teacher_may_leave_entries_without_mass_and_anything_where_inactive(dtype):
    targets = DenseLogits(dense(p02=[0, -np.inf, -np.inf, 1, 2]).astype(dtype))
    assert targets.validate(student()) is targets


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0, np.nan, 0, 0, 0], "must be finite, or -inf for an entry without mass; got nan at row 0, position 2"),
        ([0, np.inf, 0, 0, 0], "must be finite, or -inf for an entry without mass; got inf at row 0, position 2"),
        ([-np.inf] * 5, "a whole row is -inf; got -inf at row 0, position 2"),
    ],
)
def test_a_dense_teacher_without_a_distribution_is_refused_by_position(row, message):
    with pytest.raises(BatchValueError, match=message):
        DenseLogits(dense(p02=row)).validate(student())


def test_a_dense_teacher_is_a_pytree_whose_values_are_not_read_under_a_trace():
    targets = DenseLogits(jnp.full((2, 3, 5), jnp.nan))
    jax.jit(lambda t: t.validate(student()))(targets)
    with pytest.raises(BatchValueError, match="align"):
        jax.jit(lambda t: t.validate(student(length=2)))(targets)
