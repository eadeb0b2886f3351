"""What a teacher says about the targets of a rollout: one union, one meaning."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from contracts.tokens import DiffusionTokenBatch, check_active_logits, validate_diffusion_logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class DenseLogits:
    """The teacher's whole distribution, as logits over the loss vocabulary (every id but the mask id).

    Args:
        logits: `[B, L, V]` floating, aligned to the student's targets; −inf marks an entry without mass.
    """

    logits: Any

    def validate(self, student_batch: DiffusionTokenBatch) -> "DenseLogits":
        """Checks the logits against the rollout that they score; returns the targets themselves.

        Raises:
            BatchTypeError, BatchValueError: As `validate_diffusion_logits` and `check_teacher_logits`.
        """
        validate_diffusion_logits(student_batch, self.logits, name="teacher_logits")
        check_teacher_logits(student_batch, self.logits)
        return self


TeacherTargetKind: TypeAlias = DenseLogits
"""Every kind of teacher target; each validates itself against the student's batch. Further kinds join by `|`."""


def check_teacher_logits(student_batch: DiffusionTokenBatch, logits: Any) -> None:
    """Checks the values of active teacher logits; arguments and errors as `check_active_logits`."""
    check_active_logits(student_batch, logits, name="teacher_logits")
