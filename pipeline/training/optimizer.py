"""Optax, held to the dtypes that its initialiser chose, and stepped or not without a branch.

Optax mixes dtypes freely, so each call is made under standard promotion; what comes back is cast to what it was before.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from pipeline.training.parts import Arrays


def init_optimizer(optimizer: optax.GradientTransformation, trainable: Arrays) -> Any:
    """The initial optimiser state as arrays of the dtypes that Optax chose, strongly typed, as a checkpoint gives them."""
    with jax.numpy_dtype_promotion("standard"):
        state = optimizer.init(trainable)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype=jnp.asarray(leaf).dtype), state)


def apply_optimizer(
    optimizer: optax.GradientTransformation, gradients: Arrays, state: Any, trainable: Arrays, stepped: jax.Array
) -> tuple[Arrays, Any]:
    """Steps the optimiser, or leaves everything as it is; chosen by selects, so there is no branch in the program.

    A leaf of the new state is chosen the moment it is computed, so that the parameters are updated from the leaf that
    stays. Choosing at the end would leave two readers of the old moments, and XLA would copy all of them first: twice
    the parameters' memory with Adam.

    Args:
        optimizer: Any Optax transformation.
        gradients: Mean gradients in the parameters' dtypes.
        state: Optimiser state.
        trainable: Parameters.
        stepped: Boolean scalar; False returns `trainable` and `state` unchanged, bit for bit.

    Returns:
        Parameters and optimiser state, every leaf in the dtype it came with.
    """

    def step(gradients: Arrays, state: Any, trainable: Arrays) -> tuple[Any, Arrays]:
        with jax.numpy_dtype_promotion("standard"):
            updates, new_state = optimizer.update(gradients, state, trainable)
            return new_state, optax.apply_updates(trainable, updates)  # type: ignore[return-value]

    program, shapes = jax.make_jaxpr(step, return_shape=True)(gradients, state, trainable)
    inputs = jax.tree.leaves((gradients, state, trainable))
    chosen = _run_choosing(program, inputs, jax.tree.leaves((state, trainable)), stepped)
    new_state, new_trainable = jax.tree.unflatten(jax.tree.structure(shapes), chosen)
    return new_trainable, new_state


def _run_choosing(
    program: core.ClosedJaxpr, inputs: list[jax.Array], old: list[jax.Array], stepped: jax.Array
) -> list[jax.Array]:
    """Evaluates `program`, each output replaced by its `old` value unless `stepped`, where it is computed if it can be."""
    outputs = program.jaxpr.outvars
    uses = Counter(output for output in outputs if not isinstance(output, core.Literal))
    # An output in another dtype than its old value, or one that stands for two, can only be chosen at the end.
    early = {
        output: kept
        for output, kept in zip(outputs, old, strict=True)
        if not isinstance(output, core.Literal) and uses[output] == 1 and output.aval.dtype == kept.dtype
    }
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    values.update(zip(program.jaxpr.constvars, program.consts, strict=True))
    values.update(zip(program.jaxpr.invars, inputs, strict=True))
    computed = set()
    for equation in program.jaxpr.eqns:
        with equation.ctx.manager:
            results = equation.primitive.bind(
                *map(read, equation.invars), **equation.primitive.get_bind_params(equation.params)
            )
        results = results if equation.primitive.multiple_results else [results]
        for variable, result in zip(equation.outvars, results, strict=True):
            if variable in early:
                computed.add(variable)
                result = jax.lax.select(stepped, result, early[variable])
            values[variable] = result

    def at_the_end(output: Any, kept: jax.Array) -> jax.Array:
        value = jnp.asarray(read(output))
        if not isinstance(output, core.Literal) and output in computed:
            return value
        if jnp.issubdtype(kept.dtype, jnp.floating):
            value = value.astype(kept.dtype)
        return jax.lax.select(stepped, value, kept)

    return [at_the_end(output, kept) for output, kept in zip(outputs, old, strict=True)]
