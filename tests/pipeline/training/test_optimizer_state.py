"""Optax under the trainer: its dtypes, its numbers, its skipped steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pipeline.training.leaves import key_bits
from pipeline.training.optimizer import apply_optimizer, init_optimizer


def window(trainer, batches):
    for batch in batches:
        trainer.accumulate(batch)
    return trainer.update()


def parameters_of(dtype):
    return {"a": jnp.full((4, 2), 0.5, dtype), "b": jnp.full((3,), -0.25, dtype)}


OPTIMIZERS = {
    "adam, moments as parameters": optax.adam(0.1),
    "adam, bf16 moments": optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "adam, fp32 moments": optax.adam(0.1, mu_dtype=jnp.float32),
    "injected adamw": optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
    "injected adamw, fp32 rates": optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 10)
    ),
    "clip, warm-up and decay": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10))
    ),
    "ema of noisy momentum": optax.chain(optax.trace(0.9), optax.add_noise(0.1, 0.5, key=0), optax.ema(0.9)),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimiser_leaf_keeps_the_dtype_of_its_initialiser(name, dtype):
    optimizer, parameters = OPTIMIZERS[name], parameters_of(dtype)
    with jax.numpy_dtype_promotion("standard"):
        chosen = jax.tree.map(lambda leaf: jnp.asarray(leaf).dtype, optimizer.init(parameters))
    state = init_optimizer(optimizer, parameters)
    step = jax.jit(lambda *arguments: apply_optimizer(optimizer, *arguments))
    for stepped in (True, False):
        before = jax.tree.map(jnp.copy, (parameters, state))
        gradients = jax.tree.map(lambda value: value * value, parameters)
        parameters, state = step(gradients, state, parameters, jnp.bool_(stepped))
        assert jax.tree.map(lambda leaf: leaf.dtype, state) == chosen
        assert {value.dtype for value in parameters.values()} == {jnp.dtype(dtype)}
        old, new = (
            [np.asarray(key_bits(leaf)).tobytes() for leaf in jax.tree.leaves(tree)]
            for tree in (before, (parameters, state))
        )
        assert (old == new) is not stepped
    assert step._cache_size() == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("optimizer", [OPTIMIZERS["adam, fp32 moments"], OPTIMIZERS["injected adamw, fp32 rates"]])
def test_a_bf16_model_trains_with_the_optimiser_dtypes_it_started_with(small, depth, optimizer):
    trainer = small.trainer(optimizer, depth=depth, model=small.Model(param_dtype=jnp.bfloat16))
    before = jax.tree.map(lambda leaf: leaf.dtype, trainer.live_state().trees)
    window(trainer, [small.batch(2, seed=seed) for seed in range(depth)])
    window(trainer, [small.batch(2, seed=seed, weights=0.0) for seed in range(depth)])
    window(trainer, [small.batch(2, seed=seed) for seed in range(depth)])
    assert jax.tree.map(lambda leaf: leaf.dtype, trainer.live_state().trees) == before
    assert (trainer.train_steps, trainer.windows) == (2, 3)


def test_choosing_early_gives_the_optimiser_the_numbers_that_optax_gives(small):
    parameters = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)}
    optimizer = OPTIMIZERS["clip, warm-up and decay"]
    mine = theirs = parameters
    state, plain = init_optimizer(optimizer, mine), None
    for step in range(4):
        gradients = {"w": jnp.asarray(np.random.default_rng(step).normal(size=(5, 3)), jnp.float32)}
        mine, state = apply_optimizer(optimizer, gradients, state, mine, jnp.bool_(True))
        with jax.numpy_dtype_promotion("standard"):
            plain = optimizer.init(theirs) if plain is None else plain
            updates, plain = optimizer.update(gradients, plain, theirs)
            theirs = optax.apply_updates(theirs, updates)
    np.testing.assert_array_equal(np.asarray(mine["w"]), np.asarray(theirs["w"]))


def test_bf16_gradients_add_up_in_float32(small):
    trainer = small.trainer(small.capture(), depth=64, model=small.Model(param_dtype=jnp.bfloat16))
    batch = small.batch(1, seed=3)
    single = small.trainer(small.capture(), model=small.Model(param_dtype=jnp.bfloat16))
    window(single, [batch])
    window(trainer, [batch] * 64)
    # 64 equal bf16 addends: summed in bf16 the total would stall some per cent short.
    for name, one in single.live_state().trees["optimizer"].items():
        many = trainer.live_state().trees["optimizer"][name]
        np.testing.assert_array_equal(np.asarray(one).astype(np.float32), np.asarray(many).astype(np.float32))


def test_an_optimiser_may_start_from_the_parameters_themselves_and_from_python_numbers(small):
    averaging = optax.GradientTransformation(
        lambda parameters: {"average": parameters, "weight": 1.0},
        lambda gradients, state, parameters: (
            jax.tree.map(lambda gradient: -gradient, gradients),
            {
                "average": jax.tree.map(lambda a, b: 0.5 * (a + b), state["average"], parameters),
                "weight": state["weight"] * 0.5,
            },
        ),
    )
    trainer = small.trainer(averaging)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(trainer.live_state().trees))
    for _ in range(3):
        window(trainer, [small.batch(2, seed=1)])
    assert float(trainer.live_state().trees["optimizer"]["weight"]) == 0.125
    assert trainer.compilations()["fused"] == 1
