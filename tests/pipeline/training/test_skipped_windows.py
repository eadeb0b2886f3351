"""Windows without weight and windows that are not finite: closed, counted, and without any trace in the weights."""

import jax
import numpy as np
import optax
import pytest

from contracts.errors import NonFiniteError
from contracts.losses import LossOutput, WeightedMetric


def leaves(trainer):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.state().trees)]


def assert_same_bits(before, after):
    for left, right in zip(before, after, strict=True):
        assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_window_without_weight_is_closed_and_leaves_weights_and_optimiser_alone(small, depth):
    trainer = small.trainer(optax.adamw(0.1, weight_decay=0.5), depth=depth)
    for seed in range(depth):
        trainer.accumulate(small.batch(2, seed=seed))
    trainer.update()
    before = leaves(trainer)
    for seed in range(depth):
        trainer.accumulate(small.batch(2, seed=seed, weights=0.0))
    report = trainer.update()
    assert_same_bits(before, leaves(trainer))
    assert report.status == "skipped: zero weight"
    assert (report.loss, report.gradient_norm, report.denominator) == (0.0, 0.0, 0.0)
    assert (trainer.windows, trainer.train_steps, trainer.iter_steps) == (2, 1, 2 * depth)
    assert report.skips == {"zero weight": 1}


@pytest.mark.parametrize("eps", [None, 0.5])
def test_without_weight_even_a_nan_gradient_is_exactly_zero(small, eps):
    def poisoned(model, **batch):
        clean = small.loss(model, **batch).primary_loss
        return LossOutput(WeightedMetric(clean.unreduced_sum * np.float32(np.nan), clean.denominator, eps=eps))

    trainer = small.trainer(small.capture(), loss=poisoned)
    trainer.accumulate(small.batch(2, seed=0, weights=0.0))
    report = trainer.update()
    assert (report.status, report.gradient_norm) == ("skipped: zero weight", 0.0)
    assert all(not np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(trainer.state().trees["optimizer"]))


def test_one_micro_batch_with_weight_is_enough(small):
    trainer = small.trainer(small.capture(), depth=2)
    weighted = small.batch(2, seed=1)
    _, gradients, _ = small.reference(small.parameters(trainer), [weighted])
    trainer.accumulate(small.batch(2, seed=0, weights=0.0))
    trainer.accumulate(weighted)
    assert trainer.update().status == "applied"
    assert small.distance(trainer.state().trees["optimizer"], gradients) < 1e-6


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_skip_counts_a_window_that_is_not_finite_and_goes_on(small, depth, bad):
    trainer = small.trainer(optax.adam(0.1), depth=depth, non_finite="skip")
    before = leaves(trainer)
    for index in range(depth):
        trainer.accumulate(small.batch(2, seed=1, weights=bad if index == depth - 1 else None))
    report = trainer.update()
    assert_same_bits(before, leaves(trainer))
    assert (report.status, report.first_non_finite) == ("skipped: non-finite", depth - 1)
    for _ in range(depth):
        trainer.accumulate(small.batch(2, seed=2))
    report = trainer.update()
    assert report.status == "applied"
    assert np.isfinite(report.loss)
    assert (report.window, report.train_steps, report.skips) == (1, 1, {"non-finite": 1})


def test_raise_names_the_window_and_the_micro_batch_and_keeps_the_weights(small):
    trainer = small.trainer(optax.adam(0.1), depth=3)
    before = leaves(trainer)
    for weights in (None, np.nan, np.nan):
        trainer.accumulate(small.batch(2, seed=1, weights=weights))
    with pytest.raises(NonFiniteError, match=r"window 0 .* first in micro-batch 1 of 3.*non_finite='skip'"):
        trainer.update()
    assert_same_bits(before, leaves(trainer))
    assert (trainer.windows, trainer.train_steps) == (1, 0)


def test_micro_batches_that_overflow_only_together_are_said_to(small):
    trainer = small.trainer(
        depth=2, loss=lambda model, **batch: small.loss(model, **batch).primary_loss.unreduced_sum * np.float32(1e18)
    )
    for _ in range(2):
        trainer.accumulate(small.batch(2, seed=1))
    assert trainer.update().status == "applied"
    trainer = small.trainer(
        depth=2, non_finite="skip", loss=lambda model, **batch: (model(batch["tokens"]) * 0).sum() + np.float32(3e38)
    )
    for _ in range(2):
        trainer.accumulate(small.batch(2, seed=1))
    report = trainer.update()
    assert report.skipped == "non-finite"
    assert "each of its 2 micro-batches is finite" in report.explain_non_finite()


def test_raise_surfaces_in_train_with_steps_in_flight(small):
    trainer = small.trainer(max_inflight_computations=3)
    data = [
        small.batch(2, seed=1),
        small.batch(2, seed=2, weights=np.nan),
        *(small.batch(2, seed=s) for s in (3, 4, 5, 6)),
    ]
    with pytest.raises(NonFiniteError, match="window 1"):
        trainer.train(data)
    assert trainer.windows <= 5
