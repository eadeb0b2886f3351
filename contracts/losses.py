"""Losses and metrics travel as (sum, denominator) and are divided once, when their window closes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from contracts.errors import MetricTypeError, MetricValueError

PRIMARY_LOSS = "loss"
"""The key of the primary loss among the reduced metrics."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WeightedMetric:
    """A weighted mean that is not divided yet: `unreduced_sum / max(denominator + eps, min_denom)`.

    Args:
        unreduced_sum: Σ w·x, scalar (or any shape), real.
        denominator: Σ w, same shape, real or integer, ≥ 0.
        eps: Added to the denominator; Python float ≥ 0, static; `None` adds nothing.
        min_denom: Lower bound of the denominator after `eps`; Python float ≥ 0, static; `None` bounds nothing.

    Raises:
        MetricTypeError: A bound is not a Python number.
        MetricValueError: A bound is negative or not finite.
    """

    unreduced_sum: Any
    denominator: Any
    eps: float | int | None = field(default=None, metadata={"static": True})
    min_denom: float | int | None = field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        for name, bound in (("eps", self.eps), ("min_denom", self.min_denom)):
            if bound is None:
                continue
            if isinstance(bound, bool) or not isinstance(bound, float | int):
                raise MetricTypeError(
                    f"WeightedMetric {name} is static and must be a Python float or None, got {type(bound).__name__};"
                    " move a traced value into the denominator"
                )
            if not math.isfinite(bound) or bound < 0:
                raise MetricValueError(f"WeightedMetric {name} must be finite and nonnegative, got {bound}")

    def bounded_denominator(self) -> jax.Array:
        """Returns `max(denominator + eps, min_denom)`, float32: the one divisor of the value and of its gradient."""
        denominator = _float32(self.denominator)
        if self.eps is not None:
            denominator = denominator + jnp.float32(self.eps)
        if self.min_denom is not None:
            denominator = jnp.maximum(denominator, jnp.float32(self.min_denom))
        return denominator

    def compute(self) -> jax.Array:
        """Returns `unreduced_sum / max(denominator + eps, min_denom)`, float32, exactly 0 where that divisor is 0."""
        return divide_or_zero(self.unreduced_sum, self.bounded_denominator())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossOutput:
    """What a loss function returns: the loss to differentiate, undivided, and what to report beside it.

    Args:
        primary_loss: `WeightedMetric`; the trainer differentiates its `unreduced_sum`.
        aux_metrics: Name → `WeightedMetric` (added up) or plain scalar (averaged over micro-batches).
    """

    primary_loss: Any
    aux_metrics: Any = field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScalarMean:
    """A plain scalar's running mean over the micro-batches of a window; every micro-batch counts once."""

    total: Any
    count: Any

    def compute(self) -> jax.Array:
        """Returns `total / count`, float32."""
        return divide_or_zero(self.total, self.count)


MetricSums = dict[str, WeightedMetric | ScalarMean]
"""An open window: what its micro-batches have added up so far, by name. A pytree of float32 leaves."""


def divide_or_zero(numerator: Any, denominator: Any) -> jax.Array:
    """Returns `numerator / denominator` in float32, exactly 0 (value and gradient) where the denominator is 0."""
    numerator, denominator = _float32(numerator), _float32(denominator)
    empty = denominator == 0
    return jnp.where(empty, jnp.float32(0), numerator / jnp.where(empty, jnp.float32(1), denominator))


def open_window(output: LossOutput) -> MetricSums:
    """Starts a window with its first micro-batch.

    Args:
        output: The micro-batch's loss; its primary loss is filed under `PRIMARY_LOSS`.

    Returns:
        Sums, as float32 arrays, ready for `add_to_window`.

    Raises:
        MetricValueError: An auxiliary metric is called `loss`.
    """
    if PRIMARY_LOSS in output.aux_metrics:
        raise MetricValueError(f"auxiliary metric {PRIMARY_LOSS!r} hides the primary loss of that name: rename it")
    named = {PRIMARY_LOSS: output.primary_loss, **output.aux_metrics}
    return {name: _start(metric) for name, metric in named.items()}


def add_to_window(window: Mapping[str, WeightedMetric | ScalarMean], output: LossOutput) -> MetricSums:
    """Adds one micro-batch to a window: sums to sums, denominators to denominators; nothing is divided.

    Args:
        window: What `open_window` or `add_to_window` returned.
        output: The next micro-batch's loss. A metric that it lacks keeps its sums; a new one starts here.

    Raises:
        MetricTypeError: A metric, or the loss, was weighted and is now a plain scalar, or the other way round.
        MetricValueError: A metric's eps or min_denom differs from the window's.
    """
    return merge_windows(window, open_window(output))


def merge_windows(
    left: Mapping[str, WeightedMetric | ScalarMean], right: Mapping[str, WeightedMetric | ScalarMean]
) -> MetricSums:
    """Adds two windows (of other micro-batches, devices or hosts) into one; raises as `add_to_window` does."""
    merged = dict(left)
    for name, metric in right.items():
        merged[name] = _add(name, left[name], metric) if name in left else metric
    return merged


def close_window(window: Mapping[str, WeightedMetric | ScalarMean]) -> dict[str, jax.Array]:
    """Divides every sum of a window once. Returns name → float32 value, the primary loss under `PRIMARY_LOSS`."""
    return {name: metric.compute() for name, metric in window.items()}


def reduce_losses(outputs: Iterable[LossOutput]) -> dict[str, jax.Array]:
    """Reduces all micro-batches of one window in the order given: add, then divide once.

    Args:
        outputs: At least one loss.

    Returns:
        Name → float32 value, the primary loss under `PRIMARY_LOSS`.

    Raises:
        MetricTypeError: A metric, or the loss, changes between weighted and scalar.
        MetricValueError: No outputs, or a metric's eps or min_denom changes.
    """
    window: MetricSums | None = None
    for output in outputs:
        window = open_window(output) if window is None else add_to_window(window, output)
    if window is None:
        raise MetricValueError("an empty window has no loss: reduce at least one LossOutput")
    return close_window(window)


def _float32(value: Any) -> jax.Array:
    return jnp.asarray(value).astype(jnp.float32)


def _start(metric: Any) -> WeightedMetric | ScalarMean:
    if isinstance(metric, WeightedMetric):
        return WeightedMetric(
            _float32(metric.unreduced_sum), _float32(metric.denominator), metric.eps, metric.min_denom
        )
    value = _float32(metric)
    return ScalarMean(value, jnp.ones_like(value))


def _add(
    name: str, left: WeightedMetric | ScalarMean, right: WeightedMetric | ScalarMean
) -> WeightedMetric | ScalarMean:
    if isinstance(left, ScalarMean) and isinstance(right, ScalarMean):
        return ScalarMean(left.total + right.total, left.count + right.count)
    if not (isinstance(left, WeightedMetric) and isinstance(right, WeightedMetric)):
        kinds = ["weighted" if isinstance(metric, WeightedMetric) else "scalar" for metric in (left, right)]
        raise MetricTypeError(
            f"metric {name!r} changes from {kinds[0]} to {kinds[1]} inside one window:"
            " return a WeightedMetric for every micro-batch or for none"
        )
    if (left.eps, left.min_denom) != (right.eps, right.min_denom):
        raise MetricValueError(
            f"metric {name!r} has different bounds inside one window:"
            f" eps={left.eps}, min_denom={left.min_denom} and eps={right.eps}, min_denom={right.min_denom};"
            " they are applied once, to the sum, so they must agree"
        )
    return WeightedMetric(
        left.unreduced_sum + right.unreduced_sum, left.denominator + right.denominator, left.eps, left.min_denom
    )
