"""One denoising step's decision: what is proposed for each slot, how sure that is, and which slots are committed.

    logits ──propose──▶ tokens, log-probabilities, confidences ──slots_to_commit──▶ bool mask

Everything is float32 and row by row, so a row decides the same in any batch.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from contracts.work import CommitRule

Scalar = float | int | Float[Array, ""] | Int[Array, ""]


class Proposal(NamedTuple):
    """A token for every slot of a block, whether or not it will be committed.

    Attributes:
      tokens_BS: int32 ``[B, S]``.
      log_probs_BS: float32 ``[B, S]``, log p of the proposed token at the sampler's temperature (1 when greedy).
      confidences_BS: float32 ``[B, S]`` in [0, 1].
    """

    tokens_BS: Array
    log_probs_BS: Array
    confidences_BS: Array


def propose(
    logits_BSV: Float[Array, "B S V"],
    keys_B: Key[Array, "B"] | None,
    temperature: Scalar,
    mask_id: int | None,
    confidence: Literal["proposed", "max"] = "proposed",
) -> Proposal:
    """Propose a token per slot, and say how sure the model is.

    With ``p = softmax(logits / T)`` over every id but the mask id: greedy proposes ``argmax p`` at T = 1; otherwise
    ``argmax(log p + g)`` with standard Gumbel noise g, which is a draw from p. The noise touches the proposal only: the
    confidence is ``p(proposed)``, or ``max p``.

    Args:
      logits_BSV: ``[B, S, V]``, any float dtype; computed with in float32, because low-precision noise acts like a
        lower temperature.
      keys_B: one key per row; None proposes greedily and ignores ``temperature``.
      temperature: T > 0.
      mask_id: the id that is never proposed, or None for a model without one.
      confidence: of the proposed token, or of the likeliest (``max``).

    Returns:
      The proposal; its token is never ``mask_id``.
    """
    logits_BSV = logits_BSV.astype(jnp.float32)
    if mask_id is not None:
        logits_BSV = logits_BSV.at[:, :, mask_id].set(-jnp.inf)
    if keys_B is not None:
        logits_BSV = logits_BSV / jnp.asarray(temperature, jnp.float32)
    log_probs_BSV = jax.nn.log_softmax(logits_BSV, axis=-1)
    noisy_BSV = log_probs_BSV
    if keys_B is not None:
        slots, width = logits_BSV.shape[1:]
        noisy_BSV += jax.vmap(lambda key: jax.random.gumbel(key, (slots, width), jnp.float32))(keys_B)
    tokens_BS = jnp.argmax(noisy_BSV, axis=-1).astype(jnp.int32)
    chosen_BS = jnp.take_along_axis(log_probs_BSV, tokens_BS[:, :, None], axis=-1)[:, :, 0]
    sure_BS = chosen_BS if confidence == "proposed" else jnp.max(log_probs_BSV, axis=-1)
    return Proposal(tokens_BS, chosen_BS, jnp.exp(sure_BS))


def confidence_ranks(confidences_BS: Float[Array, "B S"], unresolved_BS: Bool[Array, "B S"]) -> Int[Array, "B S"]:
    """Rank among the unresolved slots of the row: 1 is the most confident, ties go to the smaller position."""
    slots = confidences_BS.shape[1]
    confidences_BS = jnp.where(unresolved_BS, confidences_BS, -1.0)
    own_BS1, other_B1S = confidences_BS[:, :, None], confidences_BS[:, None, :]
    earlier_1SS = (jnp.arange(slots)[None, :] < jnp.arange(slots)[:, None])[None]
    ahead_BSS = (other_B1S > own_BS1) | ((other_B1S == own_BS1) & earlier_1SS)
    return 1 + jnp.sum(ahead_BSS, axis=2, dtype=jnp.int32)


def _threshold(tau, confidences_BS, unresolved_BS, step):
    return (confidences_BS >= tau) | (confidence_ranks(confidences_BS, unresolved_BS) == 1)


def _static(steps, confidences_BS, unresolved_BS, step):
    left = jnp.maximum(jnp.asarray(steps, jnp.int32) - step, 1)
    masked_B1 = jnp.sum(unresolved_BS, axis=1, keepdims=True, dtype=jnp.int32)
    return confidence_ranks(confidences_BS, unresolved_BS) <= (masked_B1 + left - 1) // left


def _factor(factor, confidences_BS, unresolved_BS, step):
    ranks_BS = confidence_ranks(confidences_BS, unresolved_BS)
    # (r + 1)(1 - c_r) never falls as r rises, so "while" needs no scan over the ranks.
    return ((ranks_BS + 1).astype(jnp.float32) * (1.0 - confidences_BS) < factor) | (ranks_BS == 1)


def _prefix(tau, confidences_BS, unresolved_BS, step):
    passed_BS = ~unresolved_BS | (confidences_BS >= tau)
    unresolved_before_BS = jnp.cumsum(unresolved_BS, axis=1, dtype=jnp.int32) - unresolved_BS.astype(jnp.int32)
    return (jnp.cumsum(~passed_BS, axis=1, dtype=jnp.int32) == 0) | (unresolved_before_BS == 0)


_RULES: dict[CommitRule, Callable] = {
    "threshold": _threshold,
    "static": _static,
    "factor": _factor,
    "prefix": _prefix,
}


def rule_index(rule: CommitRule) -> int:
    """The number under which `slots_to_commit` takes a traced rule."""
    return list(_RULES).index(rule)


def slots_to_commit(
    rule: CommitRule | Int[Array, ""],
    value: Scalar,
    confidences_BS: Float[Array, "B S"],
    unresolved_BS: Bool[Array, "B S"],
    step: int | Int[Array, ""],
) -> Bool[Array, "B S"]:
    """Which unresolved slots a denoising step commits.

    * ``threshold``: every slot with confidence ≥ τ.
    * ``static``: the ⌈unresolved / steps left⌉ most confident slots, so ``static(1)`` resolves a block in one step.
    * ``factor``: ranks r = 1, 2, … while (r + 1)(1 − c_r) < f.
    * ``prefix``: the longest run of slots from the left with confidence ≥ τ.

    Each commits at least the most confident slot (ties: the smallest position), ``prefix`` at least the leftmost, so a
    block of S slots takes at most S steps.

    Args:
      rule: which of the four, by name, or traced as its `rule_index`.
      value: τ, the number of steps, or f; may be traced.
      confidences_BS: ``[B, S]`` in [0, 1]; ignored where resolved.
      unresolved_BS: bool ``[B, S]``, the slots that may be committed.
      step: denoising steps already taken in this block.

    Returns:
      bool ``[B, S]``, a subset of ``unresolved_BS``; empty only in rows without an unresolved slot.

    Source: threshold and factor after Wu et al. 2025, Fast-dLLM (arXiv:2505.22618), section 3.3.
    """
    if isinstance(rule, str):
        return unresolved_BS & _RULES[rule](value, confidences_BS, unresolved_BS, step)
    chosen_BS = jax.lax.switch(rule, list(_RULES.values()), value, confidences_BS, unresolved_BS, step)
    return unresolved_BS & chosen_BS
