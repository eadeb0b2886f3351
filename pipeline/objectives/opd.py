"""On-policy distillation: a teacher's distribution, and labels, on what the student itself wrote."""

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp

from contracts.distillation import DiffusionDistillationBatch, PreparedDiffusionDistillationBatchAdapter
from contracts.errors import BatchValueError, ConfigError
from contracts.losses import LossOutput, WeightedMetric
from contracts.teacher_targets import check_teacher_logits
from contracts.tokens import DiffusionLogitsFn, compute_diffusion_logits
from pipeline.objectives.cross_entropy import active_logits, loss_weights, token_cross_entropy
from pipeline.objectives.divergences import Divergence, forward_kl
from pipeline.objectives.sft import Trainer

SoftLossGroups = Callable[[DiffusionDistillationBatch], Mapping[str, Any]]
"""Batch → name → bool `[B, L]`: positions whose soft loss is reported apart as `distill/soft_loss/<name>`."""


def diffusion_opd_loss_fn(
    student: Any,
    batch: DiffusionDistillationBatch,
    student_logits_fn: DiffusionLogitsFn,
    *,
    temperature: Any = 1.0,
    soft_loss_weight: Any = 1.0,
    hard_loss_weight: Any = 0.0,
    divergence: Divergence = forward_kl,
    soft_loss_groups: SoftLossGroups | None = None,
) -> LossOutput:
    """Distillation loss (a·Σ w·soft + b·Σ w·hard, Σ w), with teacher logits t and student logits s:

        soft_i = T²·D(softmax(t_i/T), softmax(s_i/T)),      hard_i = CE(s_i, target_i) at temperature 1.

    T² keeps the gradient's size independent of T. A component of weight 0 is not computed. An anchor
    (`hard_target_batch`) is scored separately and summed with its own weights; the loss is still divided by the student
    batch's Σ w, since one window has one denominator.

    Args:
        student: What `student_logits_fn` scores with; the only thing differentiated.
        batch: Student batch `[B, L]`, teacher logits `[B, L, V]`, hard targets.
        student_logits_fn: `(model, model_inputs) -> [B, L, V]`.
        temperature: T; real, finite, > 0.
        soft_loss_weight: a; real, finite, ≥ 0.
        hard_loss_weight: b; real, finite, ≥ 0; not both 0.
        divergence: D; forward KL unless said otherwise.
        soft_loss_groups: Positions to report apart, or None.

    Returns:
        Primary loss, and `distill/soft_loss` and `distill/hard_loss` as (sum, Σ w), not scaled by a and b; float32.

    Raises:
        ConfigError: A setting is out of its domain.
        BatchTypeError, BatchValueError: The batch or the student's logits are malformed; on concrete arrays also where
            the divergence does not exist. Under a trace that position's loss is NaN instead.

    Source:
        Hinton et al., "Distilling the Knowledge in a Neural Network" (2015), section 2; on the student's own samples:
        Agarwal et al., "On-Policy Distillation of Language Models" (2024), section 3.
    """
    validate_opd_settings(temperature, soft_loss_weight, hard_loss_weight)
    batch.validate()
    own = batch.student_batch
    hard_batch = batch.hard_batch()
    weights = loss_weights(own.loss_weights)
    total = jnp.sum(weights)
    nothing = jnp.zeros((), jnp.float32)

    def score(token_batch: Any) -> Any:
        logits = compute_diffusion_logits(student, token_batch, student_logits_fn)
        if tuple(logits.shape) != tuple(batch.teacher_logits.shape):
            raise BatchValueError(
                f"student logits and teacher_logits must have one shape, got {tuple(logits.shape)} and"
                f" {tuple(batch.teacher_logits.shape)}: drop the mask id's logit on both sides"
            )
        return logits

    anchored = batch.hard_target_batch is not None
    logits = score(own) if soft_loss_weight or not anchored else None

    primary, soft_sum, groups = nothing, nothing, {}
    if soft_loss_weight:
        divergence.check(own, batch.teacher_logits, logits)
        soft = weights * soft_losses(batch.teacher_logits, logits, weights, temperature, divergence)
        soft_sum = jnp.sum(soft)
        primary = primary + jnp.float32(soft_loss_weight) * soft_sum
        for name, mask in (soft_loss_groups(batch) if soft_loss_groups else {}).items():
            member = loss_weights(mask)
            groups[f"distill/soft_loss/{name}"] = WeightedMetric(jnp.sum(member * soft), jnp.sum(member * weights))

    hard_sum, hard_total = nothing, total
    if anchored:
        hard_weights = loss_weights(hard_batch.loss_weights)
        hard_total = jnp.sum(hard_weights)
    else:
        hard_weights = weights
    if hard_loss_weight:
        hard_logits = score(hard_batch) if anchored else logits
        hard_sum = jnp.sum(hard_weights * token_cross_entropy(hard_logits, hard_batch.target_ids, hard_weights))
        primary = primary + jnp.float32(hard_loss_weight) * hard_sum

    return LossOutput(
        WeightedMetric(primary, total),
        {
            "distill/soft_loss": WeightedMetric(soft_sum, total),
            "distill/hard_loss": WeightedMetric(hard_sum, hard_total),
            **groups,
        },
    )


def soft_losses(
    teacher_logits_BLV: Any, student_logits_BLV: Any, weights_BL: jax.Array, temperature: Any, divergence: Divergence
) -> jax.Array:
    """Returns T²·D(softmax(t/T), softmax(s/T)) for each position, float32 `[B, L]`; 0 at inactive positions.

    Args:
        teacher_logits_BLV: `[B, L, V]` floating; constant.
        student_logits_BLV: `[B, L, V]` floating.
        weights_BL: `[B, L]` float32; decides only which positions are active.
        temperature: T > 0.
        divergence: D.
    """
    teacher = active_logits(teacher_logits_BLV, weights_BL) / jnp.float32(temperature)
    student = active_logits(student_logits_BLV, weights_BL) / jnp.float32(temperature)
    return jnp.float32(temperature) ** 2 * divergence(teacher, student)


def configure_prepared_diffusion_opd(
    trainer: Trainer,
    adapter: PreparedDiffusionDistillationBatchAdapter,
    logits_fn: DiffusionLogitsFn,
    *,
    temperature: Any = 1.0,
    soft_loss_weight: Any = 1.0,
    hard_loss_weight: Any = 0.0,
    divergence: Divergence = forward_kl,
    soft_loss_groups: SoftLossGroups | None = None,
) -> Trainer:
    """Sets a trainer up for on-policy distillation of prepared batches and returns it.

    Neither generates nor proves freshness: that is the caller's, before the batch gets here.

    Args:
        trainer: See `pipeline.objectives.sft.ConfigurableTrainer`.
        adapter: Raw batch → `DiffusionDistillationBatch`; runs inside the traced step, so check values before it, with
            `check_prepared_batch`.
        logits_fn: `(model, model_inputs) -> [B, L, V]`.
        temperature: As the other settings, see `diffusion_opd_loss_fn`.

    Raises:
        ConfigError: A setting is out of its domain.
    """
    validate_opd_settings(temperature, soft_loss_weight, hard_loss_weight)

    def model_inputs(raw: Any) -> dict[str, Any]:
        return {"batch": adapter(raw)}

    def loss(model: Any, batch: DiffusionDistillationBatch) -> LossOutput:
        return diffusion_opd_loss_fn(
            model,
            batch,
            logits_fn,
            temperature=temperature,
            soft_loss_weight=soft_loss_weight,
            hard_loss_weight=hard_loss_weight,
            divergence=divergence,
            soft_loss_groups=soft_loss_groups,
        )

    trainer.with_gen_model_input_fn(model_inputs)
    trainer.with_loss_fn(loss)
    return trainer


def check_prepared_batch(
    batch: DiffusionDistillationBatch, *, soft_loss_weight: Any = 1.0
) -> DiffusionDistillationBatch:
    """Checks everything about a prepared batch that needs values, on the host, before the traced step reads it.

    Args:
        batch: Concrete arrays, `np.ndarray` best: arrays on a device are copied to the host.
        soft_loss_weight: Of the loss that will read it; at 0 the teacher's values don't matter.

    Returns:
        The batch itself.

    Raises:
        BatchTypeError, BatchValueError: As `DiffusionDistillationBatch.validate`; active teacher logits are NaN, +inf
            or a whole row of −inf.
    """
    batch.validate()
    if soft_loss_weight:
        check_teacher_logits(batch.student_batch, batch.teacher_logits)
    return batch


def validate_opd_settings(temperature: Any, soft_loss_weight: Any, hard_loss_weight: Any) -> None:
    """Refuses settings out of their domain, with `ConfigError`: see `diffusion_opd_loss_fn`."""
    settings = {
        "temperature": temperature,
        "soft_loss_weight": soft_loss_weight,
        "hard_loss_weight": hard_loss_weight,
    }
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ConfigError(f"{name} must be a finite real scalar, got {value!r}")
    if temperature <= 0:
        raise ConfigError(f"temperature must be positive, got {temperature}")
    if soft_loss_weight < 0 or hard_loss_weight < 0:
        raise ConfigError(
            f"soft_loss_weight and hard_loss_weight must be nonnegative, got {soft_loss_weight} and {hard_loss_weight}"
        )
    if soft_loss_weight == 0 and hard_loss_weight == 0:
        raise ConfigError("at least one loss weight must be positive, got soft_loss_weight 0 and hard_loss_weight 0")
