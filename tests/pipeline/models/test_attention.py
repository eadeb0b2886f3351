import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.models import attention as module
from pipeline.models.attention import TokenIds, attention, causal_ids, join, take_columns, visible

LENGTH = 11


def random_case(seed, batch=2, length=LENGTH):
    rng = np.random.default_rng(seed)
    ids = TokenIds(
        jnp.asarray(rng.integers(0, 20, (batch, length)), jnp.int32),
        jnp.asarray(rng.integers(-2, 3, (batch, length)), jnp.int32),
        jnp.asarray(rng.integers(0, 3, (batch, length)), jnp.int32),
        jnp.asarray(rng.integers(0, 2, (batch, length)), jnp.int32),
    )
    query = jnp.asarray(rng.normal(size=(batch, length, 4, 6)), jnp.float32)
    keys, values = (jnp.asarray(rng.normal(size=(batch, length, 2, 6)), jnp.float32) for _ in range(2))
    return query, keys, values, ids


def dense_oracle(query, keys, values, mask):
    """Float64, head by head; 0 where nothing is visible."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    output = np.zeros(query.shape)
    for b, h in np.ndindex(query.shape[0], query.shape[2]):
        k, v = keys[b, :, h // 2], values[b, :, h // 2]
        for i in range(query.shape[1]):
            seen = np.flatnonzero(mask[b, i])
            if seen.size:
                scores = k[seen] @ query[b, i, h] / np.sqrt(query.shape[3])
                odds = np.exp(scores - scores.max())
                output[b, i, h] = odds @ v[seen] / odds.sum()
    return output


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_the_rule_is_the_two_stream_rule_said_token_by_token(seed):
    ids = random_case(seed)[3]
    _, block, segment, stream = (
        np.asarray(part) for part in (ids.positions_BL, ids.blocks_BL, ids.segments_BL, ids.streams_BL)
    )
    mask = np.asarray(visible(ids, ids))
    for b, i, j in np.ndindex(mask.shape):
        expected = False
        if segment[b, i] == segment[b, j] and segment[b, i] > 0:
            match ("noisy" if stream[b, i] else "clean", "noisy" if stream[b, j] else "clean"):
                case ("clean", "clean"):
                    expected = block[b, j] <= block[b, i]
                case ("noisy", "noisy"):
                    expected = block[b, j] == block[b, i]
                case ("noisy", "clean"):
                    expected = block[b, j] < block[b, i]
        assert mask[b, i, j] == expected


def test_a_causal_model_sees_itself_and_what_comes_before():
    positions = jnp.arange(5, dtype=jnp.int32)[None]
    ids = causal_ids(positions, jnp.array([[True] * 4 + [False]]))
    expected = np.tril(np.ones((5, 5), bool))
    expected[4] = expected[:, 4] = False
    np.testing.assert_array_equal(visible(ids, ids)[0], expected)


@pytest.mark.parametrize("chunk", [None, 4, 16], ids=lambda chunk: f"chunk={chunk}")
def test_attention_equals_the_dense_oracle_whole_or_in_chunks(monkeypatch, chunk):
    if chunk is not None:
        monkeypatch.setattr(module, "DENSE_SCORES", 0)
        monkeypatch.setattr(module, "KEY_CHUNK", chunk)
    run = jax.jit(lambda query, keys, values, ids: attention(query, ids, (keys, values, ids)))
    for seed in range(3):
        query, keys, values, ids = random_case(seed)
        mask = np.asarray(visible(ids, ids))
        assert (~mask.any(-1)).any(), "some query must see nothing"
        output = run(query, keys, values, ids)
        np.testing.assert_allclose(output, dense_oracle(query, keys, values, mask), atol=2e-6)


def test_the_chunked_gradient_is_the_dense_gradient(monkeypatch):
    query, keys, values, ids = random_case(5)
    goal = jnp.asarray(np.random.default_rng(1).normal(size=query.shape), jnp.float32)

    def loss(query, keys, values):
        return jnp.sum(attention(query, ids, (keys, values, ids)) * goal)

    dense = jax.jit(jax.grad(loss, (0, 1, 2)))(query, keys, values)
    monkeypatch.setattr(module, "DENSE_SCORES", 0)
    monkeypatch.setattr(module, "KEY_CHUNK", 4)
    chunked = jax.jit(jax.grad(loss, (0, 1, 2)))(query, keys, values)
    for one, other in zip(dense, chunked, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    # And both are the slope of the float64 oracle, along one random direction.
    direction = np.random.default_rng(2).normal(size=query.shape)
    mask = np.asarray(visible(ids, ids))
    up, down = (dense_oracle(np.asarray(query) + h * direction, keys, values, mask) for h in (1e-5, -1e-5))
    slope = ((up - down) * np.asarray(goal)).sum() / 2e-5
    np.testing.assert_allclose((np.asarray(chunked[0]) * direction).sum(), slope, rtol=1e-4)


@pytest.mark.parametrize("limit", [1 << 20, 0], ids=["dense", "chunked"])
def test_a_query_that_sees_nothing_gives_zero_and_takes_no_gradient(monkeypatch, limit):
    monkeypatch.setattr(module, "DENSE_SCORES", limit)
    query, keys, values, ids = random_case(0)
    nothing = jax.tree.map(jnp.zeros_like, ids)

    def total(query, keys, values):
        return jnp.sum(attention(query, nothing, (keys, values, nothing)))

    output, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(query, keys, values)
    assert output == 0
    assert all(not np.any(gradient) for gradient in gradients)


@pytest.mark.parametrize("limit", [1 << 20, 0], ids=["dense", "chunked"])
def test_several_sources_are_one_longer_source(monkeypatch, limit):
    monkeypatch.setattr(module, "DENSE_SCORES", limit)
    query, keys, values, ids = random_case(9)
    parts = [(keys[:, a:b], values[:, a:b], take_columns(ids, a, b)) for a, b in ((0, 2), (2, 3), (3, LENGTH))]
    np.testing.assert_array_equal(join(*(part for _, _, part in parts)).blocks_BL, ids.blocks_BL)
    whole, split = jax.jit(lambda *parts: (attention(query, ids, (keys, values, ids)), attention(query, ids, *parts)))(
        *parts
    )
    np.testing.assert_allclose(split, whole, atol=2e-6)


def test_large_scores_do_not_overflow():
    query, keys, values, ids = random_case(3)
    output = attention(query * 1e4, ids, (keys * 1e4, values, ids))
    assert np.isfinite(output).all()


def test_bfloat16_keeps_its_dtype_and_its_scores_in_float32():
    query, keys, values, ids = random_case(4)
    low = [x.astype(jnp.bfloat16) for x in (query, keys, values)]
    output = attention(low[0], ids, (low[1], low[2], ids))
    assert output.dtype == jnp.bfloat16
    expected = dense_oracle(*(x.astype(jnp.float32) for x in low), np.asarray(visible(ids, ids)))
    np.testing.assert_allclose(output.astype(jnp.float32), expected, atol=2e-2)
