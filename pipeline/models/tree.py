"""A model's weights as a flat dictionary: the one form in which they are fingerprinted, published and saved."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from contracts.errors import WeightsError

Model = TypeVar("Model", bound=nnx.Module)


def parameters(model: nnx.Module) -> dict[str, Any]:
    """All weights of a model by dotted path, for example `layers.0.attention.query.kernel`, sorted by name.

    Args:
        model: Any nnx module; every `nnx.Param` (subclasses too) is a weight.

    Returns:
        Name → array, the model's own arrays (no copies); shapes and dtypes for an abstract model.
    """
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return dict(sorted((_name(path), variable.get_value()) for path, variable in flat))


def with_parameters(model: Model, weights: Mapping[str, jax.typing.ArrayLike]) -> Model:
    """A new model of the same structure that holds the given weights; the given model is not touched.

    Args:
        model: The template; may be abstract (`nnx.eval_shape`).
        weights: Name → array, exactly the names, shapes and dtypes of `parameters(model)`. JAX arrays are taken as they
            are, host arrays are copied.

    Raises:
        WeightsError: Names are missing or surplus, or a shape or dtype differs; every problem is listed.
    """
    graph, state, rest = nnx.split(model, nnx.Param, ...)
    flat = {_name(path): (path, variable) for path, variable in nnx.to_flat_state(state)}
    problems = [f"{name}: missing" for name in flat if name not in weights]
    problems += [f"{name}: not a weight of this model" for name in weights if name not in flat]
    for name in sorted(flat.keys() & weights.keys()):
        wanted, given = flat[name][1].get_value(), weights[name]
        if (wanted.shape, wanted.dtype) != (jnp.shape(given), jnp.result_type(given)):
            problems.append(
                f"{name}: model has {wanted.dtype}{list(wanted.shape)},"
                f" given {jnp.result_type(given)}{list(jnp.shape(given))}"
            )
    if problems:
        raise WeightsError("weights do not fit the model: " + "; ".join(sorted(problems)))
    filled = nnx.from_flat_state(
        [(path, variable.replace(_own(weights[name]))) for name, (path, variable) in flat.items()]
    )
    return nnx.merge(graph, filled, rest)


def _own(array: jax.typing.ArrayLike) -> jax.Array:
    # Host memory is copied: it may be a read-only view into a store of messages, which an alias would keep alive.
    return array if isinstance(array, jax.Array) else jnp.array(array, copy=True)


def _name(path: tuple) -> str:
    return ".".join(str(part) for part in path)
