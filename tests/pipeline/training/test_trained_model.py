"""Which arrays of a model are trained, donated, advanced or left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from contracts.errors import WeightsError


def window(trainer, batches):
    for batch in batches:
        trainer.accumulate(batch)
    return trainer.update()


def test_parameters_are_donated_and_batches_are_not(small):
    model = small.Model()
    trainer = small.trainer(model=model)
    before = model.kernel[...]
    batch = jax.tree.map(jnp.asarray, small.batch(2, seed=1))
    window(trainer, [batch])
    assert before.is_deleted()
    assert not model.kernel[...].is_deleted()
    assert not any(leaf.is_deleted() for leaf in batch.values())
    window(trainer, [batch])


def test_models_that_share_arrays_stay_apart(small):
    first, second = small.Model(), small.Model(seed=1)
    window(small.trainer(model=first), [small.batch(2, seed=1)])
    second.kernel.set_value(first.kernel[...])
    expected = np.array(first.kernel[...])
    window(small.trainer(model=second), [small.batch(2, seed=1)])
    np.testing.assert_array_equal(np.asarray(first.kernel[...]), expected)
    assert np.any(np.asarray(second.kernel[...]) != expected)


class Adapted(nnx.Module):
    """A frozen kernel with a low-rank adapter and dropout."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jnp.ones((4, 4)))
        self.lora_a = nnx.LoRAParam(jnp.ones((4, 1)))
        self.lora_b = nnx.LoRAParam(jnp.zeros((1, 4)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        return self.dropout(x @ self.kernel[...] + x @ self.lora_a[...] @ self.lora_b[...])


def squares(model, x):
    return jnp.mean((model(x) - 1) ** 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_only_adapters_are_trained_where_there_are_any(small, depth):
    model = Adapted(nnx.Rngs(0))
    trainer = small.trainer(model=model, depth=depth, loss=squares)
    kernel = model.kernel[...]
    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    for _ in range(2):
        window(trainer, [{"x": x}] * depth)
    assert set(trainer.live_state().trees["parameters"]) == {"lora_a", "lora_b"}
    assert model.kernel[...] is kernel
    assert np.any(np.asarray(model.lora_b[...]))


def test_dropout_advances_in_training_and_is_off_in_evaluation(small):
    model = Adapted(nnx.Rngs(0))
    trainer = small.trainer(optax.sgd(0.0), model=model, loss=squares)
    x = {"x": np.ones((2, 4), np.float32)}
    losses = {window(trainer, [x]).loss for _ in range(4)}
    assert len(losses) > 1
    assert int(model.dropout.rngs.count[...]) == 4
    evaluated = trainer.evaluate(x)["loss"]
    assert float(evaluated.compute()) == pytest.approx(np.mean((4 - 1) ** 2))
    assert int(model.dropout.rngs.count[...]) == 4


def test_a_loss_that_writes_to_the_model_is_refused_by_name(small):
    def writing(model, x):
        model.calls[...] = model.calls[...] + 1
        return squares(model, x)

    trainer = small.trainer(model=Adapted(nnx.Rngs(0)), loss=writing)
    trainer.accumulate({"x": np.ones((2, 4), np.float32)})
    with pytest.raises(WeightsError, match="changed calls"):
        trainer.update()


def test_a_model_without_parameters_is_refused(small):
    with pytest.raises(WeightsError, match="nothing to train"):
        small.trainer(model=nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
