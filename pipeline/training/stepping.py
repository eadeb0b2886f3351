"""Training one window of micro-batches at a time: accumulate(batch) × depth, then update().

At depth 1 a window is one program, which runs in `update`; deeper, each `accumulate` differentiates and adds, and
`update` divides once. The model's own variables hold the parameters at all times; device buffers are donated, so an
array taken out of them does not outlive the next update.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import optax
from flax import nnx

from contracts.errors import ConfigError, NonFiniteError
from contracts.losses import PRIMARY_LOSS, MetricSums
from pipeline.training.accumulator import GradientAccumulator
from pipeline.training.config import TrainingConfig
from pipeline.training.held import HeldState, copied_trees
from pipeline.training.hooks import TrainingHooks
from pipeline.training.inflight import InflightQueue
from pipeline.training.objective import Objective
from pipeline.training.programs import Programs
from pipeline.training.reports import NON_FINITE, UpdateReport, read_outcome
from pipeline.training.sharding import Placement
from pipeline.training.state import Progress, TrainerState
from pipeline.training.steps import Outcome, TrainingSteps
from pipeline.training.window import OpenWindow, zeros


class StepTrainer:
    """The step-level API, which an actor drives; trains `nnx.LoRAParam`s if the model has any, else `nnx.Param`s.

    Args:
        model: Trained in place. Its trainable arrays are copied once, so that models that share arrays stay apart.
        optimizer: Any Optax transformation; its state keeps the dtypes of its initialiser.
        training_config: See `TrainingConfig`.

    Raises:
        WeightsError: The model has nothing to train.
    """

    def __init__(
        self, model: nnx.Module, optimizer: optax.GradientTransformation, training_config: TrainingConfig
    ) -> None:
        self.model = model
        self.config = training_config
        self._held = HeldState(model, optimizer, Placement.of(training_config))
        self._optimizer = optimizer
        self._loss_fn: Callable[..., Any] | None = None
        self._gen_model_input_fn: Callable[[Any], Any] = lambda batch: batch
        self._has_aux = False
        self._eager = False
        self._programs: Programs | None = None
        self._hooks: tuple[TrainingHooks, ...] = ()
        self._queue = InflightQueue(training_config.max_inflight_computations)
        self._window = OpenWindow(training_config.depth)
        self._progress = Progress()
        self._report: UpdateReport | None = None

    @property
    def windows(self) -> int:
        """Windows closed, skipped ones included. Never waits."""
        return self._progress.windows

    @property
    def iter_steps(self) -> int:
        """Micro-batches consumed. Never waits."""
        return self._progress.iter_steps

    @property
    def train_steps(self) -> int:
        """Optimiser updates; waits for the device, which alone knows whether a window was skipped."""
        self.settle()
        return self._progress.train_steps

    @property
    def open_micro_batches(self) -> int:
        """Micro-batches since the last update."""
        return self._window.micro_batches

    def accumulate(self, batch: Any) -> None:
        """Adds one micro-batch to the open window; returns before the device has finished.

        Args:
            batch: Pytree of arrays, rows first; never donated.

        Raises:
            BatchTypeError: A leaf is not an array.
            BatchValueError: The window is full, or the rows do not divide over the mesh.
            TypeError, ValueError: A metric changes its kind or bounds inside the window. The window is as it was.
        """
        self._window.require_room()
        placed = self._held.placement.batch(batch)
        if self._window.depth == 1:
            self._window.staged = (placed,)
        else:
            programs = self._built_programs()
            arguments = (*self._held.model_arrays(), placed)
            accumulator = self._fitting_accumulator(arguments)
            self._queue.make_room()
            self._window.accumulator, counters, done = programs.accumulate(accumulator, *arguments)
            self._held.parts.counters.write(counters)
            self._queue.push(done)
        self._window.micro_batches += 1
        self._progress = replace(self._progress, iter_steps=self.iter_steps + 1)

    def update(self) -> UpdateReport:
        """Closes the open window, full or not, with its true denominator, and waits for the result.

        Raises:
            BatchValueError: The window is empty.
            NonFiniteError: See `TrainingConfig.non_finite`.
        """
        self.close_window()
        self.settle()
        assert self._report is not None
        return self._report

    def close_window(self) -> None:
        """`update` without waiting: the report goes to the hooks when the step has run."""
        self._window.require_content()
        programs, held = self._built_programs(), self._held
        self._queue.make_room()
        trainable, counters, frozen = held.model_arrays()
        if self._window.depth == 1:
            trainable, held.optimizer_state, counters, outcome = programs.fused(
                trainable, held.optimizer_state, counters, frozen, *self._window.staged
            )
            held.parts.counters.write(counters)
        else:
            trainable, held.optimizer_state, self._window.accumulator, outcome = programs.update(
                trainable, held.optimizer_state, self._window.accumulator
            )
        held.parts.trainable.write(trainable)
        then = partial(self._settle, outcome, self.windows, self.iter_steps, self._window.micro_batches)
        self._window.micro_batches, self._window.staged = 0, ()
        self._progress = replace(self._progress, windows=self.windows + 1)
        self._queue.push(outcome.finite, then)

    def evaluate(self, batch: Any) -> MetricSums:
        """Scores one batch with the model in evaluation mode; the parameters are those after the last closed window.

        Returns:
            Undivided sums, to be added with `contracts.losses.merge_windows` and divided once with `close_window`.
        """
        placed = self._held.placement.batch(batch)
        self._queue.make_room()
        sums = self._built_programs().evaluate(*self._held.model_arrays(), placed)
        self._queue.push(jax.tree.leaves(sums[PRIMARY_LOSS])[0])
        return sums

    def settle(self) -> None:
        """Waits for everything dispatched; reports go to the hooks, a non-finite window raises."""
        self._queue.drain()

    def live_state(self) -> TrainerState:
        """The state itself, to be saved at once: the next update consumes its buffers.

        Raises:
            BatchValueError: A window is open.
        """
        self._window.require_closed("the state is read")
        self.settle()
        return TrainerState(self._held.trees(), self._progress)

    def state(self) -> TrainerState:
        """A copy of the state, on device, that later updates leave alone; raises as `live_state` does."""
        state = self.live_state()
        return replace(state, trees=copied_trees(state.trees))

    def restore(self, state: TrainerState) -> None:
        """Goes to a state, which is copied; what the open window holds and what is still queued is dropped.

        Raises:
            WeightsError: Its leaves are not this trainer's; all differences are listed.
        """
        self._queue.discard()
        self._held.load(state.trees)
        self._progress = state.progress
        self._window = OpenWindow(self.config.depth)

    def accumulator_digest(self) -> str:
        """A fingerprint of the open window: its gradients, sums, count, and the staged batch at depth 1."""
        return self._window.digest()

    def trace(self, batch: Any) -> jax.stages.Traced:
        """The program that one micro-batch runs, fused or accumulating: for its jaxpr and its memory plan."""
        programs = self._built_programs()
        trainable, *others = self._held.model_arrays()
        placed = self._held.placement.batch(batch)
        if self._window.depth == 1:
            return programs.fused.trace(trainable, self._held.optimizer_state, *others, placed)
        arguments = (trainable, *others, placed)
        return programs.accumulate.trace(self._fitting_accumulator(arguments), *arguments)

    def compilations(self) -> dict[str, int]:
        """Program → how many shapes it was compiled for."""
        return self._built_programs().compilations()

    def notify(self, event: str, *details: Any) -> None:
        """Calls one method of every hook."""
        for hook in self._hooks:
            getattr(hook, event)(self, *details)

    def _settle(self, outcome: Outcome, window: int, iter_steps: int, micro_batches: int) -> None:
        self._report = report = read_outcome(
            outcome,
            window=window,
            train_steps=self._progress.train_steps,
            iter_steps=iter_steps,
            micro_batches=micro_batches,
            skips=self._progress.skips,
            prefix=self.config.metrics_prefix,
        )
        self._progress = replace(self._progress, train_steps=report.train_steps, skips=report.skips)
        self.notify("on_update", report)
        if report.skipped == NON_FINITE and self.config.non_finite == "raise":
            raise NonFiniteError(report.explain_non_finite())

    def _fitting_accumulator(self, arguments: tuple[Any, ...]) -> GradientAccumulator:
        programs, trainable = self._built_programs(), arguments[0]
        return self._window.accumulator_for(
            programs.metric_shapes(*arguments),
            lambda shapes: programs.empty_accumulator(trainable, zeros(shapes)),
            self._held.placement.everywhere,
        )

    def _built_programs(self) -> Programs:
        if self._programs is None:
            if self._loss_fn is None:
                raise ConfigError("the trainer has no loss: call with_loss_fn(fn) first")
            objective = Objective(self._held.parts, self._loss_fn, self._gen_model_input_fn, self._has_aux)
            self._programs = Programs(TrainingSteps(objective, self._optimizer), self._held, self._eager)
        return self._programs

    def _run_eagerly(self, eager: bool) -> None:
        if eager != self._eager:
            self._eager, self._programs = eager, None
