"""Gradients and denominators of an open window, added up in float32 and divided once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from contracts.losses import PRIMARY_LOSS, MetricSums, ScalarMean, WeightedMetric, merge_windows
from pipeline.training.parts import Arrays

NO_MICRO_BATCH = -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GradientAccumulator:
    """Σ over the micro-batches of one window, in the order they came: the same order gives the same bits.

    Args:
        gradients: Σ∇ of the unreduced sums, float32, by parameter name.
        window: Σ of every metric's sum and denominator, the loss included.
        micro_batches: How many were added, int32 scalar.
        first_non_finite: Index of the first one whose loss or gradient was not finite, int32 scalar; −1 for none.
    """

    gradients: Any
    window: Any
    micro_batches: Any
    first_non_finite: Any

    @staticmethod
    def empty(trainable: Mapping[str, jax.Array], window: MetricSums) -> "GradientAccumulator":
        """An accumulator for these parameters and these metrics (arrays, or their shapes and dtypes)."""
        return GradientAccumulator(
            gradients={name: jnp.zeros(array.shape, jnp.float32) for name, array in trainable.items()},
            window=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), window),
            micro_batches=jnp.zeros((), jnp.int32),
            first_non_finite=jnp.full((), NO_MICRO_BATCH, jnp.int32),
        )

    def add(self, gradients: Arrays, window: MetricSums) -> "GradientAccumulator":
        """Adds one micro-batch."""
        finite = jnp.isfinite(global_norm(gradients)) & jnp.isfinite(primary_sum(window))
        first = jnp.where(finite | (self.first_non_finite != NO_MICRO_BATCH), self.first_non_finite, self.micro_batches)
        return GradientAccumulator(
            gradients={name: total + gradients[name].astype(jnp.float32) for name, total in self.gradients.items()},
            window=merge_windows(self.window, window),
            micro_batches=self.micro_batches + jnp.int32(1),
            first_non_finite=first,
        )

    def cleared(self) -> "GradientAccumulator":
        """The same accumulator with nothing in it; in a jitted step it reuses the donated buffers."""
        return GradientAccumulator.empty(self.gradients, self.window)


def mean_scale(window: MetricSums) -> jax.Array:
    """What Σ∇ is multiplied by: `1 / max(Σdenominator + eps, min_denom)`, the divisor of the logged loss.

    Args:
        window: The window's sums; its primary loss gives the denominator and its bounds.

    Returns:
        float32 scalar; exactly 0 where that divisor is 0.
    """
    loss = window[PRIMARY_LOSS]
    divisor = loss.count if isinstance(loss, ScalarMean) else loss.bounded_denominator()
    empty = divisor == 0
    return jnp.where(empty, jnp.float32(0), jnp.float32(1) / jnp.where(empty, jnp.float32(1), divisor))


def total_denominator(window: MetricSums) -> jax.Array:
    """Σdenominator of the loss, without its bounds; a scalar loss counts 1 per micro-batch."""
    loss = window[PRIMARY_LOSS]
    return loss.denominator if isinstance(loss, WeightedMetric) else loss.count


def primary_sum(window: MetricSums) -> jax.Array:
    """Σ of the loss, undivided."""
    loss = window[PRIMARY_LOSS]
    return loss.unreduced_sum if isinstance(loss, WeightedMetric) else loss.total


def global_norm(arrays: Arrays) -> jax.Array:
    """`sqrt(Σ x²)` over all elements, float32; not finite if any element is not, or if the sum overflows.

    A full contraction, not a reduction of squares: it never holds the squares, and leaves shardings alone.
    """
    square = jnp.float32(0)
    for array in arrays.values():
        exact = array.astype(jnp.float32)
        square = square + jnp.tensordot(exact, exact, axes=exact.ndim, precision="highest")
    return jnp.sqrt(square)
