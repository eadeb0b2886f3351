"""What the trainer says about closed windows and evaluations: host numbers, made once per window."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax

from contracts.losses import PRIMARY_LOSS, MetricSums, close_window
from pipeline.training.accumulator import NO_MICRO_BATCH
from pipeline.training.objective import GRADIENT_NORM
from pipeline.training.steps import Outcome

ZERO_WEIGHT = "zero weight"
NON_FINITE = "non-finite"


@dataclass(frozen=True)
class UpdateReport:
    """A closed window.

    Args:
        window: Index of the window, from 0.
        train_steps: Optimiser updates after it.
        iter_steps: Micro-batches consumed after it.
        micro_batches: Micro-batches of this window.
        metrics: Name → value over the whole window, with `loss` and `grad_norm`, the prefix applied.
        loss: The loss, divided once.
        gradient_norm: Norm of the mean gradients before any clipping; 0 for zero weight.
        denominator: Σdenominator of the loss.
        skipped: Why the optimiser was not stepped: `zero weight`, `non-finite`, or empty.
        first_non_finite: Index in the window of the first non-finite micro-batch, −1 for none.
        skips: Reason → windows skipped so far.
    """

    window: int
    train_steps: int
    iter_steps: int
    micro_batches: int
    metrics: Mapping[str, float]
    loss: float
    gradient_norm: float
    denominator: float
    skipped: str = ""
    first_non_finite: int = NO_MICRO_BATCH
    skips: Mapping[str, int] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """`applied`, or `skipped: ` and the reason."""
        return f"skipped: {self.skipped}" if self.skipped else "applied"

    def explain_non_finite(self) -> str:
        """What a person needs to know when the numbers are not finite."""
        culprit = (
            f"first in micro-batch {self.first_non_finite} of {self.micro_batches}"
            if self.first_non_finite != NO_MICRO_BATCH
            else f"though each of its {self.micro_batches} micro-batches is finite"
        )
        return (
            f"window {self.window} is not finite: loss {self.loss}, gradient norm {self.gradient_norm}, {culprit}. The"
            " optimiser was not stepped. Look at that batch, lower the learning rate, or set non_finite='skip' to count"
            " such windows and go on"
        )


@dataclass(frozen=True)
class EvaluationReport:
    """One pass over the evaluation data.

    Args:
        window: Closed windows before it.
        train_steps: Optimiser updates before it.
        batches: Batches evaluated.
        metrics: Name → value over all batches, divided once, the prefix applied.
        loss: The loss.
    """

    window: int
    train_steps: int
    batches: int
    metrics: Mapping[str, float]
    loss: float


def read_metrics(window: MetricSums) -> dict[str, float]:
    """Divides the sums of a window and fetches the values."""
    return {name: float(value) for name, value in jax.device_get(close_window(window)).items()}


def read_outcome(
    outcome: Outcome,
    *,
    window: int,
    train_steps: int,
    iter_steps: int,
    micro_batches: int,
    skips: Mapping[str, int],
    prefix: str,
) -> UpdateReport:
    """Fetches what closing a window gave and names it.

    Args:
        outcome: Device scalars of the update.
        window: Index of the window.
        train_steps: Optimiser updates *before* it.
        iter_steps: Micro-batches consumed after it.
        micro_batches: Micro-batches of it.
        skips: Reason → windows skipped before it.
        prefix: Put before every metric name.
    """
    host = jax.device_get(outcome)
    weightless = host.denominator == 0
    skipped = ZERO_WEIGHT if weightless else "" if host.finite else NON_FINITE
    first = int(host.first_non_finite)
    if skipped == NON_FINITE and micro_batches == 1:
        first = 0
    metrics = {name: float(value) for name, value in host.metrics.items()}
    values = {**metrics, GRADIENT_NORM: float(host.gradient_norm)}
    return UpdateReport(
        window=window,
        train_steps=train_steps + (not skipped),
        iter_steps=iter_steps,
        micro_batches=micro_batches,
        metrics={f"{prefix}{name}": value for name, value in values.items()},
        loss=metrics[PRIMARY_LOSS],
        gradient_norm=float(host.gradient_norm),
        denominator=float(host.denominator),
        skipped=skipped,
        first_non_finite=first,
        skips={**skips, skipped: skips.get(skipped, 0) + 1} if skipped else dict(skips),
    )
