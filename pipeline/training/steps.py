"""The four device programs of training, as pure functions: fused, accumulate, update, evaluate."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from contracts.losses import MetricSums, close_window
from pipeline.training.accumulator import (
    NO_MICRO_BATCH,
    GradientAccumulator,
    global_norm,
    mean_scale,
    primary_sum,
    total_denominator,
)
from pipeline.training.objective import Objective
from pipeline.training.optimizer import apply_optimizer
from pipeline.training.parts import Arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Outcome:
    """What closing a window gave; scalars, on device until somebody reads them.

    Args:
        metrics: Every metric divided once, float32; the loss under `loss`.
        denominator: Σdenominator of the loss.
        gradient_norm: Norm of the mean gradients, float32.
        finite: Whether loss and gradient norm were finite; a norm that overflows float32 is not.
        first_non_finite: Index of the first micro-batch that was not, if it is known; else −1.
    """

    metrics: Any
    denominator: Any
    gradient_norm: Any
    finite: Any
    first_non_finite: Any


@dataclass(frozen=True)
class TrainingSteps:
    """The step functions of one objective and one optimiser."""

    objective: Objective
    optimizer: optax.GradientTransformation

    def fused(
        self, trainable: Arrays, optimizer_state: Any, counters: Arrays, frozen: Arrays, batch: Any
    ) -> tuple[Arrays, Any, Arrays, Outcome]:
        """A window of one micro-batch: differentiate and update in one program, without accumulator memory."""
        gradients, window, counters = self.objective.gradients(trainable, counters, frozen, batch)
        trainable, optimizer_state, outcome = self._close(trainable, optimizer_state, gradients, window)
        return trainable, optimizer_state, counters, outcome

    def accumulate(
        self, accumulator: GradientAccumulator, trainable: Arrays, counters: Arrays, frozen: Arrays, batch: Any
    ) -> tuple[GradientAccumulator, Arrays, jax.Array]:
        """Differentiates one micro-batch and adds it. The last output only tells when this step is done."""
        gradients, window, counters = self.objective.gradients(trainable, counters, frozen, batch)
        return accumulator.add(gradients, window), counters, primary_sum(window)

    def update(
        self, trainable: Arrays, optimizer_state: Any, accumulator: GradientAccumulator
    ) -> tuple[Arrays, Any, GradientAccumulator, Outcome]:
        """Closes an accumulated window: one division, one optimiser step, and the accumulator cleared in place."""
        trainable, optimizer_state, outcome = self._close(
            trainable, optimizer_state, accumulator.gradients, accumulator.window, accumulator.first_non_finite
        )
        return trainable, optimizer_state, accumulator.cleared(), outcome

    def evaluate(self, trainable: Arrays, counters: Arrays, frozen: Arrays, batch: Any) -> MetricSums:
        """The undivided sums of one evaluation batch."""
        return self.objective.evaluation_sums(trainable, counters, frozen, batch)

    def _close(
        self,
        trainable: Arrays,
        optimizer_state: Any,
        gradients: Arrays,
        window: MetricSums,
        first_non_finite: jax.Array | None = None,
    ) -> tuple[Arrays, Any, Outcome]:
        denominator, scale = total_denominator(window), mean_scale(window)
        means = {
            name: (total.astype(jnp.float32) * scale).astype(trainable[name].dtype) for name, total in gradients.items()
        }
        weighted = denominator != 0
        norm = jnp.where(weighted, global_norm(gradients) * scale, jnp.float32(0))
        finite = jnp.isfinite(norm) & jnp.isfinite(primary_sum(window)) & jnp.isfinite(denominator)
        trainable, optimizer_state = apply_optimizer(
            self.optimizer, means, optimizer_state, trainable, finite & weighted
        )
        outcome = Outcome(
            metrics=close_window(window),
            denominator=denominator,
            gradient_norm=norm,
            finite=finite,
            first_non_finite=jnp.int32(NO_MICRO_BATCH) if first_non_finite is None else first_non_finite,
        )
        return trainable, optimizer_state, outcome
