"""Supervised fine-tuning: weighted cross entropy at physical targets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from contracts.losses import reduce_losses
from contracts.tokens import DiffusionTokenBatch
from pipeline.objectives.sft import configure_diffusion_sft, diffusion_loss_fn

V = 7


def table_logits(table_NLV, model_inputs):
    """A student that is a table of logits, one row for each example."""
    return table_NLV[model_inputs["example"]]


def example(seed=0, rows=4, length=5):
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(rows, length, V)).astype(np.float32) * 3
    weights = rng.choice([0.0, 0.5, 1.0, 2.0], size=(rows, length)).astype(np.float32)
    targets = rng.integers(0, V, size=(rows, length)).astype(np.int32)
    return table, DiffusionTokenBatch({"example": np.arange(rows, dtype=np.int32)}, targets, weights)


@jax.jit
def value_and_gradient(table, batch):
    def loss(table):
        output = diffusion_loss_fn(table, batch, table_logits)
        return output.primary_loss.unreduced_sum, output

    (_, output), gradient = jax.value_and_grad(loss, has_aux=True)(table)
    return output, gradient


def float64_oracle(table, batch):
    """Loss sum, weight sum, and the closed gradient w·(softmax − onehot)."""
    logits, weights = table.astype(np.float64), batch.loss_weights.astype(np.float64)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    onehot = np.eye(V)[batch.target_ids]
    return -(weights * np.log((p * onehot).sum(-1))).sum(), weights.sum(), weights[..., None] * (p - onehot)


def test_loss_and_gradient_equal_a_float64_oracle():
    table, batch = example()
    output, gradient = value_and_gradient(table, batch)
    loss, weight, expected_gradient = float64_oracle(table, batch)
    np.testing.assert_allclose(output.primary_loss.unreduced_sum, loss, rtol=1e-6)
    assert float(output.primary_loss.denominator) == weight
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
    assert output.aux_metrics == {}


def test_no_shift_is_applied():
    targets = np.array([[3, 1, 4, 1, 5]])
    batch = DiffusionTokenBatch({"example": np.array([0])}, targets, np.ones((1, 5), bool))
    knows_the_string = np.where(np.eye(V)[targets] > 0, 100.0, 0.0).astype(np.float32)
    output, _ = value_and_gradient(knows_the_string, batch)
    assert float(output.primary_loss.compute()) == 0.0


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e38])
def test_inactive_positions_are_inert_in_value_and_gradient(garbage):
    table, batch = example()
    inactive = batch.loss_weights == 0
    clean, clean_gradient = value_and_gradient(table, batch)
    dirty_batch = DiffusionTokenBatch(
        batch.model_inputs, np.where(inactive, -100, batch.target_ids).astype(np.int32), batch.loss_weights
    )
    dirty, gradient = value_and_gradient(np.where(inactive[..., None], np.float32(garbage), table), dirty_batch)
    np.testing.assert_array_equal(dirty.primary_loss.unreduced_sum, clean.primary_loss.unreduced_sum)
    np.testing.assert_array_equal(gradient, clean_gradient)
    np.testing.assert_array_equal(np.asarray(gradient)[inactive], 0.0)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_micro_batches_add_up_to_the_full_batch_in_loss_and_gradient(parts):
    table, batch = example()
    full, full_gradient = value_and_gradient(table, batch)
    pieces = [
        value_and_gradient(table, jax.tree.map(lambda x, i=i: np.array_split(x, parts)[i], batch)) for i in range(parts)
    ]
    np.testing.assert_allclose(reduce_losses([p[0] for p in pieces])["loss"], full.primary_loss.compute(), rtol=1e-6)
    np.testing.assert_allclose(sum(p[1] for p in pieces), full_gradient, atol=1e-6)


def test_masking_a_row_is_removing_it():
    table, batch = example()
    masked = DiffusionTokenBatch(batch.model_inputs, batch.target_ids, batch.loss_weights * [[1], [0], [1], [1]])
    removed = jax.tree.map(lambda x: np.delete(x, 1, axis=0), batch)
    one, gradient = value_and_gradient(table, masked)
    other, other_gradient = value_and_gradient(table, removed)
    np.testing.assert_allclose(one.primary_loss.unreduced_sum, other.primary_loss.unreduced_sum, rtol=1e-6)
    np.testing.assert_array_equal(one.primary_loss.denominator, other.primary_loss.denominator)
    np.testing.assert_allclose(gradient, other_gradient, atol=1e-7)


def test_fully_masked_batches_and_fractional_totals_are_exact():
    table, batch = example()
    nothing, gradient = value_and_gradient(
        table, DiffusionTokenBatch(batch.model_inputs, batch.target_ids, np.zeros((4, 5)))
    )
    assert float(nothing.primary_loss.compute()) == 0.0
    np.testing.assert_array_equal(gradient, 0.0)
    full, _ = value_and_gradient(table, batch)
    tenth, _ = value_and_gradient(
        table, DiffusionTokenBatch(batch.model_inputs, batch.target_ids, batch.loss_weights / 64)
    )
    assert float(tenth.primary_loss.denominator) < 1
    np.testing.assert_allclose(tenth.primary_loss.compute(), full.primary_loss.compute(), rtol=1e-6)


def test_entries_without_mass_cost_nothing_unless_they_are_the_target():
    table, batch = example()
    bar = np.full((4, 5, 1), -np.inf, np.float32)
    output, gradient = value_and_gradient(np.concatenate([table, bar], -1), batch)
    expected, expected_gradient = value_and_gradient(table, batch)
    np.testing.assert_allclose(output.primary_loss.unreduced_sum, expected.primary_loss.unreduced_sum, rtol=1e-6)
    np.testing.assert_allclose(gradient[..., :-1], expected_gradient, atol=1e-7)
    np.testing.assert_array_equal(gradient[..., -1], 0.0)


@pytest.mark.parametrize("target", [-1, V, 10**6])
def test_a_traced_target_outside_the_vocabulary_makes_the_loss_nan_and_is_never_clamped(target):
    table, batch = example()
    weights, targets = np.ones((4, 5), np.float32), batch.target_ids.copy()
    targets[2, 3] = target
    output, _ = value_and_gradient(table, DiffusionTokenBatch(batch.model_inputs, targets, weights))
    assert np.isnan(output.primary_loss.unreduced_sum)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_arithmetic_is_float32_whatever_the_logits_are(dtype):
    table, batch = example()
    low = jnp.asarray(table, dtype)
    output, gradient = value_and_gradient(low, batch)
    assert output.primary_loss.unreduced_sum.dtype == jnp.float32
    assert gradient.dtype == dtype
    exact, _ = value_and_gradient(low.astype(jnp.float32), batch)
    np.testing.assert_array_equal(output.primary_loss.unreduced_sum, exact.primary_loss.unreduced_sum)


def test_a_trainer_is_handed_inputs_and_loss_through_its_two_extension_points():
    class Recording:
        def with_loss_fn(self, fn, has_aux=False):
            self.loss_fn, self.has_aux = fn, has_aux
            return self

        def with_gen_model_input_fn(self, fn):
            self.inputs_fn = fn
            return self

    table, batch = example()
    trainer = Recording()
    raw = {"ids": batch.target_ids, "weights": batch.loss_weights, "example": batch.model_inputs["example"]}
    configured = configure_diffusion_sft(
        trainer,
        lambda raw: DiffusionTokenBatch({"example": raw["example"]}, raw["ids"], raw["weights"]),
        table_logits,
    )
    assert configured is trainer
    assert not trainer.has_aux
    step = jax.jit(lambda table, raw: trainer.loss_fn(table, **trainer.inputs_fn(raw)))
    np.testing.assert_allclose(
        step(table, raw).primary_loss.compute(), value_and_gradient(table, batch)[0].primary_loss.compute(), rtol=1e-6
    )


def test_an_eager_loss_checks_values_that_a_traced_one_cannot():
    table, batch = example()
    bad = DiffusionTokenBatch(batch.model_inputs, np.full((4, 5), V), np.ones((4, 5)))
    with pytest.raises(ValueError, match="smaller than the vocabulary size 7"):
        diffusion_loss_fn(table, bad, table_logits)
