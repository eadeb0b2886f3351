"""`PeftTrainer`: the step-level API of stepping.py, and the loop over a data set that is built on it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from contracts.errors import BatchValueError, ConfigError
from contracts.losses import PRIMARY_LOSS, MetricSums, merge_windows
from pipeline.training.checkpoint import CheckpointStore
from pipeline.training.hooks import TrainingHooks
from pipeline.training.position import PositionedData
from pipeline.training.reports import EvaluationReport, read_metrics
from pipeline.training.resuming import TrainingCheckpoints
from pipeline.training.stepping import StepTrainer


class PeftTrainer(StepTrainer):
    """Trains a model: window by window with `accumulate` and `update`, or over a whole data set with `train`."""

    def with_loss_fn(self, fn: Callable[..., Any], has_aux: bool = False) -> "PeftTrainer":
        """Sets the loss: `fn(model, **gen_model_input_fn(batch))` → scalar, `(scalar, aux)`, or `LossOutput`.

        Args:
            fn: The loss. Of a `LossOutput` the unreduced sum is differentiated; a scalar counts as denominator 1.
            has_aux: Whether `fn` returns `(scalar, mapping of metrics)`.
        """
        self._loss_fn, self._has_aux, self._programs = fn, has_aux, None
        return self

    def with_gen_model_input_fn(self, fn: Callable[[Any], Any]) -> "PeftTrainer":
        """Sets what turns a batch into the loss's keyword arguments; traced with the step, so it must be pure."""
        self._gen_model_input_fn, self._programs = fn, None
        return self

    def with_hooks(self, *hooks: TrainingHooks) -> "PeftTrainer":
        """Sets who listens."""
        self._hooks = hooks
        return self

    def train(self, train_ds: Iterable[Any], eval_ds: Iterable[Any] | None = None, skip_jit: bool = False) -> None:
        """Trains until the data ends or `max_steps` windows are closed; resumes from and saves to the checkpoint folder.

        A window takes `gradient_accumulation_steps` batches, fewer when the data ends inside it. After the last batch
        that is needed none is drawn.

        Args:
            train_ds: Micro-batches. To be resumable: a sequence, or an iterator with `get_state` and `set_state`.
            eval_ds: Batches to evaluate every `eval_every_n_steps`; iterated anew each time.
            skip_jit: Runs every operation eagerly, for debugging.

        Raises:
            CheckpointError: The checkpoint found is damaged, of another run, or the data cannot be positioned.
            NonFiniteError: See `TrainingConfig.non_finite`.
        """
        if eval_ds is not None and self.config.eval_every_n_steps is None:
            raise ConfigError("train got an eval_ds but eval_every_n_steps is not set: set it, or pass no eval_ds")
        self._run_eagerly(skip_jit)
        try:
            data = PositionedData(train_ds)
            with self._checkpoints(data) as checkpoints:
                self.notify("on_train_start")
                self._run(data, eval_ds, checkpoints)
            self.notify("on_train_end")
        finally:
            self._run_eagerly(False)

    def evaluate_all(self, eval_ds: Iterable[Any]) -> EvaluationReport:
        """Evaluates every batch and divides once; the report goes to the hooks.

        Raises:
            BatchValueError: `eval_ds` yields nothing, an exhausted iterator for instance.
        """
        sums: MetricSums | None = None
        batches = 0
        for batch in eval_ds:
            found = self.evaluate(batch)
            sums = found if sums is None else merge_windows(sums, found)
            batches += 1
        if sums is None:
            raise BatchValueError("eval_ds yielded no batch: pass data that can be iterated each time, such as a list")
        metrics = read_metrics(sums)
        report = EvaluationReport(
            window=self.windows,
            train_steps=self.train_steps,
            batches=batches,
            metrics={f"{self.config.metrics_prefix}{name}": value for name, value in metrics.items()},
            loss=metrics[PRIMARY_LOSS],
        )
        self.notify("on_evaluate", report)
        return report

    def _run(
        self, data: PositionedData, eval_ds: Iterable[Any] | None, checkpoints: TrainingCheckpoints | None
    ) -> None:
        config = self.config
        while (config.max_steps is None or self.windows < config.max_steps) and self._fill_window(data):
            self.close_window()
            if eval_ds is not None and self.windows % (config.eval_every_n_steps or 1) == 0:
                self.evaluate_all(eval_ds)
            if checkpoints is not None:
                checkpoints.save_if_due()
        self.settle()
        if checkpoints is not None:
            checkpoints.save_last()

    def _fill_window(self, data: PositionedData) -> int:
        while self.open_micro_batches < self.config.depth:
            drawn = data.draw()
            if not drawn:
                break
            self.accumulate(*drawn)
        return self.open_micro_batches

    @contextmanager
    def _checkpoints(self, data: PositionedData) -> Iterator[TrainingCheckpoints | None]:
        if self.config.checkpoint_root_directory is None:
            yield None
            return
        store = CheckpointStore(self.config.checkpoint_root_directory, self.config.checkpointing_options)
        try:
            checkpoints = TrainingCheckpoints(self, data, store)
            checkpoints.resume()
            yield checkpoints
        finally:
            store.close()
