"""What a teacher says about the targets of a rollout: one union, one meaning."""

from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import jax
import numpy as np

from contracts.tokens import DiffusionTokenBatch, concrete, refuse_where, validate_diffusion_logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class DenseLogits:
    """The teacher's whole distribution, as logits over the loss vocabulary (every id but the mask id).

    Args:
        logits: `[B, L, V]` floating, aligned to the student's targets; −inf marks an entry without mass.
    """

    logits: Any

    def validate(self, student_batch: DiffusionTokenBatch) -> Self:
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
    """Checks the values of active teacher logits: finite or −inf, and not a whole row of −inf.

    Abstract, traced or remote arrays have no values to check and pass. Inactive positions may hold anything.

    Args:
        student_batch: Whose weights say which positions are active, `[B, L]`.
        logits: `[B, L, V]` floating.

    Raises:
        BatchValueError: NaN, +inf or a row without any mass, naming the position.
    """
    weights, values = concrete(student_batch.loss_weights), concrete(logits)
    if weights is None or values is None:
        return
    active = weights > 0
    # One reduction over V tells all three faults apart: the maximum is NaN, +inf, or −inf.
    highest = values.max(axis=-1)
    refuse_where(
        active & (np.isnan(highest) | np.isposinf(highest)),
        highest,
        "active teacher_logits must be finite, or -inf where the teacher has no mass",
    )
    refuse_where(
        active & np.isneginf(highest),
        highest,
        "active teacher_logits must leave some entry finite, but a whole row is -inf",
    )
