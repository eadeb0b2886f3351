"""Losses and metrics: added as sums, divided once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import MetricTypeError, MetricValueError
from contracts.losses import (
    LossOutput,
    WeightedMetric,
    add_to_window,
    close_window,
    divide_or_zero,
    merge_windows,
    open_window,
    reduce_losses,
)


@pytest.mark.parametrize(
    ("unreduced_sum", "denominator", "eps", "min_denom", "expected"),
    [
        (6.0, 4.0, None, None, 1.5),
        (6.0, 4.0, 2.0, None, 1.0),
        (6.0, 0.25, None, 1.0, 6.0),
        (6.0, 0.25, 0.5, 0.25, 8.0),  # eps is added first, the bound is taken after
        (0.05, 0.1, None, None, 0.5),  # a fractional total below 1 is not raised to 1
        (3.0, 0.0, None, None, 0.0),
        (3.0, 0.0, None, 2.0, 1.5),
        (3.0, 0.0, 0.5, None, 6.0),
    ],
)
def test_a_metric_is_its_sum_over_its_bounded_denominator(unreduced_sum, denominator, eps, min_denom, expected):
    value = WeightedMetric(unreduced_sum, denominator, eps, min_denom).compute()
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_dividing_by_an_empty_window_is_exactly_zero_in_value_and_gradient():
    value, gradients = jax.value_and_grad(divide_or_zero, argnums=(0, 1))(3.0, 0.0)
    assert value == 0.0
    assert gradients == (0.0, 0.0)


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.floats(0, 5)), min_size=1, max_size=8),
    st.sampled_from([None, 1e-3]),
    st.sampled_from([None, 1.0]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_split_and_order_of_rows_reduces_to_the_same_mean(rows, eps, min_denom, random):
    total, weight = sum(row[0] for row in rows), sum(row[1] for row in rows)
    divisor = max(weight + (eps or 0.0), min_denom or 0.0)
    shuffled = random.sample(rows, len(rows))
    cut = random.randint(1, len(rows))
    outputs = [
        LossOutput(WeightedMetric(sum(r[0] for r in part), sum(r[1] for r in part), eps, min_denom), {})
        for part in (shuffled[:cut], shuffled[cut:])
        if part
    ]
    expected = total / divisor if divisor else 0.0
    if abs(divisor) > 1e-6 or divisor == 0:
        np.testing.assert_allclose(reduce_losses(outputs)["loss"], expected, rtol=1e-4, atol=1e-3 / max(divisor, 1e-2))


def test_bounds_are_applied_once_and_not_per_micro_batch():
    outputs = [LossOutput(WeightedMetric(1.0, 0.25, 0.5, 1.0), {}) for _ in range(4)]
    # Once: 4 / max(1 + 0.5, 1). Once per micro-batch it would be 4 / max(4 · (0.25 + 0.5), 1) or the mean of 1 / 1.
    np.testing.assert_allclose(reduce_losses(outputs)["loss"], 4 / 1.5, rtol=1e-6)


def test_a_plain_scalar_is_averaged_over_micro_batches_while_a_weighted_one_is_pooled():
    outputs = [
        LossOutput(WeightedMetric(1.0, 1), {"temperature": 1.0, "kl": WeightedMetric(1.0, 1)}),
        LossOutput(WeightedMetric(9.0, 3), {"temperature": 2.0, "kl": WeightedMetric(0.0, 3)}),
    ]
    reduced = {name: float(value) for name, value in reduce_losses(outputs).items()}
    assert reduced == {"loss": 2.5, "temperature": 1.5, "kl": 0.25}


def test_a_scalar_loss_is_averaged_too():
    assert float(reduce_losses([LossOutput(1.0, {}), LossOutput(4.0, {})])["loss"]) == 2.5


def test_unequal_hosts_merge_to_the_one_process_mean():
    losses = [LossOutput(WeightedMetric(2.0, 1), {}), LossOutput(WeightedMetric(6.0, 5), {})]
    merged = close_window(merge_windows(open_window(losses[0]), open_window(losses[1])))
    np.testing.assert_allclose(merged["loss"], 8 / 6, rtol=1e-6)  # the mean of means would be 1.6


@pytest.mark.parametrize("first", [WeightedMetric(1.0, 1.0), 1.0])
@pytest.mark.parametrize("where", ["loss", "kl"])
def test_a_metric_that_changes_its_kind_inside_a_window_is_refused_by_name(first, where):
    second = 1.0 if isinstance(first, WeightedMetric) else WeightedMetric(1.0, 1.0)
    steady = WeightedMetric(1.0, 1.0)
    outputs = [
        LossOutput(metric, {}) if where == "loss" else LossOutput(steady, {"kl": metric}) for metric in (first, second)
    ]
    with pytest.raises(MetricTypeError, match=f"'{where}' changes from") as caught:
        reduce_losses(outputs)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("bounds", [(1e-8, None), (None, 1.0), (0.0, 2.0)])
def test_different_bounds_in_one_window_are_refused_with_both_sides(bounds):
    outputs = [LossOutput(WeightedMetric(1.0, 1.0), {}), LossOutput(WeightedMetric(1.0, 1.0, *bounds), {})]
    with pytest.raises(MetricValueError, match=f"eps=None, min_denom=None and eps={bounds[0]}, min_denom={bounds[1]}"):
        reduce_losses(outputs)


def test_a_metric_may_not_take_the_name_of_the_loss():
    with pytest.raises(ValueError, match="'loss' hides the primary loss"):
        open_window(LossOutput(WeightedMetric(1.0, 1.0), {"loss": 2.0}))


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="empty window"):
        reduce_losses([])


@pytest.mark.parametrize("bound", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["eps", "min_denom"])
def test_a_bound_that_is_negative_or_not_finite_is_refused(name, bound):
    with pytest.raises(MetricValueError, match=f"{name} must be finite and nonnegative"):
        WeightedMetric(1.0, 1.0, **{name: bound})


def test_a_traced_bound_is_refused():
    with pytest.raises(TypeError):
        jax.jit(lambda eps: WeightedMetric(1.0, 1.0, eps).compute())(1.0)


def test_a_window_accumulates_under_jit_with_static_bounds_and_any_leaf_dtype():
    output = LossOutput(
        WeightedMetric(jnp.bfloat16(1.5), jnp.int32(3), 1e-3, 0.5),
        {"hits": WeightedMetric(jnp.int32(2), jnp.bool_(True)), "rate": np.float64(0.5)},
    )
    window = jax.jit(lambda o: add_to_window(open_window(o), o))(output)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(window))
    assert window["loss"].eps == 1e-3
    reduced = close_window(window)
    np.testing.assert_allclose(reduced["loss"], 3.0 / 6.001, rtol=1e-6)
    assert float(reduced["hits"]) == 2.0
    assert float(reduced["rate"]) == 0.5


def test_a_metric_absent_from_some_micro_batches_counts_only_where_it_is():
    outputs = [LossOutput(WeightedMetric(1.0, 1), {"rare": 3.0}), LossOutput(WeightedMetric(1.0, 1), {})]
    assert float(reduce_losses(outputs)["rare"]) == 3.0
