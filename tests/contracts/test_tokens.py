"""The student's batch: shapes and dtypes under any transformation, values where there are values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contracts.errors import BatchTypeError, BatchValueError
from contracts.tokens import (
    DiffusionBatchAdapter,
    DiffusionTokenBatch,
    compute_diffusion_logits,
    validate_diffusion_logits,
)


def parts(**changes):
    whole = {
        "model_inputs": {"tokens": np.zeros((2, 5), np.int32), "valid": np.ones((2, 5), bool)},
        "target_ids": np.array([[1, 2, 3], [0, -100, 2]], np.int32),
        "loss_weights": np.array([[1.0, 0.5, 0.0], [2.0, 0.0, 1.0]], np.float32),
    }
    return {**whole, **changes}


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)])
def test_a_batch_is_made_of_any_kind_of_array(kind):
    batch = DiffusionTokenBatch.create(**jax.tree.map(kind, parts()))
    assert batch.validate() is batch


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint32, np.float16, np.float64, jnp.bfloat16])
def test_weights_may_be_of_any_real_or_boolean_dtype(dtype):
    DiffusionTokenBatch.create(**parts(loss_weights=np.array([[1, 1, 1], [1, 0, 1]]).astype(dtype)))


def test_inputs_may_be_any_pytree():
    DiffusionTokenBatch.create(**parts(model_inputs=(np.zeros(2), {"deep": [jnp.zeros((2, 1, 4))]}, None)))
    DiffusionTokenBatch.create(**parts(model_inputs=np.zeros((2, 3))))


FAULTS = {
    "target_ids must be a JAX or NumPy array, got list": ({"target_ids": [[1, 2, 3]] * 2}, TypeError),
    "loss_weights must be a JAX or NumPy array, got list": ({"loss_weights": [[1.0] * 3] * 2}, TypeError),
    r"shape \[batch, length\], got \(6,\)": ({"target_ids": np.zeros(6, np.int32)}, ValueError),
    "integer dtype, got float32": ({"target_ids": np.zeros((2, 3), np.float32)}, TypeError),
    "integer dtype, got bool": ({"target_ids": np.zeros((2, 3), bool)}, TypeError),
    r"must match target_ids shape, got \(2, 4\) and \(2, 3\)": ({"loss_weights": np.ones((2, 4))}, ValueError),
    r"loss_weights must match .* got \(2, 1\)": ({"loss_weights": np.ones((2, 1))}, ValueError),
    "loss_weights must have a real numeric or boolean dtype, got complex64": (
        {"loss_weights": np.ones((2, 3), np.complex64)},
        TypeError,
    ),
    "at least one array": ({"model_inputs": {"nothing": None}}, ValueError),
    r"model_inputs\['a'\]\['b'\] must be a JAX or NumPy array, got float": (
        {"model_inputs": {"a": {"b": 1.0}}},
        TypeError,
    ),
    r"model_inputs\['a'\]\[0\] must be a JAX or NumPy array, got int": ({"model_inputs": {"a": [1, 2]}}, TypeError),
    r"model_inputs\['step'\] must be batch-major, got shape \(\)": (
        {"model_inputs": {"step": np.zeros(())}},
        ValueError,
    ),
    r"model_inputs\['x'\] has batch size 3 \(shape \(3, 2\)\), expected 2 \(target_ids \(2, 3\)\)": (
        {"model_inputs": {"ok": np.zeros(2), "x": np.zeros((3, 2))}},
        ValueError,
    ),
    r"model_inputs\['z'\] must have a real numeric or boolean dtype, got complex64": (
        {"model_inputs": {"z": np.zeros((2, 2), np.complex64)}},
        TypeError,
    ),
    "loss_weights must be finite; got nan at row 1, position 2": (
        {"loss_weights": np.array([[1, 1, 1], [0, 0, np.nan]], np.float32)},
        ValueError,
    ),
    "loss_weights must be finite; got inf": ({"loss_weights": np.full((2, 3), np.inf, jnp.bfloat16)}, ValueError),
    "loss_weights must be nonnegative; got -1 at row 0, position 1": (
        {"loss_weights": np.array([[1, -1, 1], [0, 0, 1]])},
        ValueError,
    ),
    "active target_ids must be nonnegative .* got -100 at row 1, position 1": (
        {"loss_weights": np.ones((2, 3), bool)},
        ValueError,
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_malformed_batch_is_refused_with_both_sides_and_the_key_path(message):
    changes, builtin = FAULTS[message]
    ours = BatchTypeError if builtin is TypeError else BatchValueError
    with pytest.raises(ours, match=message) as caught:
        DiffusionTokenBatch.create(**parts(**changes))
    assert isinstance(caught.value, builtin)


def test_a_typed_random_key_is_no_model_input():
    with pytest.raises(BatchTypeError, match=r"model_inputs\['keys'\] must have a real numeric or boolean dtype"):
        DiffusionTokenBatch.create(**parts(model_inputs={"keys": jax.random.split(jax.random.key(0), 2)}))


def test_shapes_are_checked_under_a_trace_and_values_are_not():
    good = DiffusionTokenBatch(**jax.tree.map(jnp.asarray, parts()))
    bad_values = DiffusionTokenBatch(
        **jax.tree.map(jnp.asarray, parts(loss_weights=np.full((2, 3), np.nan, np.float32)))
    )
    bad_shape = DiffusionTokenBatch(**jax.tree.map(jnp.asarray, parts(loss_weights=np.ones((2, 4), np.float32))))
    validated = jax.jit(lambda batch: batch.validate())
    np.testing.assert_array_equal(validated(good).target_ids, good.target_ids)
    validated(bad_values)
    with pytest.raises(BatchValueError, match="must match target_ids shape"):
        validated(bad_shape)
    jax.eval_shape(validated, jax.eval_shape(lambda: good))


def test_vmap_rebuilds_a_batch_without_validating_it():
    stacked = DiffusionTokenBatch(**jax.tree.map(lambda x: jnp.stack([x, x]), parts()))
    out = jax.vmap(lambda batch: batch.validate())(stacked)
    assert out.target_ids.shape == (2, 2, 3)
    assert jax.tree.map(lambda _: None, stacked).target_ids is None


def test_a_closed_over_batch_is_still_checked_by_value_under_a_trace():
    batch = DiffusionTokenBatch(**parts(loss_weights=-np.ones((2, 3), np.float32)))
    with pytest.raises(BatchValueError, match="nonnegative"):
        jax.jit(lambda x: x + batch.validate().loss_weights.sum())(jnp.float32(0))


def test_a_batch_is_frozen():
    with pytest.raises(AttributeError):
        DiffusionTokenBatch(**parts()).target_ids = None  # pyright: ignore


LOGIT_FAULTS = {
    "logits must be a JAX or NumPy array, got list": ([[[0.0]]], TypeError),
    r"shape \[batch, length, vocab\], got \(2, 3\)": (np.zeros((2, 3), np.float32), ValueError),
    r"align with target_ids on \[batch, length\], got \(2, 4, 5\) and \(2, 3\)": (
        np.zeros((2, 4, 5), np.float32),
        ValueError,
    ),
    "non-empty vocabulary": (np.zeros((2, 3, 0), np.float32), ValueError),
    "floating-point dtype, got int32": (np.zeros((2, 3, 5), np.int32), TypeError),
    "smaller than the vocabulary size 2 of logits; got 2 at row 0, position 1": (
        np.zeros((2, 3, 2), np.float32),
        ValueError,
    ),
}


@pytest.mark.parametrize("message", LOGIT_FAULTS)
def test_logits_that_do_not_belong_to_the_targets_are_refused(message):
    logits, builtin = LOGIT_FAULTS[message]
    batch = DiffusionTokenBatch.create(**parts())
    with pytest.raises(builtin, match=message):
        compute_diffusion_logits(None, batch, lambda model, inputs: logits)


def test_an_inactive_target_may_lie_outside_the_vocabulary():
    batch = DiffusionTokenBatch.create(**parts(target_ids=np.array([[0, 1, 99], [1, -100, 0]])))
    logits = np.zeros((2, 3, 2), np.float32)
    assert validate_diffusion_logits(batch, logits) is logits


def test_scoring_hands_model_and_inputs_to_the_scorer():
    batch = DiffusionTokenBatch.create(**parts())
    logits = compute_diffusion_logits(
        jnp.arange(4.0).reshape(1, 1, 4),
        batch,
        lambda model, inputs: model + inputs["tokens"][:, :3, None].astype(jnp.float32),
    )
    np.testing.assert_array_equal(logits[1, 2], [0.0, 1.0, 2.0, 3.0])


def test_a_function_is_an_adapter():
    assert isinstance(lambda raw: raw, DiffusionBatchAdapter)
