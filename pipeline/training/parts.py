"""A model taken apart: what is trained, what is frozen, and the counters of its random streams.

Inside a jitted step a model is three flat dictionaries of arrays, keyed by dotted paths such as
`layers.0.attention.query.kernel`. Outside it stays the caller's own `nnx.Module`, whose variables hold the only copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from contracts.errors import WeightsError

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Group:
    """Some variables of a model, by dotted path."""

    variables: Mapping[str, nnx.Variable]
    paths: Mapping[str, tuple]

    @staticmethod
    def of(state: Any) -> "Group":
        named = {".".join(str(part) for part in path): (path, variable) for path, variable in nnx.to_flat_state(state)}
        return Group(
            {name: variable for name, (_, variable) in named.items()}, {name: path for name, (path, _) in named.items()}
        )

    def read(self) -> Arrays:
        """The arrays that the variables hold now."""
        return {name: variable.get_value() for name, variable in self.variables.items()}

    def write(self, arrays: Mapping[str, jax.Array]) -> None:
        """Makes the variables hold `arrays`."""
        for name, variable in self.variables.items():
            variable.set_value(arrays[name])

    def state(self, arrays: Mapping[str, jax.Array]) -> Any:
        """`arrays` in the nested form that `nnx.merge` takes."""
        return nnx.from_flat_state({self.paths[name]: array for name, array in arrays.items()})


@dataclass(frozen=True)
class ModelParts:
    """The static definition of a model, and its variables in three groups.

    Args:
        definition: The graph, without arrays.
        trained: `nnx.LoRAParam` or `nnx.Param`: the type of the trained variables.
        trainable: The trained variables.
        counters: `nnx.RngCount`: advanced by every call of a stochastic layer.
        frozen: Everything else; a loss may read but not change it.
    """

    definition: Any
    trained: type[nnx.Variable]
    trainable: Group
    counters: Group
    frozen: Group

    @staticmethod
    def of(model: nnx.Module) -> "ModelParts":
        """Takes `model` apart; trains `nnx.LoRAParam` if it has any, else `nnx.Param`.

        Raises:
            WeightsError: There is nothing to train, or a trainable leaf is not floating.
        """
        kind = nnx.LoRAParam if nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)) else nnx.Param
        definition, *states = nnx.split(model, kind, nnx.RngCount, ...)
        parts = ModelParts(definition, kind, *(Group.of(state) for state in states))
        if not parts.trainable.variables:
            raise WeightsError(f"{type(model).__name__} has no nnx.Param and no nnx.LoRAParam: nothing to train")
        for name, array in parts.trainable.read().items():
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise WeightsError(
                    f"parameter {name} has dtype {array.dtype}; only floating parameters have gradients: keep it in an"
                    " nnx.Variable of another type"
                )
        return parts

    def merge(self, trainable: Arrays, counters: Arrays, frozen: Arrays) -> nnx.Module:
        """Builds a model around the given arrays."""
        groups = ((self.trainable, trainable), (self.counters, counters), (self.frozen, frozen))
        return nnx.merge(self.definition, *(group.state(arrays) for group, arrays in groups))

    def counters_after(self, model: nnx.Module, trainable: Arrays, frozen: Arrays) -> Arrays:
        """The counters of a merged model after its use, having made sure that nothing else was written to.

        Raises:
            WeightsError: The loss changed a parameter or another variable; the change would be lost.
        """
        _, *states = nnx.split(model, self.trained, nnx.RngCount, ...)
        now_trainable, counters, now_frozen = (Group.of(state).read() for state in states)
        for before, after in ((trainable, now_trainable), (frozen, now_frozen)):
            changed = sorted(name for name, array in before.items() if after.get(name) is not array)
            if changed:
                raise WeightsError(
                    f"the loss function changed {', '.join(changed)} of the model: only the optimiser writes"
                    " parameters, and running statistics are not supported (they would depend on the micro-batch split)"
                )
        return {name: counters[name] for name in self.counters.variables}
