"""Does the trainer see what the rollout saw? Its own log-probabilities against those recorded at commit time.

With the weights that wrote the rollout the gap is rounding. Anything else is an alarm: other weights, or another
canvas.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from contracts.losses import WeightedMetric
from contracts.tokens import DiffusionTokenBatch


def committed_log_probs(
    logits_BWV: Float[Array, "B W V"], batch: DiffusionTokenBatch, temperature: float
) -> Float[Array, "B W"]:
    """`log softmax(logits / T)[token]` of the tokens that the rollout committed at the drawn step; NaN elsewhere.

    Args:
        logits_BWV: Over the loss vocabulary, aligned to the batch's targets.
        batch: Of `trajectory_states`; its `committed_now` says which slots.
        temperature: Of the rollout; 0 (greedy) is read as 1, as the sampler reads it for a confidence.
    """
    now_BW = batch.model_inputs["committed_now"]
    scaled = logits_BWV.astype(jnp.float32) / jnp.float32(temperature or 1.0)
    token_BW = jnp.where(now_BW, batch.target_ids, 0)
    chosen_BW = jnp.take_along_axis(jax.nn.log_softmax(scaled), token_BW[:, :, None], axis=-1)[:, :, 0]
    return jnp.where(now_BW, chosen_BW, jnp.nan)


def log_prob_gap(logits_BWV: Float[Array, "B W V"], batch: DiffusionTokenBatch, temperature: float) -> WeightedMetric:
    """Mean `|log p now − log p recorded|` over the tokens committed at the drawn step, not divided yet.

    Args:
        logits_BWV: As in `committed_log_probs`; no gradient flows back.
        batch: Of `trajectory_states`.
        temperature: Of the rollout.
    """
    now_BW = batch.model_inputs["committed_now"]
    computed_BW = committed_log_probs(jax.lax.stop_gradient(logits_BWV), batch, temperature)
    gap_BW = jnp.where(now_BW, jnp.abs(computed_BW - batch.model_inputs["recorded_log_probs"]), jnp.float32(0))
    return WeightedMetric(jnp.sum(gap_BW), jnp.sum(now_BW.astype(jnp.float32)))
