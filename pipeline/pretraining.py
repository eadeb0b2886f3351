"""Supervised steps on a task's corpus: the toy teacher, and the student's warm start.

    examples ──draw by weight──▶ tokens [B, L] ──states──▶ DiffusionTokenBatch ──▶ PeftTrainer

A causal teacher is the same machinery with blocks of one slot and no mask token: every slot is a seed, predicted from the
clean stream. The warm start masks slots at random.
"""

from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from contracts.errors import PromptError
from contracts.tokens import DiffusionTokenBatch
from pipeline.config import PretrainingSettings
from pipeline.data.tasks import Example
from pipeline.data.tokenizers import Tokenizer
from pipeline.diffusion.blocks import BlockLayout
from pipeline.diffusion.decoded import Decoded
from pipeline.diffusion.keys import row_keys
from pipeline.diffusion.states import random_states
from pipeline.diffusion.streams import student_logits_fn
from pipeline.models.decoder import Decoder
from pipeline.objectives.sft import configure_diffusion_sft
from pipeline.training.config import TrainingConfig
from pipeline.training.trainer import PeftTrainer

REPORT_EVERY = 50


class Corpus:
    """A task's examples as arrays.

    Args:
      examples: right completions with their weights.
      tokenizer: its first end token closes each completion.
      layout: prompt and completion lengths that every example must fit.

    Raises:
      PromptError: an example is too long, naming it.
    """

    def __init__(self, examples: Sequence[Example], tokenizer: Tokenizer, layout: BlockLayout):
        rows = len(examples)
        self.tokens_NL = np.zeros((rows, layout.length), np.int32)
        self.prompt_lengths_N = np.zeros((rows,), np.int32)
        self.lengths_N = np.zeros((rows,), np.int32)
        stop = tokenizer.eos_ids[0]
        for row, example in enumerate(examples):
            prompt = tokenizer.encode(example.prompt)
            completion = [*tokenizer.encode(example.completion), stop]
            if len(prompt) > layout.prompt_length or len(completion) > layout.completion_length:
                raise PromptError(
                    f"example {example.prompt!r} + {example.completion!r} has {len(prompt)} + {len(completion)} tokens; "
                    f"the task's lengths are {layout.prompt_length} + {layout.completion_length}"
                )
            self.tokens_NL[row, : len(prompt) + len(completion)] = prompt + completion
            self.prompt_lengths_N[row], self.lengths_N[row] = len(prompt), len(completion)
        weights_N = np.array([example.weight for example in examples], np.float64)
        self._weights_N = weights_N / weights_N.sum()

    def batches(
        self, layout: BlockLayout, rows: int, steps: int, seed: int, min_noise: float
    ) -> Iterator[DiffusionTokenBatch]:
        """``steps`` batches of ``rows`` drawn examples, masked at random (seeds of a shifted layout stay clean)."""
        generator = np.random.default_rng(seed)
        budget_C = np.arange(layout.completion_length, dtype=np.int32)[None]

        @jax.jit
        def states(tokens_BL, exists_BC, length_B, prompt_lengths_B, keys_B):
            none_B = jnp.zeros_like(length_B)
            complete = Decoded(
                tokens_BL=tokens_BL,
                commit_step_BC=jnp.where(exists_BC, jnp.int32(0), jnp.int32(-1)),
                log_prob_BC=jnp.zeros(exists_BC.shape, jnp.float32),
                length_B=length_B,
                truncated_B=none_B > 0,
                forwards_B=none_B,
                commit_passes_B=none_B,
            )
            return random_states(complete, prompt_lengths_B, keys_B, layout, min_noise=min_noise)

        for step in range(steps):
            chosen_B = generator.choice(len(self._weights_N), size=rows, p=self._weights_N)
            lengths_B = self.lengths_N[chosen_B]
            keys_B = row_keys(seed, step, np.arange(rows))
            exists_BC = budget_C < lengths_B[:, None]
            yield states(self.tokens_NL[chosen_B], exists_BC, lengths_B, self.prompt_lengths_N[chosen_B], keys_B)


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
