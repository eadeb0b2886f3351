"""What the compiled steps look like: branches, memory, compilations, dtypes, donated buffers."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from contracts.errors import BatchTypeError, BatchValueError, ConfigError, WeightsError
from contracts.losses import LossOutput, WeightedMetric
from pipeline.training.hooks import TrainingHooks
from pipeline.training.inflight import InflightQueue
from pipeline.training.leaves import key_bits
from pipeline.training.optimizer import apply_optimizer, init_optimizer


def primitives(jaxpr):
    """Names of all primitives, inner programs included."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    names |= primitives(inner)
    return names


def size(arrays):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def window(trainer, batches):
    for batch in batches:
        trainer.accumulate(batch)
    return trainer.update()


def test_the_fused_step_has_no_branch_and_no_accumulator(small):
    trainer = small.trainer(optax.adamw(1e-3))
    batch = small.batch(4, seed=1)
    traced = trainer.trace(batch)
    found = primitives(traced.jaxpr.jaxpr)
    assert "dot_general" in found
    assert not found & {"cond", "while", "scan", "switch"}
    trees = trainer.live_state().trees
    needed = size(trees["parameters"]) + size(trees["optimizer"]) + size(batch)
    plan = traced.lower().compile().memory_analysis()
    assert plan.argument_size_in_bytes <= needed
    assert plan.alias_size_in_bytes == size(trees["parameters"]) + size(trees["optimizer"])


def test_a_fused_step_plans_the_memory_of_a_clipping_step_written_by_hand(small):
    # Clipping, like skipping, needs every gradient before the first parameter may change.
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    trainer = small.trainer(optimizer, model=Wide())
    batch = {"x": jnp.ones((4, 256))}
    trainer.with_loss_fn(lambda model, x: jnp.mean(model(x) ** 2))
    definition, parameters = nnx.split(Wide(), nnx.Param)

    def by_hand(parameters, state, batch):
        loss = lambda parameters: jnp.mean(nnx.merge(definition, parameters)(batch["x"]) ** 2)  # noqa: E731
        value, gradients = jax.value_and_grad(loss)(parameters)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    with jax.numpy_dtype_promotion("standard"):
        state = optimizer.init(parameters)
    hand = jax.jit(by_hand, donate_argnums=(0, 1)).trace(parameters, state, batch)
    mine, theirs = (
        step.lower().compile().memory_analysis().temp_size_in_bytes for step in (trainer.trace(batch), hand)
    )
    # Two matrices of leeway; selecting the new state at the end instead of where it is computed would copy twelve.
    assert mine < theirs + 2 * 256 * 1024


class Wide(nnx.Module):
    """Six matrices of 256 KiB, so that a copy of all shows in a memory plan beside one of them."""

    def __init__(self):
        self.kernels = nnx.List([nnx.Param(jnp.eye(256)) for _ in range(6)])

    def __call__(self, x):
        for kernel in self.kernels:
            x = jnp.tanh(x @ kernel[...])
        return x


@pytest.mark.parametrize("depth", [1, 2])
def test_each_shape_compiles_once(small, depth):
    traces = []

    def loss(model, **batch):
        traces.append(batch["tokens"].shape)
        return small.loss(model, **batch)

    trainer = small.trainer(optax.adam(1e-3), depth=depth, loss=loss)
    window(trainer, [small.batch(2, seed=seed) for seed in range(depth)])
    traced = len(traces)
    for _ in range(2):
        window(trainer, [small.batch(2, seed=seed) for seed in range(depth)])
    assert len(traces) == traced
    step = "fused" if depth == 1 else "accumulate"
    assert trainer.compilations()[step] == 1
    compiled = []
    listen = lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        window(trainer, [small.batch(2, seed=seed) for seed in range(depth)])
        assert compiled == []
        window(trainer, [small.batch(4, seed=seed) for seed in range(depth)])
        assert len(compiled) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert trainer.compilations() == {
        "fused": 2 if depth == 1 else 0, "accumulate": 0 if depth == 1 else 2, "update": int(depth > 1), "evaluate": 0,
    }  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2])
def test_from_the_second_update_on_memory_stays_what_it_was(small, depth):
    trainer = small.trainer(optax.adam(1e-3), depth=depth)
    held = []
    for _ in range(4):
        report = window(trainer, [small.batch(2, seed=seed) for seed in range(depth)])
        held.append((len(jax.live_arrays()), sum(array.nbytes for array in jax.live_arrays())))
        assert report.status == "applied"
    assert held[1] == held[2] == held[3]
    assert held[0] == held[1]


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


def aligned(array):
    """A copy at an address that JAX shares on the processor instead of copying."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    view = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


@pytest.mark.parametrize("depth", [1, 2])
def test_a_batch_that_the_caller_overwrites_has_been_taken(small, depth):
    batch = {name: aligned(value) for name, value in small.batch(2, seed=1).items()}
    expected = small.trainer(small.capture(), depth=depth)
    expected.accumulate({name: value.copy() for name, value in batch.items()})
    trainer = small.trainer(small.capture(), depth=depth)
    trainer.accumulate(batch)
    batch["weights"][:] = 0
    assert trainer.update().loss == expected.update().loss


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


def test_windows_refuse_what_does_not_fit_and_stay_as_they_were(small):
    trainer = small.trainer(depth=2)
    with pytest.raises(BatchValueError, match=r"call accumulate\(\)"):
        trainer.update()
    batch = small.batch(2, seed=1)
    trainer.accumulate(batch)
    with pytest.raises(BatchValueError, match="1 micro-batches"):
        trainer.state()
    trainer.accumulate(batch)
    before = trainer.accumulator_digest()
    with pytest.raises(BatchValueError, match=r"call update\(\)"):
        trainer.accumulate(batch)
    assert trainer.accumulator_digest() == before
    trainer.update()
    with pytest.raises(BatchTypeError, match=r"batch\['tokens'\]\[0\] is int"):
        trainer.accumulate({"tokens": [1, 2]})
    with pytest.raises(ConfigError, match="with_loss_fn"):
        type(trainer)(small.Model(), optax.sgd(0.1), trainer.config).evaluate(batch)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_digest_of_the_open_window_changes_with_every_micro_batch(small, depth):
    trainer = small.trainer(depth=depth)
    seen = [trainer.accumulator_digest()]
    for seed in range(depth):
        trainer.accumulate(small.batch(2, seed=seed))
        seen.append(trainer.accumulator_digest())
    assert len(set(seen)) == depth + 1
    assert trainer.accumulator_digest() == seen[-1]


def test_no_more_steps_are_queued_than_allowed():
    settled = []
    queue = InflightQueue(2)
    for step in range(5):
        queue.make_room()
        assert len(queue) < 2
        queue.push(jnp.zeros(()), lambda step=step: settled.append(step))
    assert settled == [0, 1, 2]
    queue.drain()
    assert settled == [0, 1, 2, 3, 4]


def test_steps_are_dispatched_without_waiting_for_the_device(small):
    heard = []

    def slow(model, **batch):
        output = small.loss(model, **batch)
        spun = jax.lax.fori_loop(
            0, 3000, lambda _, x: jnp.tanh(x @ x), jnp.ones((128, 128)) * output.primary_loss.denominator
        )
        return LossOutput(
            WeightedMetric(output.primary_loss.unreduced_sum, output.primary_loss.denominator + 0 * spun[0, 0])
        )

    class Hearing(TrainingHooks):
        def on_update(self, trainer, report):
            heard.append(report.window)

    trainer = small.trainer(depth=2, loss=slow, max_inflight_computations=8).with_hooks(Hearing())
    batches = [small.batch(2, seed=seed) for seed in range(2)]
    window(trainer, batches)
    begin = time.perf_counter()
    for _ in range(2):
        for batch in batches:
            trainer.accumulate(batch)
        trainer.close_window()
    dispatched = time.perf_counter() - begin
    assert (trainer.windows, heard) == (3, [0])
    assert trainer.train_steps == 3
    assert heard == [0, 1, 2]
    assert dispatched < 0.5 * (time.perf_counter() - begin)


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
