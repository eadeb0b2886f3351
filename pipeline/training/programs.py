"""The step functions compiled for one trainer's shardings, with the buffers they may consume."""

from typing import Any

import jax

from contracts.losses import MetricSums
from pipeline.training.accumulator import GradientAccumulator
from pipeline.training.held import HeldState
from pipeline.training.steps import TrainingSteps


class Programs:
    """The four steps as callables of the same signatures as `TrainingSteps`; nothing of a batch is ever donated.

    `fused` consumes parameters and optimiser state, `accumulate` the accumulator, `update` all three, `evaluate`
    nothing. Outputs keep the shardings of the inputs, so that each shape compiles once.

    Args:
        steps: What to compile.
        held: Whose shapes and shardings to compile for.
        eager: Leave the steps as they are: every operation runs at once and nothing is consumed.
    """

    def __init__(self, steps: TrainingSteps, held: HeldState, eager: bool) -> None:
        placement, trainable = held.placement, held.parts.trainable.read()
        everywhere = placement.replicated
        parameters = {name: placement.parameter_sharding(array.shape) for name, array in trainable.items()}
        optimizer = placement.state_shardings(held.optimizer_state, trainable)
        accumulator = GradientAccumulator(parameters, everywhere, everywhere, everywhere)
        self._steps = steps
        self._shapes: dict[Any, MetricSums] = {}
        self.fused: Any = steps.fused
        self.accumulate: Any = steps.accumulate
        self.update: Any = steps.update
        self.evaluate: Any = steps.evaluate
        self.empty_accumulator: Any = GradientAccumulator.empty
        if eager:
            return
        self.fused = jax.jit(
            steps.fused, donate_argnums=(0, 1), out_shardings=(parameters, optimizer, everywhere, everywhere)
        )
        self.accumulate = jax.jit(
            steps.accumulate, donate_argnums=0, out_shardings=(accumulator, everywhere, everywhere)
        )
        self.update = jax.jit(
            steps.update, donate_argnums=(0, 1, 2), out_shardings=(parameters, optimizer, accumulator, everywhere)
        )
        self.evaluate = jax.jit(steps.evaluate, out_shardings=everywhere)
        self.empty_accumulator = jax.jit(GradientAccumulator.empty, out_shardings=accumulator)

    def metric_shapes(self, *arguments: Any) -> MetricSums:
        """Shapes of the sums that a micro-batch will give: traced once per shape of batch, never run.

        Args:
            arguments: Those of `accumulate` after the accumulator; the batch is the last.
        """
        leaves, structure = jax.tree.flatten(arguments[-1])
        signature = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if signature not in self._shapes:
            self._shapes[signature] = jax.eval_shape(self._steps.objective.training_sums, *arguments)
        return self._shapes[signature]

    def compilations(self) -> dict[str, int]:
        """Program → how many shapes it was compiled for so far; empty when eager."""
        programs = {
            "fused": self.fused,
            "accumulate": self.accumulate,
            "update": self.update,
            "evaluate": self.evaluate,
        }
        return {name: program._cache_size() for name, program in programs.items() if hasattr(program, "_cache_size")}
