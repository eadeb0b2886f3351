"""What the compiled steps look like: branches, memory, compilations, waiting."""

import time

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from contracts.losses import LossOutput, WeightedMetric
from pipeline.training.hooks import TrainingHooks
from pipeline.training.inflight import InflightQueue


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
