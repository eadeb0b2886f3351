"""Which rollouts a step may be trained on: pure functions, no state, no clock.

The schedule. A step ``s`` is written by the weights of step ``max(0, s − max_lag)``, exactly; with ``frozen`` always by
those of step 0. So lag is a schedule, not an accident of timing, and a run with lag is as reproducible as one without.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from contracts.errors import (
    CorruptBatchError,
    DuplicateBatchError,
    FingerprintMismatchError,
    ForeignBatchError,
    FutureBatchError,
    OutOfOrderBatchError,
    StaleBatchError,
    TargetsMismatchError,
)
from contracts.weights import WeightVersion
from contracts.work import Provenance, Rollout, TeacherTargets


@dataclass(frozen=True)
class TeacherIdentity:
    """What every target of a run must come from: one frozen teacher, one kind, one temperature."""

    fingerprint: str
    kind: str
    temperature: float


@dataclass(frozen=True)
class FreshnessPolicy:
    """Says which weights write which step, and refuses everything else.

    Attributes:
      run_id: the run whose batches are admissible.
      max_lag: ≥ 0; how many updates behind the trainer the writing weights are, once there have been that many.
      frozen: every step is written by version 0 (for studies; the trained student is then off-policy).
    """

    run_id: str
    max_lag: int = 0
    frozen: bool = False

    def writer_step(self, step: int) -> int:
        """The step of the version that must write the rollouts of ``step``."""
        return 0 if self.frozen else max(0, step - self.max_lag)

    def steps_kept(self, step: int) -> frozenset[int]:
        """Versions that may be asked for while ``step`` is open or later, to write or to be evaluated: those to keep."""
        return frozenset({0, step}) if self.frozen else frozenset(range(self.writer_step(step), step + 1))

    def check_rollout(
        self, provenance: Provenance, *, step: int, next_item: int, published: Mapping[int, WeightVersion]
    ) -> None:
        """Refuse a rollout that step ``step`` may not be trained on.

        Args:
          provenance: the rollout's own account of who wrote it, with the fingerprint as held by the writer.
          step: the trainer's open step.
          next_item: index of the micro-batch that is to be accumulated next.
          published: step → version that the trainer published for it.

        Raises:
          ForeignBatchError, FutureBatchError, StaleBatchError, FingerprintMismatchError, DuplicateBatchError,
          OutOfOrderBatchError: see contracts/errors.py; each message shows both sides.
        """
        version = provenance.version
        name = f"rollout {provenance.request_id}"
        if version.run_id != self.run_id or provenance.run_id != self.run_id:
            raise ForeignBatchError(
                f"{name} was written by run {version.run_id!r} for run {provenance.run_id!r}; this trainer belongs to "
                f"run {self.run_id!r}. Send it to its own run."
            )
        due = self.writer_step(step)
        if version.step > step or version.step > due:
            raise FutureBatchError(
                f"{name} was written by weights of step {version.step}; step {step} must be written by step {due} "
                f"(max_lag {self.max_lag}, frozen {self.frozen}). After a restore, generate again."
            )
        if version.step < due:
            raise StaleBatchError(
                f"{name} was written by weights of step {version.step} (lag {step - version.step}); step {step} must be "
                f"written by step {due} (max_lag {self.max_lag}). Generate it again with the published weights."
            )
        held = published.get(version.step)
        if held is None:
            raise StaleBatchError(
                f"{name} was written by weights of step {version.step}, which are no longer kept (kept: "
                f"{sorted(published)}). Generate it again."
            )
        if (version.base_fingerprint, version.fingerprint) != (held.base_fingerprint, held.fingerprint):
            raise FingerprintMismatchError(
                f"{name} claims step {version.step}, but its weights were {version}; published were {held}. "
                "The worker did not hold what it says: reload it."
            )
        if provenance.step < step or (provenance.step == step and provenance.item < next_item):
            raise DuplicateBatchError(
                f"{name} is for step {provenance.step}, item {provenance.item}; the trainer has applied everything "
                f"before step {step}, item {next_item}. Drop it."
            )
        if provenance.step > step:
            raise FutureBatchError(f"{name} is for step {provenance.step}; the open step is {step}. Send it later.")
        if provenance.item > next_item:
            raise OutOfOrderBatchError(
                f"{name} is item {provenance.item} of step {step}; item {next_item} is next. Items are added in index "
                "order so that the sum is reproducible to the last bit: send them in order."
            )


def check_targets(rollout: Rollout, targets: TeacherTargets, teacher: TeacherIdentity) -> None:
    """Refuse teacher targets that were not made for this rollout by this run's teacher.

    Raises:
      CorruptBatchError: the rollout's content does not have the digest it was sealed with.
      TargetsMismatchError: other rollout, teacher, kind or temperature.
    """
    name = f"rollout {rollout.provenance.request_id}"
    actual = rollout.content_digest()
    if actual != rollout.digest:
        raise CorruptBatchError(f"{name} was sealed with digest {rollout.digest}, its content now has {actual}")
    if targets.rollout_digest != rollout.digest:
        raise TargetsMismatchError(
            f"{name} has digest {rollout.digest}; the targets were made for {targets.rollout_digest}. Join each "
            "rollout with its own targets."
        )
    mine = TeacherIdentity(targets.teacher_fingerprint, targets.kind, targets.temperature)
    if mine != teacher:
        raise TargetsMismatchError(f"the targets of {name} come from {mine}; this run's teacher is {teacher}")
