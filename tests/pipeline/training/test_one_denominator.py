"""A window's gradient is Σ∇ / Σdenominator, however the window was split, ordered or bounded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from contracts.errors import MetricTypeError, MetricValueError
from contracts.losses import LossOutput, WeightedMetric, close_window, merge_windows


def run_window(trainer, batches):
    for batch in batches:
        trainer.accumulate(batch)
    return trainer.update()


def captured(trainer):
    return trainer.state().trees["optimizer"]


def test_one_two_and_four_micro_batches_give_one_gradient(small, capsys):
    batch = small.batch(8, seed=1)
    parameters = small.parameters(small.trainer())
    loss, gradients, weight = small.reference(parameters, [batch])
    found = {}
    for depth in (1, 2, 4):
        trainer = small.trainer(small.capture(), depth=depth)
        report = run_window(trainer, small.split(batch, depth))
        found[depth] = captured(trainer)
        assert report.loss == pytest.approx(loss, abs=1e-6)
        assert report.denominator == pytest.approx(weight, abs=1e-5)
        assert report.gradient_norm == pytest.approx(np.sqrt(sum(np.sum(g**2) for g in gradients.values())), abs=1e-6)
    against = {depth: small.distance(gradient, gradients) for depth, gradient in found.items()}
    between = max(small.distance(found[1], found[depth]) for depth in (2, 4))
    with capsys.disabled():
        print(f"\n  largest gradient difference: to float64 {against}, between depths {between:.1e}")
    assert max(*against.values(), between) < 1e-6


def test_the_order_of_rows_and_an_uneven_split_do_not_change_the_gradient(small):
    batch = small.batch(8, seed=2)
    order = np.random.default_rng(0).permutation(8)
    uneven = [{name: value[order][rows] for name, value in batch.items()} for rows in (slice(0, 1), slice(1, 8))]
    trainer = small.trainer(small.capture(), depth=2)
    _, gradients, _ = small.reference(small.parameters(trainer), [batch])
    run_window(trainer, uneven)
    assert small.distance(captured(trainer), gradients) < 1e-6


def test_the_same_micro_batches_in_the_same_order_give_the_same_bits(small):
    batches = [small.batch(2, seed=seed) for seed in range(4)]
    states = []
    for _ in range(2):
        trainer = small.trainer(optax.adam(0.01), depth=4)
        for _ in range(2):
            run_window(trainer, batches)
        states.append(trainer.state().trees)
    for left, right in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def test_a_total_weight_below_one_is_divided_by_itself(small):
    batch = small.batch(4, seed=3, weights=0.01)
    for depth in (1, 2):
        trainer = small.trainer(small.capture(), depth=depth)
        loss, gradients, weight = small.reference(small.parameters(trainer), [batch])
        report = run_window(trainer, small.split(batch, depth))
        assert weight < 1
        assert report.loss == pytest.approx(loss, abs=1e-6)
        assert small.distance(captured(trainer), gradients) < 1e-6


def test_fully_masked_rows_change_nothing(small):
    batch = small.batch(4, seed=4)
    padded = {name: np.concatenate([value, value]) for name, value in batch.items()}
    padded["weights"][4:] = 0
    trainer = small.trainer(small.capture(), depth=2)
    _, gradients, _ = small.reference(small.parameters(trainer), [batch])
    run_window(trainer, small.split(padded, 2))
    assert small.distance(captured(trainer), gradients) < 1e-6


@pytest.mark.parametrize(("eps", "min_denom"), [(0.5, None), (None, 40.0), (0.5, 40.0)])
def test_eps_and_min_denom_reach_the_gradient_as_they_reach_the_logged_loss(small, eps, min_denom):
    def bounded(model, **batch):
        primary = small.loss(model, **batch).primary_loss
        return LossOutput(WeightedMetric(primary.unreduced_sum, primary.denominator, eps=eps, min_denom=min_denom))

    batch = small.batch(4, seed=5)
    trainer = small.trainer(small.capture(), depth=2, loss=bounded)
    loss, gradients, weight = small.reference(small.parameters(trainer), [batch])
    divisor = max(weight + (eps or 0), min_denom or 0)
    report = run_window(trainer, small.split(batch, 2))
    assert report.loss == pytest.approx(loss * weight / divisor, abs=1e-6)
    expected = {name: value * weight / divisor for name, value in gradients.items()}
    assert small.distance(captured(trainer), expected) < 1e-6


def test_plain_scalar_losses_and_metrics_are_averaged_over_micro_batches(small):
    def mean_loss(model, tokens, targets, weights):
        output = small.loss(model, tokens, targets, weights)
        return output.primary_loss.compute(), {"rows": jnp.float32(tokens.shape[0]), **output.aux_metrics}

    uneven = [small.batch(1, seed=6), small.batch(3, seed=7)]
    trainer = small.trainer(small.capture(), depth=2, loss=mean_loss, has_aux=True)
    each = [small.reference(small.parameters(trainer), [batch]) for batch in uneven]
    report = run_window(trainer, uneven)
    assert report.loss == pytest.approx(np.mean([loss for loss, _, _ in each]), abs=1e-6)
    assert report.metrics["rows"] == 2.0
    assert report.denominator == 2.0
    expected = {name: (each[0][1][name] + each[1][1][name]) / 2 for name in each[0][1]}
    assert small.distance(captured(trainer), expected) < 1e-6


def test_a_bare_scalar_loss_needs_no_aux(small):
    trainer = small.trainer(
        small.capture(), loss=lambda model, **batch: small.loss(model, **batch).primary_loss.compute()
    )
    batch = small.batch(2, seed=8)
    loss, gradients, _ = small.reference(small.parameters(trainer), [batch])
    assert run_window(trainer, [batch]).loss == pytest.approx(loss, abs=1e-6)
    assert small.distance(captured(trainer), gradients) < 1e-6


def test_a_window_closed_early_is_divided_by_its_true_denominator(small):
    batches = [small.batch(2, seed=9), small.batch(2, seed=10)]
    trainer = small.trainer(small.capture(), depth=4)
    loss, gradients, weight = small.reference(small.parameters(trainer), batches)
    report = run_window(trainer, batches)
    assert (report.micro_batches, report.train_steps) == (2, 1)
    assert report.denominator == pytest.approx(weight, abs=1e-5)
    assert report.loss == pytest.approx(loss, abs=1e-6)
    assert small.distance(captured(trainer), gradients) < 1e-6


def test_a_second_window_starts_from_nothing(small):
    batches = [small.batch(2, seed=seed) for seed in range(4)]
    trainer = small.trainer(small.capture(), depth=2)
    run_window(trainer, batches[:2])
    run_window(trainer, batches[2:])
    _, gradients, _ = small.reference(small.parameters(trainer), batches[2:])
    assert small.distance(captured(trainer), gradients) < 1e-6


def test_evaluation_adds_over_batches_before_it_divides(small):
    batches = [small.batch(2, seed=11), small.batch(2, seed=12, weights=0.05)]
    trainer = small.trainer()
    loss, _, _ = small.reference(small.parameters(trainer), batches)
    sums = merge_windows(*(trainer.evaluate(batch) for batch in batches))
    assert float(close_window(sums)["loss"]) == pytest.approx(loss, abs=1e-6)
    assert (trainer.train_steps, trainer.iter_steps) == (0, 0)


def switching(small, change):
    """A loss that returns something else for batches of three rows."""

    def loss(model, tokens, targets, weights):
        output = small.loss(model, tokens, targets, weights)
        return change(output) if tokens.shape[0] == 3 else output

    return loss


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda out: LossOutput(out.primary_loss, {"accuracy": jnp.float32(1)}), TypeError, "accuracy"),
        (lambda out: LossOutput(out.primary_loss.compute(), out.aux_metrics), TypeError, "loss"),
        (
            lambda out: LossOutput(
                WeightedMetric(out.primary_loss.unreduced_sum, out.primary_loss.denominator, eps=1.0)
            ),
            ValueError,
            "bounds",
        ),
    ],
)
def test_a_metric_that_changes_kind_or_bounds_inside_a_window_leaves_it_bit_identical(small, change, error, words):
    trainer = small.trainer(small.capture(), depth=3, loss=switching(small, change))
    trainer.accumulate(small.batch(2, seed=13))
    before = trainer.accumulator_digest()
    with pytest.raises(error, match=words):
        trainer.accumulate(small.batch(3, seed=14))
    assert trainer.accumulator_digest() == before
    assert trainer.open_micro_batches == 1
    with pytest.raises(error, match=words):
        merge_windows(trainer.evaluate(small.batch(2, seed=13)), trainer.evaluate(small.batch(3, seed=14)))


def test_between_windows_the_metrics_may_change(small):
    trainer = small.trainer(
        depth=2, loss=switching(small, lambda out: LossOutput(out.primary_loss, {"other": jnp.float32(7)}))
    )
    first = run_window(trainer, [small.batch(2, seed=1)] * 2)
    second = run_window(trainer, [small.batch(3, seed=1)] * 2)
    assert "accuracy" in first.metrics and "other" not in first.metrics
    assert second.metrics["other"] == 7 and "accuracy" not in second.metrics


def test_a_metric_that_only_some_micro_batches_have_is_divided_by_their_weight_alone(small):
    extra = lambda out: LossOutput(out.primary_loss, {"extra": WeightedMetric(jnp.float32(6), jnp.float32(2))})  # noqa: E731
    trainer = small.trainer(depth=3, loss=switching(small, extra))
    report = run_window(trainer, [small.batch(2, seed=1), small.batch(3, seed=2), small.batch(2, seed=3)])
    assert report.metrics["extra"] == 3.0


@pytest.mark.parametrize(
    ("loss", "has_aux", "error", "words"),
    [
        (lambda model, **batch: (jnp.float32(0), {}), False, MetricTypeError, "has_aux=True"),
        (lambda model, **batch: jnp.float32(0), True, MetricTypeError, "has_aux=True"),
        (lambda model, **batch: jnp.zeros((2,)), False, MetricValueError, r"shape \(2,\)"),
        (
            lambda model, **batch: LossOutput(jnp.float32(0), {"grad_norm": jnp.float32(1)}),
            False,
            MetricValueError,
            "grad_norm",
        ),
        (lambda model, **batch: LossOutput(jnp.float32(0), {"x": "many"}), False, MetricTypeError, "'x' is str"),
    ],
)
def test_a_loss_of_another_form_is_refused_by_name(small, loss, has_aux, error, words):
    trainer = small.trainer(loss=loss, has_aux=has_aux)
    trainer.accumulate(small.batch(2, seed=1))
    with pytest.raises(error, match=words):
        trainer.update()
