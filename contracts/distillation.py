"""The student's batch joined with the teacher's logits for the very same predictions."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax

from contracts.errors import BatchTypeError, BatchValueError
from contracts.tokens import DiffusionTokenBatch, Raw, array_signature, validate_diffusion_logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class DiffusionDistillationBatch:
    """What one distillation loss reads. A pytree; the plain constructor does not validate.

    Tensors cannot prove that they are fresh: who wrote the rollout travels beside this batch, as its provenance.

    Args:
        student_batch: What the student is scored on.
        teacher_logits: `[B, L, V]` floating, aligned to the student's targets. Values are checked where they are used
            (`contracts.teacher_targets.check_teacher_logits`), since a loss without a soft part never reads them.
        hard_target_ids: `[B, L]` integer or None; expert labels on the student's own inputs and weights.
        hard_target_batch: A clean-state anchor, scored separately, or None; excludes `hard_target_ids`.
    """

    student_batch: Any
    teacher_logits: Any
    hard_target_ids: Any = None
    hard_target_batch: Any = None

    @classmethod
    def create(
        cls,
        *,
        student_batch: Any,
        teacher_logits: Any,
        hard_target_ids: Any = None,
        hard_target_batch: Any = None,
    ) -> "DiffusionDistillationBatch":
        """Builds a batch and validates it; arguments and errors as for the class and `validate`."""
        return cls(student_batch, teacher_logits, hard_target_ids, hard_target_batch).validate()

    def validate(self) -> "DiffusionDistillationBatch":
        """Checks that all parts describe the same predictions: shapes and dtypes always, values where concrete.

        Returns:
            The batch itself.

        Raises:
            BatchTypeError: A batch is of another class, or a dtype is wrong.
            BatchValueError: Teacher, labels or anchor are misaligned, both kinds of hard target are given, or a part's
                own check fails.
        """
        _require_token_batch("student_batch", self.student_batch)
        self.student_batch.validate()
        validate_diffusion_logits(self.student_batch, self.teacher_logits, name="teacher_logits")
        if self.hard_target_ids is not None and self.hard_target_batch is not None:
            raise BatchValueError(
                "hard_target_ids and hard_target_batch are mutually exclusive, got both:"
                " label the student's own inputs, or score an anchor"
            )
        shape = tuple(self.student_batch.target_ids.shape)
        if self.hard_target_ids is not None:
            hard_shape, _ = array_signature("hard_target_ids", self.hard_target_ids)
            if hard_shape != shape:
                raise BatchValueError(f"hard_target_ids must match target_ids shape, got {hard_shape} and {shape}")
        if self.hard_target_batch is not None:
            _require_token_batch("hard_target_batch", self.hard_target_batch)
        hard = self.hard_batch()
        if hard is not self.student_batch:
            hard.validate()
        if tuple(hard.target_ids.shape) != shape:
            raise BatchValueError(
                f"hard_target_batch must match target_ids shape, got {tuple(hard.target_ids.shape)} and {shape}"
            )
        return self

    def hard_batch(self) -> DiffusionTokenBatch:
        """Returns what the hard loss reads: the anchor, else the student's batch with expert or its own labels."""
        if self.hard_target_batch is not None:
            return self.hard_target_batch
        if self.hard_target_ids is not None:
            return DiffusionTokenBatch(
                self.student_batch.model_inputs, self.hard_target_ids, self.student_batch.loss_weights
            )
        return self.student_batch


@runtime_checkable
class PreparedDiffusionDistillationBatchAdapter(Protocol[Raw]):
    """Turns a rollout that a teacher has scored into the distillation batch."""

    def __call__(self, batch: Raw, /) -> DiffusionDistillationBatch: ...


def _require_token_batch(name: str, batch: Any) -> None:
    if not isinstance(batch, DiffusionTokenBatch):
        raise BatchTypeError(f"{name} must be a DiffusionTokenBatch, got {type(batch).__name__}")
