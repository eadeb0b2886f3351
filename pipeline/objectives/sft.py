"""Supervised fine-tuning: cross entropy of given targets, without any shift."""

from typing import Any, Protocol, TypeVar, runtime_checkable

import jax.numpy as jnp

from contracts.losses import LossOutput, WeightedMetric
from contracts.tokens import DiffusionBatchAdapter, DiffusionLogitsFn, DiffusionTokenBatch, compute_diffusion_logits
from pipeline.objectives.cross_entropy import loss_weights, token_cross_entropy


@runtime_checkable
class ConfigurableTrainer(Protocol):
    """A trainer that calls `loss_fn(model, **model_input_fn(batch))`."""

    def with_loss_fn(self, fn: Any, has_aux: bool = False) -> Any: ...

    def with_gen_model_input_fn(self, fn: Any) -> Any: ...


Trainer = TypeVar("Trainer", bound=ConfigurableTrainer)


def diffusion_loss_fn(model: Any, batch: DiffusionTokenBatch, logits_fn: DiffusionLogitsFn) -> LossOutput:
    """Weighted cross entropy at physical target positions: (Σ w·CE(s, target), Σ w).

    Args:
        model: What `logits_fn` scores with.
        batch: Inputs, targets `[B, L]` and weights `[B, L]`; already aligned.
        logits_fn: `(model, model_inputs) -> [B, L, V]`.

    Returns:
        Primary loss (Σ w·ce, Σ w), float32; no auxiliary metrics.

    Raises:
        BatchTypeError, BatchValueError: As `compute_diffusion_logits`.
    """
    logits = compute_diffusion_logits(model, batch, logits_fn)
    weights = loss_weights(batch.loss_weights)
    losses = token_cross_entropy(logits, batch.target_ids, weights)
    return LossOutput(WeightedMetric(jnp.sum(weights * losses), jnp.sum(weights)), {})


def configure_diffusion_sft(trainer: Trainer, adapter: DiffusionBatchAdapter, logits_fn: DiffusionLogitsFn) -> Trainer:
    """Sets a trainer up for supervised fine-tuning and returns it.

    Args:
        trainer: See `ConfigurableTrainer`.
        adapter: Raw batch → `DiffusionTokenBatch`; runs inside the traced step.
        logits_fn: `(model, model_inputs) -> [B, L, V]`.
    """

    def model_inputs(raw: Any) -> dict[str, Any]:
        return {"batch": adapter(raw)}

    def loss(model: Any, batch: DiffusionTokenBatch) -> LossOutput:
        return diffusion_loss_fn(model, batch, logits_fn)

    trainer.with_gen_model_input_fn(model_inputs)
    trainer.with_loss_fn(loss)
    return trainer
