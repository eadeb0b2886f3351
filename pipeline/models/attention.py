"""Who sees whom, in one rule, and grouped-query attention under that rule."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

CLEAN, NOISY = 0, 1
"""Values of `TokenIds.streams_BL`."""

DENSE_SCORES = 1 << 20
"""Up to this many (query, key) pairs per row and head the scores are one array; beyond, keys are taken in chunks."""

KEY_CHUNK = 256
_HIDDEN = -1e30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenIds:
    """What decides a token's place and whom it sees; physical order decides nothing.

    Args:
        positions_BL: int32 `[B, L]`, logical position (rotary angle).
        blocks_BL: int32 `[B, L]`, block id, any sign; a causal model's block is the position.
        segments_BL: int32 `[B, L]`, 0 = invalid or padding; tokens of different segments never meet.
        streams_BL: int32 `[B, L]`, `CLEAN` or `NOISY`.
    """

    positions_BL: Any
    blocks_BL: Any
    segments_BL: Any
    streams_BL: Any


def causal_ids(positions_BL: Array, valid_BL: Array) -> TokenIds:
    """Ids of a causal model: every position is a block of its own, one segment, one stream."""
    segments_BL = valid_BL.astype(jnp.int32)
    return TokenIds(positions_BL, positions_BL, segments_BL, jnp.zeros_like(positions_BL))


def join(*ids: TokenIds) -> TokenIds:
    """Ids of several token runs laid side by side, each `[B, L_i]`."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *ids)


def take_columns(ids: TokenIds, start: int, stop: int | None = None) -> TokenIds:
    """Ids of the columns `start:stop`."""
    return jax.tree.map(lambda part: part[:, start:stop], ids)


def visible(q: TokenIds, k: TokenIds) -> Bool[Array, "B Lq Lk"]:
    """The only attention rule: `[b, i, j]` is True where query i attends to key j.

    Same nonzero segment, and: a clean query sees clean keys of its own and earlier blocks; a noisy query sees noisy
    keys of its own block and clean keys of earlier blocks; a clean query never sees a noisy key.

    Args:
        q: Ids `[B, Lq]` of the queries.
        k: Ids `[B, Lk]` of the keys.

    Source: Arriola et al. 2025, Block Diffusion, section 3.2 (the two-stream training mask).
    """
    q_segment, k_segment = q.segments_BL[:, :, None], k.segments_BL[:, None, :]
    q_block, k_block = q.blocks_BL[:, :, None], k.blocks_BL[:, None, :]
    q_stream, k_stream = q.streams_BL[:, :, None], k.streams_BL[:, None, :]
    # A noisy query stops one block earlier in the clean stream: its own clean block holds the answers.
    clean = (k_stream == CLEAN) & (k_block <= q_block - q_stream)
    noisy = (k_stream == NOISY) & (q_stream == NOISY) & (k_block == q_block)
    return (q_segment == k_segment) & (q_segment != 0) & (clean | noisy)


def attention(
    query: Float[Array, "B Lq H d"], query_ids: TokenIds, *sources: tuple[Array, Array, TokenIds]
) -> Float[Array, "B Lq H d"]:
    """Grouped-query attention, `softmax(q kᵀ / √d) v` over the visible keys; 0 for a query that sees none.

    Args:
        query: `[B, Lq, H, d]`, rotated.
        query_ids: `[B, Lq]`.
        sources: One or more `(keys [B, Lk, Hkv, d], values [B, Lk, Hkv, d], ids [B, Lk])`, attended as if laid side by
            side; several sources spare the copy of a cache into a longer array. H is a multiple of Hkv.

    Returns:
        `[B, Lq, H, d]` in the query's dtype; scores and softmax are float32. Memory is linear in the key length beyond
        `DENSE_SCORES` pairs.
    """
    kv_heads = sources[0][0].shape[2]
    grouped = query.reshape(*query.shape[:2], kv_heads, query.shape[2] // kv_heads, query.shape[3])
    pairs = query.shape[1] * sum(keys.shape[1] for keys, _, _ in sources)
    if pairs > DENSE_SCORES:
        keys = jnp.concatenate([keys for keys, _, _ in sources], axis=1)
        values = jnp.concatenate([values for _, values, _ in sources], axis=1)
        mixed = _chunked(grouped, keys, values, query_ids, join(*(ids for _, _, ids in sources)))
    else:
        state = None
        for keys, values, ids in sources:
            state = _fold(state, grouped, keys, values, visible(query_ids, ids))
        assert state is not None
        mixed = _finish(state)[0].astype(query.dtype)
    return mixed.reshape(query.shape)


def _scores(grouped: Array, keys: Array, mask: Array) -> Array:
    """Scaled float32 scores `[B, Hkv, G, Lq, Lk]`, hidden ones at a finite floor."""
    scores = jnp.einsum("blkgd,btkd->bkglt", grouped, keys, preferred_element_type=jnp.float32)
    scores = scores * jnp.float32(grouped.shape[-1] ** -0.5)
    return jnp.where(mask[:, None, None], scores, jnp.float32(_HIDDEN))


def _fold(state: tuple[Array, Array, Array] | None, grouped: Array, keys: Array, values: Array, mask: Array):
    """Adds keys to an online softmax `(maximum, Σ e^(s − maximum), Σ e^(s − maximum) v)`.

    While a query has seen nothing its maximum is the floor and its sums count hidden keys; the first visible key scales
    those to exactly 0. The maximum is a constant to the gradient: the quotient does not depend on it.
    """
    scores = _scores(grouped, keys, mask)
    maximum = jnp.max(jax.lax.stop_gradient(scores), axis=-1)
    if state is not None:
        maximum = jnp.maximum(maximum, state[0])
    weights = jnp.exp(scores - maximum[..., None])
    total = jnp.sum(weights, axis=-1)
    mixed = jnp.einsum("bkglt,btkd->bkgld", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    if state is not None:
        correction = jnp.exp(state[0] - maximum)
        total = total + state[1] * correction
        mixed = mixed + state[2] * correction[..., None]
    return maximum, total, mixed


def _finish(state: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """Output `[B, Lq, Hkv, G, d]` float32 and log-normaliser `[B, Hkv, G, Lq]`; 0 where nothing was visible."""
    maximum, total, mixed = state
    seen = maximum > jnp.float32(_HIDDEN)
    output = jnp.where(seen[..., None], mixed / total[..., None], jnp.float32(0))
    return jnp.transpose(output, (0, 3, 1, 2, 4)), jnp.where(seen, maximum + jnp.log(total), jnp.float32(0))


def _split(x: Array) -> Array:
    """`[B, T, ...]` to `[T / chunk, B, chunk, ...]`, padded with zeros: segment 0 hides the pad."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % KEY_CHUNK)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, KEY_CHUNK, *x.shape[2:]), 1, 0)


@jax.custom_vjp
def _chunked(grouped: Array, keys: Array, values: Array, query_ids: TokenIds, key_ids: TokenIds) -> Array:
    return _chunked_forward(grouped, keys, values, query_ids, key_ids)[0]


def _chunked_forward(grouped: Array, keys: Array, values: Array, query_ids: TokenIds, key_ids: TokenIds):
    def step(state, chunk):
        chunk_keys, chunk_values, chunk_ids = chunk
        return _fold(state, grouped, chunk_keys, chunk_values, visible(query_ids, chunk_ids)), None

    batch, length, kv_heads, groups, head_dim = grouped.shape
    lanes = (batch, kv_heads, groups, length)
    start = (jnp.full(lanes, _HIDDEN, jnp.float32), jnp.zeros(lanes, jnp.float32))
    chunks = (_split(keys), _split(values), jax.tree.map(_split, key_ids))
    state, _ = jax.lax.scan(step, (*start, jnp.zeros((*lanes, head_dim), jnp.float32)), chunks)
    output, normaliser = _finish(state)
    output = output.astype(grouped.dtype)
    return output, (grouped, keys, values, query_ids, key_ids, output, normaliser)


def _chunked_backward(residuals, gradient: Array):
    """Recomputes each chunk's weights from the log-normaliser (Dao et al. 2022, FlashAttention, algorithm 4)."""
    grouped, keys, values, query_ids, key_ids, output, normaliser = residuals
    scale = jnp.float32(grouped.shape[-1] ** -0.5)
    gradient32 = gradient.astype(jnp.float32)
    inner = jnp.einsum("blkgd,blkgd->bkgl", gradient32, output.astype(jnp.float32))

    def step(query_gradient, chunk):
        chunk_keys, chunk_values, chunk_ids = chunk
        scores = _scores(grouped, chunk_keys, visible(query_ids, chunk_ids))
        # Hidden scores lie so far down that this is 0 for them, also where nothing was seen and the normaliser is 0.
        weights = jnp.exp(scores - normaliser[..., None])
        value_gradient = jnp.einsum("bkglt,blkgd->btkd", weights, gradient32)
        weight_gradient = jnp.einsum("blkgd,btkd->bkglt", gradient32, chunk_values.astype(jnp.float32))
        score_gradient = weights * (weight_gradient - inner[..., None]) * scale
        query_gradient += jnp.einsum("bkglt,btkd->blkgd", score_gradient, chunk_keys.astype(jnp.float32))
        key_gradient = jnp.einsum("bkglt,blkgd->btkd", score_gradient, grouped.astype(jnp.float32))
        return query_gradient, (key_gradient, value_gradient)

    chunks = (_split(keys), _split(values), jax.tree.map(_split, key_ids))
    query_gradient, stacked = jax.lax.scan(step, jnp.zeros(grouped.shape, jnp.float32), chunks)
    key_gradient, value_gradient = (
        jnp.moveaxis(x, 0, 1).reshape(keys.shape[0], -1, *keys.shape[2:])[:, : keys.shape[1]].astype(keys.dtype)
        for x in stacked
    )
    return query_gradient.astype(grouped.dtype), key_gradient, value_gradient, None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)
