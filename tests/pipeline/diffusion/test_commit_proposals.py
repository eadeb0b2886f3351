"""Proposals and their confidences against a float64 softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.diffusion.commit import propose
from pipeline.diffusion.keys import row_keys

MASK = 5
LOGITS_BSV = np.random.default_rng(0).normal(0, 2, (64, 3, 7)).astype(np.float32)
KEYS_B = row_keys(0, 0, np.arange(64))


def probabilities(logits_BSV, temperature):
    logits = np.delete(logits_BSV.astype(np.float64), MASK, axis=-1) / temperature
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return np.insert(p / p.sum(-1, keepdims=True), MASK, 0.0, axis=-1)


def test_greedy_proposes_the_likeliest_token_with_its_probability_at_temperature_one():
    p_BSV = probabilities(LOGITS_BSV, 1.0)
    tokens, log_probs, confidences = propose(jnp.asarray(LOGITS_BSV), None, 0.25, MASK)
    np.testing.assert_array_equal(tokens, p_BSV.argmax(-1))
    np.testing.assert_allclose(confidences, p_BSV.max(-1), rtol=1e-5)
    np.testing.assert_allclose(log_probs, np.log(p_BSV.max(-1)), atol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_confidence_is_the_proposed_tokens_probability_without_noise(temperature):
    p_BSV = probabilities(LOGITS_BSV, temperature)
    tokens, log_probs, confidences = propose(jnp.asarray(LOGITS_BSV), KEYS_B, temperature, MASK)
    chosen_BS = np.take_along_axis(p_BSV, np.asarray(tokens)[:, :, None], -1)[:, :, 0]
    assert (np.asarray(tokens) != p_BSV.argmax(-1)).any()
    np.testing.assert_allclose(confidences, chosen_BS, rtol=1e-5)
    np.testing.assert_allclose(log_probs, np.log(chosen_BS), atol=1e-5)


def test_max_confidence_is_of_the_likeliest_token_and_the_log_probability_of_the_proposed_one():
    p_BSV = probabilities(LOGITS_BSV, 1.0)
    plain = propose(jnp.asarray(LOGITS_BSV), KEYS_B, 1.0, MASK)
    most = propose(jnp.asarray(LOGITS_BSV), KEYS_B, 1.0, MASK, "max")
    np.testing.assert_allclose(most.confidences_BS, p_BSV.max(-1), rtol=1e-5)
    np.testing.assert_array_equal(most.tokens_BS, plain.tokens_BS)
    np.testing.assert_array_equal(most.log_probs_BS, plain.log_probs_BS)


def test_draws_follow_the_distribution_at_the_temperature():
    rows = 20_000
    logits_BSV = np.broadcast_to(LOGITS_BSV[:1, :1], (rows, 1, 7))
    tokens = propose(jnp.asarray(logits_BSV), row_keys(1, 2, np.arange(rows)), 1.5, MASK).tokens_BS
    expected = probabilities(LOGITS_BSV[:1, :1], 1.5)[0, 0] * rows
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=7)
    others = expected > 0
    # χ² with 5 degrees of freedom exceeds 20.5 once in a thousand.
    assert counts[MASK] == 0
    assert ((counts - expected)[others] ** 2 / expected[others]).sum() < 20.5


def test_the_mask_is_never_proposed_however_likely():
    logits_BSV = jnp.asarray(LOGITS_BSV).at[:, :, MASK].set(100.0)
    for keys_B in (None, KEYS_B):
        tokens, log_probs, confidences = propose(logits_BSV, keys_B, 1.0, MASK)
        assert not (tokens == MASK).any()
        assert jnp.isfinite(log_probs).all() and (confidences > 0).all()


def test_low_precision_logits_are_decided_on_in_float32():
    logits_BSV = jnp.asarray(LOGITS_BSV).astype(jnp.bfloat16)
    low = propose(logits_BSV, KEYS_B, 0.7, MASK)
    wide = propose(logits_BSV.astype(jnp.float32), KEYS_B, 0.7, MASK)
    assert jax.tree.map(lambda a: a.dtype, low) == jax.tree.map(lambda a: a.dtype, wide)
    np.testing.assert_array_equal(low.tokens_BS, wide.tokens_BS)
    np.testing.assert_array_equal(low.confidences_BS, wide.confidences_BS)
