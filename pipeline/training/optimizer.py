"""Optax, held to the dtypes that its initialiser chose.

Optax mixes dtypes freely, so each call is made under standard promotion; what comes back is cast to what it was before.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from pipeline.training.parts import Arrays


def init_optimizer(optimizer: optax.GradientTransformation, trainable: Arrays) -> Any:
    """The initial optimiser state: strongly typed, and sharing no buffer with the parameters (both are donated)."""
    with jax.numpy_dtype_promotion("standard"):
        state = optimizer.init(trainable)

    def settled(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.array(leaf, copy=True)
        return jnp.array(leaf, dtype=leaf.dtype, copy=True)

    return jax.tree.map(settled, state)


def apply_optimizer(
    optimizer: optax.GradientTransformation, gradients: Arrays, state: Any, trainable: Arrays, stepped: jax.Array
) -> tuple[Arrays, Any]:
    """Steps the optimiser, or leaves everything as it is; chosen by a select, so there is no branch in the program.

    Args:
        optimizer: Any Optax transformation.
        gradients: Mean gradients in the parameters' dtypes.
        state: Optimiser state.
        trainable: Parameters.
        stepped: Boolean scalar; False returns `trainable` and `state` unchanged, bit for bit.

    Returns:
        Parameters and optimiser state, every leaf in the dtype it came with.
    """
    with jax.numpy_dtype_promotion("standard"):
        updates, new_state = optimizer.update(gradients, state, trainable)
        new_trainable = optax.apply_updates(trainable, updates)

    def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
        new = jnp.asarray(new)
        if jnp.issubdtype(old.dtype, jnp.floating):
            new = new.astype(old.dtype)
        return jax.lax.select(stepped, new, old)

    return jax.tree.map(chosen, new_trainable, trainable), jax.tree.map(chosen, new_state, state)
