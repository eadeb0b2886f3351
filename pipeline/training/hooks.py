"""What others may listen to while a trainer runs."""

from typing import Any, Protocol, runtime_checkable

from pipeline.training.reports import EvaluationReport, UpdateReport


@runtime_checkable
class TrainingHooks(Protocol):
    """Called in the order of the windows, with host values. Inherit from it and override what you need."""

    def on_train_start(self, trainer: Any) -> None:
        """`train` begins, after a checkpoint was restored, if there was one."""

    def on_update(self, trainer: Any, report: UpdateReport) -> None:
        """A window has been closed, skipped ones included; later ones may already be running."""

    def on_evaluate(self, trainer: Any, report: EvaluationReport) -> None:
        """The evaluation data has been passed once."""

    def on_checkpoint(self, trainer: Any, step: int) -> None:
        """A checkpoint of `step` closed windows is on disk."""

    def on_train_end(self, trainer: Any) -> None:
        """`train` is over and everything it did is settled."""
