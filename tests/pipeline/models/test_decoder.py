import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pipeline.models.attention import TokenIds, causal_ids, take_columns
from pipeline.models.config import DecoderConfig
from pipeline.models.decoder import Decoder, KeyValueCache, empty_cache
from pipeline.models.tree import parameters, with_parameters

QWEN = DecoderConfig(
    vocab_size=13, width=16, layers=2, heads=4, kv_heads=2, head_dim=6, mlp_width=20, norm_eps=1e-3, rope_theta=50.0
)
LLAMA = replace(QWEN, qk_norm=False, tied_head=False, kv_heads=4)
QWEN_2 = replace(QWEN, qk_norm=False, qkv_bias=True, kv_heads=1)
FAMILIES = {"qwen3": QWEN, "llama": LLAMA, "qwen2": QWEN_2}
ROWS, LENGTH = 3, 7


@functools.cache
def build(config):
    """A decoder whose every weight is random, norms and biases too: ones and zeros would hide a missing factor."""
    blank = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(7)
    weights = {
        name: jnp.asarray(rng.normal(1.0 if "norm" in name else 0.0, 0.3, leaf.shape), leaf.dtype)
        for name, leaf in parameters(blank).items()
    }
    return with_parameters(blank, weights)


@functools.cache
def tokens_and_ids(causal):
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 13, (ROWS, LENGTH)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32)[None], (ROWS, LENGTH))
    valid = jnp.arange(LENGTH)[None] < jnp.array([LENGTH, 4, 1])[:, None]
    ids = causal_ids(positions, valid)
    return tokens, ids if causal else replace(ids, blocks_BL=positions // 3)


call = jax.jit(lambda model, tokens, ids: model(tokens, ids))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "block-causal"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_float64_oracle(numpy_decoder, family, causal):
    model = build(FAMILIES[family])
    tokens, ids = tokens_and_ids(causal)
    logits = np.asarray(call(model, tokens, ids))
    assert logits.dtype == np.float32
    for row, length in enumerate((LENGTH, 4, 1)):
        place = np.arange(length)
        key, query = place[None], place[:, None]
        mask = key <= query if causal else key // 3 <= query // 3
        expected = numpy_decoder(model.config, parameters(model), np.asarray(tokens)[row, :length], place, mask)
        np.testing.assert_allclose(logits[row, :length], expected, atol=1e-5)


def test_padding_gives_finite_states_and_reaches_no_other_token():
    model = build(QWEN)
    tokens, ids = tokens_and_ids(False)
    logits = np.asarray(call(model, tokens, ids))
    valid = np.asarray(ids.segments_BL) > 0
    assert np.isfinite(logits).all()
    other = np.asarray(call(model, jnp.where(valid, tokens, 12 - tokens), ids))
    np.testing.assert_array_equal(other[valid], logits[valid])
    assert np.abs(other - logits)[~valid].max() > 0.1


def test_physical_order_is_nothing_positions_are_all():
    model = build(QWEN)
    tokens, ids = tokens_and_ids(False)
    order = np.random.default_rng(3).permutation(LENGTH)
    moved = call(model, tokens[:, order], jax.tree.map(lambda part: part[:, order], ids))
    np.testing.assert_allclose(moved, call(model, tokens, ids)[:, order], atol=1e-5)


def test_only_distances_between_positions_matter():
    model = build(QWEN)
    tokens, ids = tokens_and_ids(False)
    moved = replace(ids, positions_BL=ids.positions_BL + 40)
    np.testing.assert_allclose(call(model, tokens, moved), call(model, tokens, ids), atol=2e-5)


def test_states_of_the_last_columns_alone_are_the_same_states():
    model = build(QWEN)
    tokens, ids = tokens_and_ids(False)
    few = jax.jit(lambda model: model.head(model.hidden(tokens, ids, outputs_from=4)))(model)
    np.testing.assert_allclose(few, call(model, tokens, ids)[:, 4:], atol=1e-6)


def test_extending_a_cache_run_by_run_equals_the_whole_sequence():
    model = build(QWEN)
    tokens, ids = tokens_and_ids(False)

    @jax.jit
    def piecewise(model):
        cache, states, done = empty_cache(QWEN, ROWS, LENGTH), [], 0
        for end in (3, 6, 7):
            held = replace(ids, segments_BL=jnp.where(jnp.arange(LENGTH)[None] < done, ids.segments_BL, 0))
            hidden, new = model.extend(tokens[:, done:end], take_columns(ids, done, end), cache, held)
            cache = KeyValueCache(
                cache.keys.at[:, :, done:end].set(new.keys), cache.values.at[:, :, done:end].set(new.values)
            )
            states.append(hidden)
            done = end
        return model.head(jnp.concatenate(states, axis=1))

    valid = np.asarray(ids.segments_BL) > 0
    np.testing.assert_allclose(piecewise(model)[valid], call(model, tokens, ids)[valid], atol=1e-5)


def test_bfloat16_activations_leave_weights_and_logits_in_float32():
    model = build(QWEN)
    low = with_parameters(
        nnx.eval_shape(lambda: Decoder(replace(QWEN, dtype="bfloat16"), rngs=nnx.Rngs(0))), parameters(model)
    )
    tokens, ids = tokens_and_ids(False)

    @jax.jit
    def run(model):
        hidden = model.hidden(tokens, ids)
        new, keys_values = model.extend(tokens, ids, empty_cache(model.config, ROWS, 1), take_columns(ids, 0, 1))
        return hidden, model.head(hidden), keys_values, model.head(new)

    hidden, logits, keys_values, _ = run(low)
    assert (hidden.dtype, keys_values.keys.dtype, logits.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(logits, call(model, tokens, ids), atol=0.15)
    gradients = jax.eval_shape(jax.grad(lambda model: jnp.sum(model(tokens, ids))), low)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


def test_bfloat16_weights_are_kept_as_they_are_stored():
    config = replace(QWEN, dtype="bfloat16", param_dtype="bfloat16", qkv_bias=True, tied_head=False)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    assert {leaf.dtype for leaf in parameters(model).values()} == {jnp.dtype("bfloat16")}


def test_initial_logits_are_of_order_one_whatever_the_seed():
    tokens, ids = tokens_and_ids(True)
    models = [Decoder(replace(QWEN, vocab_size=32), rngs=nnx.Rngs(seed)) for seed in (0, 1)]
    one, other = (np.asarray(call(model, tokens, ids)) for model in models)
    assert 0.3 < one.std() < 3
    assert np.abs(one - other).max() > 0.1


def test_ids_pass_through_jit_as_a_pytree():
    _, ids = tokens_and_ids(True)
    assert isinstance(jax.eval_shape(lambda ids: ids, ids), TokenIds)
