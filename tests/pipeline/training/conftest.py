"""A model small enough to differentiate by hand, and the float64 reference that does so."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from contracts.losses import LossOutput, WeightedMetric
from pipeline.training.config import TrainingConfig
from pipeline.training.trainer import PeftTrainer

VOCABULARY, WIDTH = 12, 8


class TokenMlp(nnx.Module):
    """`tanh(E[x]·W + b)·H`: small enough to differentiate by hand."""

    def __init__(self, seed: int = 0, param_dtype=jnp.float32):
        keys = jax.random.split(jax.random.key(seed), 4)
        draw = lambda key, *shape: (0.5 * jax.random.normal(key, shape)).astype(param_dtype)  # noqa: E731
        self.embedding = nnx.Param(draw(keys[0], VOCABULARY, WIDTH))
        self.kernel = nnx.Param(draw(keys[1], WIDTH, WIDTH))
        self.bias = nnx.Param(draw(keys[2], WIDTH))
        self.head = nnx.Param(draw(keys[3], WIDTH, VOCABULARY))

    def __call__(self, tokens_BL):
        hidden = jnp.tanh(self.embedding[...][tokens_BL] @ self.kernel[...] + self.bias[...].reshape(1, 1, -1))
        return (hidden @ self.head[...]).astype(jnp.float32)


def cross_entropy(model, tokens, targets, weights):
    """Σ w·ce as a `LossOutput`, with Σ w·correct beside it."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets)
    right = (jnp.argmax(model(tokens), axis=-1) == targets).astype(jnp.float32)
    total = jnp.sum(weights)
    return LossOutput(
        WeightedMetric(jnp.sum(weights * losses), total), {"accuracy": WeightedMetric(jnp.sum(weights * right), total)}
    )


def reference(parameters, batches):
    """Loss and gradient of the whole window in numpy float64, by hand: Σ over all rows, then one division.

    Returns:
        Loss, gradients by parameter name, Σ weights.
    """
    embedding, kernel, bias, head = (
        np.asarray(parameters[name]).astype(np.float64) for name in ("embedding", "kernel", "bias", "head")
    )
    sums = {
        name: np.zeros_like(value)
        for name, value in (("embedding", embedding), ("kernel", kernel), ("bias", bias), ("head", head))
    }
    loss = weight = 0.0
    for batch in batches:
        tokens, targets = (np.asarray(batch[name]).reshape(-1) for name in ("tokens", "targets"))
        weights = np.asarray(batch["weights"]).astype(np.float64).reshape(-1)
        hidden = np.tanh(embedding[tokens] @ kernel + bias)
        logits = hidden @ head
        logits = logits - logits.max(axis=-1, keepdims=True)
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        rows = np.arange(len(targets))
        loss += np.sum(-weights * np.log(probabilities[rows, targets]))
        weight += weights.sum()
        d_logits = probabilities.copy()
        d_logits[rows, targets] -= 1
        d_logits *= weights[:, None]
        d_hidden = (d_logits @ head.T) * (1 - hidden**2)
        sums["head"] += hidden.T @ d_logits
        sums["kernel"] += embedding[tokens].T @ d_hidden
        sums["bias"] += d_hidden.sum(axis=0)
        np.add.at(sums["embedding"], tokens, d_hidden @ kernel.T)
    return loss / weight, {name: value / weight for name, value in sums.items()}, weight


def capture():
    """An optimiser that changes nothing and keeps the gradient it was given as its state."""
    return optax.GradientTransformation(
        lambda parameters: jax.tree.map(jnp.zeros_like, parameters),
        lambda gradients, state, parameters=None: (jax.tree.map(jnp.zeros_like, gradients), gradients),
    )


def make_batch(rows: int, seed: int, weights=None, length: int = 5):
    """Tokens, targets, and weights that are mostly fractional, some 0."""
    generator = np.random.default_rng(seed)
    drawn = generator.uniform(0, 1, (rows, length)) * (generator.uniform(0, 1, (rows, length)) > 0.3)
    return {
        "tokens": generator.integers(0, VOCABULARY, (rows, length)).astype(np.int32),
        "targets": generator.integers(0, VOCABULARY, (rows, length)).astype(np.int32),
        "weights": np.asarray(drawn if weights is None else np.broadcast_to(weights, drawn.shape)).astype(np.float32),
    }


def split(batch, parts: int):
    """A batch as `parts` batches of consecutive rows."""
    pieces = {name: np.split(value, parts) for name, value in batch.items()}
    return [{name: pieces[name][part] for name in batch} for part in range(parts)]


def distance(left, right) -> float:
    """Largest absolute difference over all leaves."""
    return max(
        float(np.max(np.abs(np.asarray(left[name]).astype(np.float64) - np.asarray(right[name]).astype(np.float64))))
        for name in left
    )


@pytest.fixture
def small():
    """The pieces above, under one name."""

    def trainer(optimizer=None, *, depth=1, model=None, loss=cross_entropy, has_aux=False, **config):
        built = PeftTrainer(
            TokenMlp() if model is None else model,
            optax.sgd(0.1) if optimizer is None else optimizer,
            TrainingConfig(gradient_accumulation_steps=depth, **config),
        )
        return built.with_loss_fn(loss, has_aux=has_aux)

    def parameters(trained):
        return {name: np.asarray(value) for name, value in trained.live_state().trees["parameters"].items()}

    return SimpleNamespace(
        Model=TokenMlp,
        loss=cross_entropy,
        reference=reference,
        capture=capture,
        batch=make_batch,
        split=split,
        distance=distance,
        trainer=trainer,
        parameters=parameters,
    )
