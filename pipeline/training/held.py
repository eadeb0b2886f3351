"""What a trainer holds on the devices: the model's variables in their places, and the optimiser state."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from contracts.errors import WeightsError
from pipeline.training.leaves import named_leaves, spec, spec_differences
from pipeline.training.optimizer import init_optimizer
from pipeline.training.parts import Arrays, ModelParts
from pipeline.training.sharding import Placement


class HeldState:
    """The arrays between two steps; the model's own variables hold the only copy of theirs.

    Args:
        model: Its arrays are put in their places; what will be donated is copied first, another model may share it.
        optimizer: Any Optax transformation.
        placement: The mesh and its rules.

    Raises:
        WeightsError: The model has nothing to train.
    """

    def __init__(self, model: nnx.Module, optimizer: optax.GradientTransformation, placement: Placement) -> None:
        self.parts = ModelParts.of(model)
        self.placement = placement
        self.parts.trainable.write(
            {name: placement.copied(array) for name, array in self.parts.trainable.read().items()}
        )
        for group in (self.parts.counters, self.parts.frozen):
            group.write({name: placement.parameter(array) for name, array in group.read().items()})
        trainable = self.parts.trainable.read()
        shapes = jax.eval_shape(lambda arrays: init_optimizer(optimizer, arrays), trainable)
        self.optimizer_state: Any = jax.jit(
            lambda arrays: init_optimizer(optimizer, arrays), out_shardings=placement.state_shardings(shapes, trainable)
        )(trainable)

    def model_arrays(self) -> tuple[Arrays, Arrays, Arrays]:
        """Parameters, random counters, and everything frozen."""
        return self.parts.trainable.read(), self.parts.counters.read(), self.parts.frozen.read()

    def trees(self) -> dict[str, Any]:
        """What a checkpoint holds: `parameters`, `optimizer` and `counters`, live."""
        return {
            "parameters": self.parts.trainable.read(),
            "optimizer": self.optimizer_state,
            "counters": self.parts.counters.read(),
        }

    def load(self, trees: Mapping[str, Any]) -> None:
        """Takes over copies of such trees.

        Raises:
            WeightsError: Leaves are missing, surplus, or of another shape or dtype; every one is listed.
        """
        mine = self.trees()
        described = ({name: spec(leaf) for name, leaf in named_leaves(side).items()} for side in (dict(trees), mine))
        differing = spec_differences(*described, sides=("given", "trainer"))
        if differing:
            raise WeightsError("the state does not fit this trainer:\n  " + "\n  ".join(differing))
        copies = jax.tree.map(self.placement.copied_like, dict(trees), mine)
        self.parts.trainable.write(copies["parameters"])
        self.parts.counters.write(copies["counters"])
        self.optimizer_state = copies["optimizer"]


def copied_trees(trees: Mapping[str, Any]) -> dict[str, Any]:
    """Copies every leaf on its device."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), dict(trees))
