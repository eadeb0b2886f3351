"""Cross entropy at target positions, with inactive positions inert in value and gradient."""

from typing import Any

import jax
import jax.numpy as jnp


def loss_weights(weights_BL: Any) -> jax.Array:
    """Returns loss weights of any real or bool dtype as float32."""
    return jnp.asarray(weights_BL).astype(jnp.float32)


def active_logits(logits_BLV: Any, weights_BL: jax.Array) -> jax.Array:
    """Returns float32 logits with inactive rows replaced by zeros.

    Replacing happens before any softmax, so NaN or infinity in an inactive row reaches neither the value nor, through
    0 × NaN, the gradient.

    Args:
        logits_BLV: `[B, L, V]` floating.
        weights_BL: `[B, L]` float32; a position is active where its weight is not 0.
    """
    return jnp.where((weights_BL != 0)[..., None], jnp.asarray(logits_BLV).astype(jnp.float32), 0.0)


def token_cross_entropy(logits_BLV: Any, targets_BL: Any, weights_BL: jax.Array) -> jax.Array:
    """Returns −log softmax(logits)[target] for each position.

    Args:
        logits_BLV: `[B, L, V]` floating; −inf marks an entry without mass.
        targets_BL: `[B, L]` integer, in [0, V) where active, anything where not.
        weights_BL: `[B, L]` float32; decides only which positions are active.

    Returns:
        float32 `[B, L]`. Finite at inactive positions; +inf where an active target has no mass; NaN where an active
        target is no id of the vocabulary: a trace can raise nothing, and a clamped id would be a wrong answer.
    """
    logits = active_logits(logits_BLV, weights_BL)
    targets = jnp.where(weights_BL != 0, jnp.asarray(targets_BL).astype(jnp.int32), 0)
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    # A negative index would count from the end: send it out of bounds, where the gather fills in NaN.
    index = jnp.where(targets < 0, logits.shape[-1], targets)[..., None]
    chosen = jnp.take_along_axis(shifted, index, axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]
    return jnp.log(jnp.sum(jnp.exp(shifted), axis=-1)) - chosen
