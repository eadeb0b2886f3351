"""The user's loss as the trainer differentiates it: an unreduced float32 sum, with its denominator and metrics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from contracts.errors import MetricTypeError, MetricValueError
from contracts.losses import LossOutput, MetricSums, WeightedMetric, open_window
from pipeline.training.parts import Arrays, ModelParts

GRADIENT_NORM = "grad_norm"
"""The trainer's own metric; a loss may not use this name."""


@dataclass(frozen=True)
class Objective:
    """A loss bound to the model it scores.

    Args:
        parts: The model taken apart.
        loss_fn: `loss_fn(model, **inputs)` → scalar, `(scalar, aux)` with `has_aux`, or `LossOutput`.
        gen_model_input_fn: Batch → the keyword arguments of `loss_fn`; traced with the step.
        has_aux: Whether `loss_fn` returns `(scalar, aux)`.
    """

    parts: ModelParts
    loss_fn: Callable[..., Any]
    gen_model_input_fn: Callable[[Any], Any]
    has_aux: bool

    def gradients(
        self, trainable: Arrays, counters: Arrays, frozen: Arrays, batch: Any
    ) -> tuple[Arrays, MetricSums, Arrays]:
        """Differentiates the unreduced sum of one micro-batch.

        Returns:
            Σ∇ in the parameters' dtypes; the micro-batch's sums and denominators; the counters afterwards.
        """

        def unreduced_sum(trainable: Arrays):
            output, counters_after = self._score(trainable, counters, frozen, batch, evaluating=False)
            window = open_window(output)
            primary = output.primary_loss
            value = primary.unreduced_sum if isinstance(primary, WeightedMetric) else primary
            return jnp.asarray(value).astype(jnp.float32), (window, counters_after)

        gradients, (window, counters_after) = jax.grad(unreduced_sum, has_aux=True)(trainable)
        return gradients, window, counters_after

    def training_sums(self, trainable: Arrays, counters: Arrays, frozen: Arrays, batch: Any) -> MetricSums:
        """The sums and denominators that `gradients` would return, without the gradients."""
        return open_window(self._score(trainable, counters, frozen, batch, evaluating=False)[0])

    def evaluation_sums(self, trainable: Arrays, counters: Arrays, frozen: Arrays, batch: Any) -> MetricSums:
        """The sums and denominators of one batch, with the model in evaluation mode (no dropout)."""
        return open_window(self._score(trainable, counters, frozen, batch, evaluating=True)[0])

    def _score(
        self, trainable: Arrays, counters: Arrays, frozen: Arrays, batch: Any, *, evaluating: bool
    ) -> tuple[LossOutput, Arrays]:
        model = self.parts.merge(trainable, counters, frozen)
        if evaluating:
            model.eval()
        inputs = self.gen_model_input_fn(batch)
        if not isinstance(inputs, Mapping):
            raise MetricTypeError(
                f"gen_model_input_fn returned {type(inputs).__name__}; it must return a mapping of the loss function's"
                " keyword arguments"
            )
        output = as_loss_output(self.loss_fn(model, **inputs), self.has_aux)
        return output, self.parts.counters_after(model, trainable, frozen)


def as_loss_output(result: Any, has_aux: bool) -> LossOutput:
    """Gives the three forms of a loss one form.

    Args:
        result: Scalar, `(scalar, aux)` or `LossOutput`.
        has_aux: Whether a pair is expected; a `LossOutput` is taken either way.

    Raises:
        MetricTypeError: Another form than announced, or a metric that is no number.
        MetricValueError: A loss or metric that is not a scalar, or a reserved name.
    """
    if isinstance(result, LossOutput):
        output = result
    elif has_aux:
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise MetricTypeError(
                f"with has_aux=True the loss must return (scalar, mapping of metrics), it returned {_describe(result)}"
            )
        output = LossOutput(primary_loss=result[0], aux_metrics=dict(result[1]))
    else:
        output = LossOutput(primary_loss=result)
    if GRADIENT_NORM in output.aux_metrics:
        raise MetricValueError(f"auxiliary metric {GRADIENT_NORM!r} hides the trainer's own of that name: rename it")
    _require_scalar("the loss", output.primary_loss)
    for name, metric in output.aux_metrics.items():
        _require_scalar(f"auxiliary metric {name!r}", metric)
    return output


def _require_scalar(name: str, metric: Any) -> None:
    leaves = (metric.unreduced_sum, metric.denominator) if isinstance(metric, WeightedMetric) else (metric,)
    for leaf in leaves:
        if isinstance(leaf, bool) or (not isinstance(leaf, int | float) and not hasattr(leaf, "dtype")):
            raise MetricTypeError(
                f"{name} is {_describe(metric)}; expected a scalar or a WeightedMetric (a loss that returns a pair"
                " needs has_aux=True)"
            )
        if jnp.shape(leaf) != ():
            raise MetricValueError(f"{name} has shape {jnp.shape(leaf)}; expected a scalar: sum it, unreduced")


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: ({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__
