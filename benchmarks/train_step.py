"""Step time and peak memory of the trainer's programs beside a plain hand-written jitted Optax step.

    python benchmarks/train_step.py [--width 256] [--layers 4] [--rows 32] [--length 64] [--repeats 40] [--depth 4]

Both sides train copies of one model with AdamW on the same batch in the same process, alternately, so that whatever else
the machine does falls on both; the processor time of all threads is the steadier figure on a busy machine. The plain step
is what one would write without a trainer: value_and_grad of the mean loss, the Optax update, donated buffers; the
accumulating one adds float32 gradients of unreduced sums and divides once, by hand.
"""

import argparse
import os
import platform
import statistics
import time

os.environ.setdefault("NPROC", str(os.cpu_count()))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from contracts.losses import LossOutput, WeightedMetric
from pipeline.training.config import TrainingConfig
from pipeline.training.trainer import PeftTrainer

VOCABULARY = 512


class ResidualMlp(nnx.Module):
    """Embedding, `layers` residual MLPs of fourfold width, head: a decoder's matrix shapes without its attention."""

    def __init__(self, width: int, layers: int, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.up = nnx.List([nnx.Linear(width, 4 * width, rngs=rngs) for _ in range(layers)])
        self.down = nnx.List([nnx.Linear(4 * width, width, rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens_BL: jax.Array) -> jax.Array:
        hidden = self.embedding(tokens_BL)
        for up, down in zip(self.up, self.down, strict=True):
            hidden = hidden + down(jax.nn.silu(up(hidden)))
        return self.head(hidden)


def token_losses(model: nnx.Module, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross entropy per token."""
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets)  # type: ignore[operator]


def trainer_loss(model: nnx.Module, tokens: jax.Array, targets: jax.Array, weights: jax.Array) -> LossOutput:
    """The loss as a trainer's user writes it."""
    return LossOutput(WeightedMetric(jnp.sum(weights * token_losses(model, tokens, targets)), jnp.sum(weights)))


def plain_fused(definition, optimizer):
    """The step one writes by hand: mean loss, gradient, update."""

    def step(parameters, state, batch):
        def loss(parameters):
            losses = token_losses(nnx.merge(definition, parameters), batch["tokens"], batch["targets"])
            return jnp.sum(batch["weights"] * losses) / jnp.sum(batch["weights"])

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))


def plain_accumulate(definition, optimizer):
    """The same by hand with a float32 accumulator: one program that adds, one that updates and clears."""

    def add(sums, weight, parameters, batch):
        def loss(parameters):
            losses = token_losses(nnx.merge(definition, parameters), batch["tokens"], batch["targets"])
            return jnp.sum(batch["weights"] * losses)

        value, gradients = jax.value_and_grad(loss)(parameters)
        return jax.tree.map(jnp.add, sums, gradients), weight + jnp.sum(batch["weights"]), value

    def update(parameters, state, sums, weight):
        gradients = jax.tree.map(lambda total: total / weight, sums)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, jax.tree.map(jnp.zeros_like, (sums, weight))

    return jax.jit(add, donate_argnums=(0, 1)), jax.jit(update, donate_argnums=(0, 1, 2))


class PlainSide:
    """Runs the hand-written programs; a window is `depth` batches."""

    def __init__(self, model: nnx.Module, optimizer: optax.GradientTransformation, batches: list) -> None:
        definition, parameters = nnx.split(model, nnx.Param)
        self.parameters = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), parameters)
        self.state = optimizer.init(self.parameters)
        self.batches = batches
        if len(batches) == 1:
            self.step = plain_fused(definition, optimizer)
        else:
            self.add, self.apply = plain_accumulate(definition, optimizer)
            self.sums = jax.tree.map(jnp.zeros_like, (self.parameters, jnp.float32(0)))

    def window(self) -> float:
        """One window; returns its (last) loss, so that it has run."""
        value = None
        if len(self.batches) == 1:
            self.parameters, self.state, value = self.step(self.parameters, self.state, self.batches[0])
        else:
            for batch in self.batches:
                *self.sums, value = self.add(*self.sums, self.parameters, batch)
            self.parameters, self.state, self.sums = self.apply(self.parameters, self.state, *self.sums)
        jax.block_until_ready((self.parameters, value))
        return float(value)  # type: ignore[arg-type]

    def traced(self):
        """The program that one micro-batch runs."""
        if len(self.batches) == 1:
            return self.step.trace(self.parameters, self.state, self.batches[0])
        return self.add.trace(*self.sums, self.parameters, self.batches[0])


class TrainerSide:
    """Runs the trainer's step-level API."""

    def __init__(self, model: nnx.Module, optimizer: optax.GradientTransformation, batches: list) -> None:
        config = TrainingConfig(gradient_accumulation_steps=len(batches))
        self.trainer = PeftTrainer(model, optimizer, config).with_loss_fn(trainer_loss)
        self.batches = batches

    def window(self) -> float:
        """One window; `update` waits for it."""
        for batch in self.batches:
            self.trainer.accumulate(batch)
        loss = self.trainer.update().loss
        jax.block_until_ready(self.trainer.live_state().trees)
        return loss

    def traced(self):
        """The program that one micro-batch runs."""
        return self.trainer.trace(self.batches[0])


def memory_mib(traced) -> dict[str, float]:
    """XLA's plan of one program: arguments, outputs, temporaries, and their peak (donated outputs counted once)."""
    plan = traced.lower().compile().memory_analysis()
    mib = {
        "arguments": plan.argument_size_in_bytes,
        "outputs": plan.output_size_in_bytes,
        "aliased": plan.alias_size_in_bytes,
        "temporary": plan.temp_size_in_bytes,
    }
    mib["peak"] = mib["arguments"] + mib["outputs"] - mib["aliased"] + mib["temporary"]
    return {name: size / 2**20 for name, size in mib.items()}


def compare(name: str, sides: dict, repeats: int) -> None:
    """Times the sides alternately and prints both, then their memory plans."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    cpu: dict[str, list[float]] = {side: [] for side in sides}
    for side in sides.values():
        for _ in range(3):
            side.window()
    for turn in range(repeats):
        order = list(sides) if turn % 2 == 0 else list(sides)[::-1]
        for side in order:
            begin, cpu_begin = time.perf_counter(), time.process_time()
            sides[side].window()
            times[side].append(time.perf_counter() - begin)
            cpu[side].append(time.process_time() - cpu_begin)
    plans = {side: memory_mib(runner.traced()) for side, runner in sides.items()}
    print(f"\n{name}")
    for side in sides:
        plan = ", ".join(f"{part} {size:.2f}" for part, size in plans[side].items())
        low, middle, busy = min(times[side]), statistics.median(times[side]), statistics.median(cpu[side])
        print(
            f"  {side:8} wall median {1e3 * middle:7.1f} ms, min {1e3 * low:7.1f} ms; processor median {1e3 * busy:7.1f} ms;"
            f" MiB: {plan}"
        )
    ratio = {
        "wall median": statistics.median(times["trainer"]) / statistics.median(times["plain"]),
        "wall min": min(times["trainer"]) / min(times["plain"]),
        "processor median": statistics.median(cpu["trainer"]) / statistics.median(cpu["plain"]),
        "peak memory": plans["trainer"]["peak"] / plans["plain"]["peak"],
    }
    print("  trainer / plain: " + ", ".join(f"{name} {value:.3f}" for name, value in ratio.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    for flag, default in (("width", 256), ("layers", 4), ("rows", 32), ("length", 64), ("repeats", 40), ("depth", 4)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    options = parser.parse_args()
    generator = np.random.default_rng(0)

    def draw(rows: int) -> dict[str, jax.Array]:
        shape = rows, options.length
        return {
            "tokens": jnp.asarray(generator.integers(0, VOCABULARY, shape), jnp.int32),
            "targets": jnp.asarray(generator.integers(0, VOCABULARY, shape), jnp.int32),
            "weights": jnp.asarray(generator.uniform(0, 1, shape), jnp.float32),
        }

    model = lambda: ResidualMlp(options.width, options.layers, nnx.Rngs(0))  # noqa: E731
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model(), nnx.Param)))
    print(
        f"jax {jax.__version__}, {jax.devices()[0].device_kind} × {jax.device_count()}, {os.environ['NPROC']} cores,"
        f" {platform.machine()}; {count / 1e6:.2f} M float32 parameters, AdamW, {options.repeats} windows"
    )
    small = max(1, options.rows // 8)
    cases = [(1, options.rows), (1, small), (options.depth, options.rows)]
    for depth, rows in cases:
        batches = [draw(rows) for _ in range(depth)]
        sides = {
            "plain": PlainSide(model(), optax.adamw(1e-4), batches),
            "trainer": TrainerSide(model(), optax.adamw(1e-4), batches),
        }
        kind = "fused" if depth == 1 else "accumulating"
        compare(f"depth {depth}, {kind}, {rows} × {options.length} tokens per micro-batch", sides, options.repeats)


if __name__ == "__main__":
    main()
