"""What the roles send each other: a request for a rollout, the rollout, the teacher's targets, and the joined batch.

An *item* is one micro-batch: one `RolloutRequest`, one `Rollout`, one `TeacherTargets`, one accumulate. Everything here
holds host (numpy) arrays of plain dtypes, so that it crosses Ray's object store without a copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import jax
import numpy as np

from contracts.distillation import DiffusionDistillationBatch
from contracts.errors import BatchValueError
from contracts.tokens import DiffusionTokenBatch
from contracts.weights import WeightVersion
from contracts.wire import WireArray, content_digest, decode

CommitRule = Literal["threshold", "static", "factor", "prefix"]


@dataclass(frozen=True)
class SamplerSettings:
    """How completions are decoded; part of a rollout's provenance.

    Attributes:
      rule: commit rule, see pipeline/diffusion/commit.py.
      value: τ for ``threshold`` and ``prefix``, denoising steps per block for ``static``, f for ``factor``.
      temperature: 0 proposes the likeliest token; above 0 proposals are drawn at that temperature.
      confidence: of the proposed token (``proposed``) or of the likeliest one (``max``).
    """

    rule: CommitRule
    value: float
    temperature: float = 0.0
    confidence: Literal["proposed", "max"] = "proposed"


@dataclass(frozen=True)
class RolloutRequest:
    """One micro-batch of prompts, the randomness it is decoded with, and the version that must decode it.

    Attributes:
      run_id, step, item: the run, the step it will train, and its micro-batch index in that step.
      version: the student weights that must be used; a worker that holds others refuses.
      seed: the run's seed; row keys are folded from (seed, step, stream index).
      stream_indices_B: int64 ``[B]``, position of each row in the run's prompt stream.
      prompt_ids_BP: int32 ``[B, P]``, right-padded.
      prompt_lengths_B: int32 ``[B]``, each in [1, P].
      prompts: the rows' texts and fields for the task's checker, in row order.
    """

    run_id: str
    step: int
    item: int
    version: WeightVersion
    seed: int
    stream_indices_B: np.ndarray
    prompt_ids_BP: np.ndarray
    prompt_lengths_B: np.ndarray
    prompts: tuple["Prompt", ...] = ()

    @property
    def request_id(self) -> str:
        return f"{self.run_id}/{self.step}/{self.item}"

    def validate(self) -> "RolloutRequest":
        """Refuse rows without a prompt, before any model runs; returns self.

        Raises:
          BatchValueError: naming the row.
        """
        rows, width = self.prompt_ids_BP.shape
        if self.prompt_lengths_B.shape != (rows,) or self.stream_indices_B.shape != (rows,):
            raise BatchValueError(
                f"request {self.request_id}: prompt_ids {self.prompt_ids_BP.shape}, prompt_lengths "
                f"{self.prompt_lengths_B.shape} and stream_indices {self.stream_indices_B.shape} differ in rows"
            )
        for row in np.flatnonzero((self.prompt_lengths_B < 1) | (self.prompt_lengths_B > width)):
            raise BatchValueError(
                f"request {self.request_id}: row {row} (stream index {self.stream_indices_B[row]}) has a prompt of "
                f"{self.prompt_lengths_B[row]} tokens; between 1 and {width} are needed"
            )
        return self


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt source: its text, and the other fields of the row, for the task's checker."""

    text: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Provenance:
    """Who wrote a rollout, for which item, how.

    ``version`` carries the fingerprint *as held*: computed by the worker over the arrays it decoded with, snapshotted
    before the first forward pass.
    """

    run_id: str
    step: int
    item: int
    version: WeightVersion
    stream_indices: tuple[int, ...]
    sampler: SamplerSettings
    worker: str

    @property
    def request_id(self) -> str:
        return f"{self.run_id}/{self.step}/{self.item}"


@dataclass(frozen=True)
class CleanSequence:
    """Prompt and completion as the teacher sees them: nothing after the stop token.

    Attributes:
      tokens_BL: int32 ``[B, L]``; logical position = column.
      valid_BL: bool ``[B, L]``; padding is known by this mask, never by an id.
      prompt_lengths_B: int32 ``[B]``.
    """

    tokens_BL: np.ndarray
    valid_BL: np.ndarray
    prompt_lengths_B: np.ndarray


@dataclass(frozen=True)
class Sample:
    """A decoded completion for people to read."""

    stream_index: int
    prompt: str
    completion: str
    correct: bool | None


@dataclass(frozen=True)
class Rollout:
    """The student's side of one item, complete: batch, clean sequence, statistics, digest, provenance.

    Attributes:
      student_batch: inputs, targets and weights of the student's loss (host arrays).
      clean: what the teacher scores.
      statistics: name → (sum, weight), additive over items.
      provenance: who wrote it.
      digest: `content_digest` at the time of sealing; teacher targets name it.
      samples: a few decoded rows.
    """

    student_batch: DiffusionTokenBatch
    clean: CleanSequence
    statistics: Mapping[str, tuple[float, float]]
    provenance: Provenance
    digest: str = ""
    samples: tuple[Sample, ...] = ()

    def content_digest(self) -> str:
        """SHA-256 over everything a model reads: student batch and clean sequence."""
        arrays = {
            jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(self.student_batch)
        }
        arrays |= {f"clean/{name}": array for name, array in vars(self.clean).items()}
        return content_digest(arrays)

    def seal(self) -> "Rollout":
        """A copy that carries the digest of its content."""
        return replace(self, digest=self.content_digest())


@dataclass(frozen=True)
class TeacherTargets:
    """The teacher's side of one item, aligned to the rollout's physical target slots.

    Attributes:
      rollout_digest: digest of the rollout that was scored.
      teacher_fingerprint: of the teacher's weights as held by the scorer.
      kind: ``"dense"``.
      temperature: the softmax temperature the targets are meant for.
      arrays: the payload in wire form; for ``dense``: ``{"logits": [B, W, V]}``.
    """

    rollout_digest: str
    teacher_fingerprint: str
    kind: Literal["dense"]
    temperature: float
    arrays: Mapping[str, WireArray]


@dataclass(frozen=True)
class PreparedBatch:
    """A rollout joined with its targets: what one accumulate consumes."""

    rollout: Rollout
    targets: TeacherTargets

    def distillation_batch(self) -> DiffusionDistillationBatch:
        """The batch of the public contract, values checked.

        Raises:
          BatchTypeError, BatchValueError: see `DiffusionDistillationBatch`.
        """
        return DiffusionDistillationBatch.create(
            student_batch=self.rollout.student_batch, teacher_logits=decode(self.targets.arrays["logits"])
        )


@dataclass(frozen=True)
class EvaluationRequest:
    """Prompts to decode and check with a stated version, without training on them."""

    name: str
    version: WeightVersion
    seed: int
    sampler: SamplerSettings
    stream_indices_B: np.ndarray
    prompt_ids_BP: np.ndarray
    prompt_lengths_B: np.ndarray
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class Evaluation:
    """Answer to an `EvaluationRequest`: name → (sum, weight), and the completions."""

    name: str
    version: WeightVersion
    statistics: Mapping[str, tuple[float, float]]
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class ItemReport:
    """What the trainer says of one accumulated item: small, and all that the loop ever fetches of it."""

    step: int
    item: int
    rows: int
    rows_weighted: int
    version: WeightVersion
    worker: str
    statistics: Mapping[str, tuple[float, float]]
    samples: tuple[Sample, ...]
    stream_indices: tuple[int, ...]


@dataclass(frozen=True)
class StepReport:
    """What the trainer says of a closed window.

    Attributes:
      step: the window that was closed.
      version: the weights after it, to be published for step + 1.
      metrics: reduced once, over every micro-batch and device.
      skipped: why the optimiser was not stepped, or empty.
      updates: optimiser updates so far.
    """

    step: int
    version: WeightVersion
    metrics: Mapping[str, float]
    skipped: str
    updates: int
