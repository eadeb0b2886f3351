"""The loss of an on-policy run: distillation on visited canvases, and evidence that these weights visited them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from contracts.distillation import DiffusionDistillationBatch
from contracts.losses import LossOutput
from pipeline.config import ObjectiveSettings
from pipeline.diffusion.blocks import BlockLayout
from pipeline.diffusion.recorded import log_prob_gap
from pipeline.diffusion.streams import student_logits_fn
from pipeline.objectives.divergences import Divergence, forward_kl, jsd, reverse_kl
from pipeline.objectives.opd import diffusion_opd_loss_fn, validate_opd_settings
from pipeline.objectives.sft import Trainer


def configured_divergence(objective: ObjectiveSettings) -> Divergence:
    """The divergence that the settings name."""
    if objective.divergence == "jsd":
        return jsd(objective.beta)
    return {"forward_kl": forward_kl, "reverse_kl": reverse_kl}[objective.divergence]


def configure_student_distillation(
    trainer: Trainer, layout: BlockLayout, objective: ObjectiveSettings, rollout_temperature: float | None
) -> Trainer:
    """Sets a trainer up for the run's `DiffusionDistillationBatch`es and returns it.

    Beside the metrics of `diffusion_opd_loss_fn`: ``distill/soft_loss/left_committed`` and ``.../left_masked``, the
    divergence where everything left of the slot in its block is on the canvas (its floor is 0 for a causal teacher) and
    where it is not (its floor is unknown); and ``distill/log_prob_gap``, the mean |log-probability of a committed token
    under these weights − as recorded by the rollout|. At lag 0 the gap is rounding; anything else is an alarm.

    Args:
      trainer: a `PeftTrainer`.
      layout: of the student.
      objective: divergence, temperature and weights.
      rollout_temperature: at which the rollouts recorded their log-probabilities; 0 is greedy. None where the canvases
        were not visited by them (random states): nothing was recorded, and there is no gap to report.
    """
    settings: dict[str, Any] = {
        "temperature": objective.temperature,
        "soft_loss_weight": objective.soft,
        "hard_loss_weight": objective.hard,
    }
    validate_opd_settings(**settings)
    divergence = configured_divergence(objective)
    score = student_logits_fn(layout)

    def loss(model: Any, batch: DiffusionDistillationBatch) -> LossOutput:
        scored = []

        def logits_fn(model: Any, model_inputs: Mapping[str, Any], /) -> Any:
            scored.append(score(model, model_inputs))
            return scored[-1]

        output = diffusion_opd_loss_fn(
            model, batch, logits_fn, divergence=divergence, soft_loss_groups=_left_context, **settings
        )
        if rollout_temperature is None:
            return output
        gap = log_prob_gap(scored[0], batch.student_batch, rollout_temperature)
        return replace(output, aux_metrics={**output.aux_metrics, "distill/log_prob_gap": gap})

    return trainer.with_gen_model_input_fn(lambda batch: {"batch": batch}).with_loss_fn(loss)


def _left_context(batch: DiffusionDistillationBatch) -> dict[str, Any]:
    committed_BW = batch.student_batch.model_inputs["left_context_committed"]
    return {"left_committed": committed_BW, "left_masked": ~committed_BW}
