"""Supervised steps on a task's corpus: the toy teacher, and the student's warm start.

A causal teacher is the same machinery with blocks of one slot and no mask token: every slot is a seed, predicted from the
clean stream. The warm start masks slots at random.
"""

from collections.abc import Callable

import optax

from contracts.tokens import DiffusionTokenBatch
from pipeline.config import PretrainingSettings
from pipeline.corpus import Corpus
from pipeline.diffusion.blocks import BlockLayout
from pipeline.diffusion.streams import student_logits_fn
from pipeline.models.decoder import Decoder
from pipeline.objectives.sft import configure_diffusion_sft
from pipeline.training.config import TrainingConfig
from pipeline.training.trainer import PeftTrainer

REPORT_EVERY = 50


def train_on_corpus(
    model: Decoder,
    corpus: Corpus,
    layout: BlockLayout,
    settings: PretrainingSettings,
    *,
    seed: int,
    min_noise: float,
    progress: Callable[..., None],
) -> None:
    """Train ``model`` in place with plain cross entropy, on a cosine schedule to a tenth of the rate.

    Args:
      model: teacher (causal layout) or student (its block layout).
      corpus: what to learn.
      layout: which slots are masked and which logit predicts them.
      settings: steps, rows, rate.
      seed: of draws and masks.
      min_noise: least masking level.
      progress: ``(done, total, **numbers)``, every 50 steps.
    """
    schedule = optax.cosine_decay_schedule(settings.learning_rate, settings.steps, alpha=0.1)
    optimizer = optax.adam(schedule)
    trainer = PeftTrainer(model, optimizer, TrainingConfig(max_steps=settings.steps))
    configure_diffusion_sft(trainer, _unchanged, student_logits_fn(layout))
    for done, batch in enumerate(corpus.batches(layout, settings.rows, settings.steps, seed, min_noise), start=1):
        trainer.accumulate(batch)
        report = trainer.update()
        if done % REPORT_EVERY == 0 or done == settings.steps:
            progress(done, settings.steps, loss=float(report.metrics["loss"]))


def _unchanged(batch: DiffusionTokenBatch, /) -> DiffusionTokenBatch:
    return batch


def causal_layout(layout: BlockLayout) -> BlockLayout:
    """The layout of a causal model over the same prompts and completions."""
    return BlockLayout(
        block_size=1,
        origin="response",
        prompt_attention="causal",
        alignment="shifted",
        context="clean",
        prompt_length=layout.prompt_length,
        completion_length=layout.completion_length,
        mask_id=None,
    )
