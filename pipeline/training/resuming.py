"""A training run's checkpoints: the trainer's state, what the run is, and its place in the data."""

from typing import Any

from pipeline.training.checkpoint import CheckpointStore
from pipeline.training.position import PositionedData
from pipeline.training.state import Progress, TrainerState
from pipeline.training.stepping import StepTrainer


class TrainingCheckpoints:
    """Saves and restores a trainer together with its place in the data.

    Args:
        trainer: Whose state.
        data: Whose position.
        store: Where.
    """

    def __init__(self, trainer: StepTrainer, data: PositionedData, store: CheckpointStore) -> None:
        self._trainer = trainer
        self._data = data
        self._store = store
        self._saved: int | None = None

    def resume(self) -> None:
        """Goes to the latest checkpoint, if there is one and this trainer has done nothing yet.

        Raises:
            CheckpointError: It is damaged, or its contract or leaves are not this trainer's.
        """
        if self._trainer.windows or self._store.latest() is None:
            return
        found = self._store.restore(self._trainer.live_state().trees, expected_metadata={"contract": self._contract()})
        self._trainer.restore(TrainerState(found.trees, Progress.from_json(found.metadata["progress"])))
        self._data.seek(found.metadata["data"])
        self._saved = found.step

    def save_if_due(self) -> None:
        """Writes a checkpoint if the save interval falls on the windows closed so far."""
        if self._store.due(self._trainer.windows):
            self._save()

    def save_last(self) -> None:
        """Writes the last window's checkpoint unless it is there."""
        if self._trainer.windows and self._saved != self._trainer.windows:
            self._save()

    def _save(self) -> None:
        state = self._trainer.live_state()
        step = state.progress.windows
        metadata = {
            "contract": self._contract(),
            "progress": state.progress.as_json(),
            "data": self._data.position(),
        }
        self._store.save(step, state.trees, metadata)
        self._saved = step
        self._trainer.notify("on_checkpoint", step)

    def _contract(self) -> dict[str, Any]:
        config = self._trainer.config
        return {**config.checkpoint_contract, "gradient_accumulation_steps": config.depth}
