"""One decoder for every role: causal teacher and block-diffusion student differ in their token ids only."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from pipeline.models.attention import TokenIds, attention, take_columns
from pipeline.models.config import DecoderConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyValueCache:
    """Rotated keys and values of tokens that will not change.

    Args:
        keys: `[layers, B, T, Hkv, head_dim]`, in the activations' dtype; or a tuple with one array per layer.
        values: Same form, shape and dtype.
    """

    keys: Any
    values: Any


def empty_cache(config: DecoderConfig, rows: int, length: int) -> KeyValueCache:
    """A cache of zeros for `rows` rows of `length` tokens; which entries exist is said by the ids beside it."""
    shape = (config.layers, rows, length, config.kv_heads, config.head_dim)
    return KeyValueCache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))


def rotary(positions_BL: Array, config: DecoderConfig) -> tuple[Array, Array]:
    """Cosines and sines `[B, L, 1, head_dim / 2]`, float32, of `position · theta^(−2i / head_dim)`."""
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / jnp.float32(config.head_dim)
    frequencies = jnp.exp(-exponents * jnp.log(jnp.float32(config.rope_theta)))
    angles = positions_BL.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
    return jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]


def rotate(x: Array, turn: tuple[Array, Array]) -> Array:
    """Rotates `[B, L, H, head_dim]` in float32, pairing dimension i with i + head_dim / 2 (rotate-half)."""
    cosine, sine = turn
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)


class Linear(nnx.Module):
    """`x @ kernel + bias`, kernel `[in, out]`, in the dtype of x."""

    def __init__(self, size_in: int, size_out: int, config: DecoderConfig, rngs: nnx.Rngs, *, bias: bool = False):
        noise = jax.random.normal(rngs.params(), (size_in, size_out), jnp.float32)
        self.kernel = nnx.Param((noise * jnp.float32(size_in**-0.5)).astype(config.param_dtype))
        self.bias = nnx.Param(jnp.zeros((size_out,), config.param_dtype)) if bias else None

    def __call__(self, x: Array) -> Array:
        # As one plain matrix product: with [B, L] apart, the kernel's gradient takes nearly twice as long on CPU.
        y = (x.reshape(-1, x.shape[-1]) @ self.kernel[...].astype(x.dtype)).reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)[None, None, :]


class RMSNorm(nnx.Module):
    """`x / √(mean(x²) + eps) · scale` over the last axis, in float32, returned in the dtype of x."""

    def __init__(self, size: int, config: DecoderConfig):
        self.eps = config.norm_eps
        self.scale = nnx.Param(jnp.ones((size,), config.param_dtype))

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        scale = self.scale[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        root = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + jnp.float32(self.eps))
        return (wide * root * scale).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions and optional per-head norms of queries and keys."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        inner, outer = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.query = Linear(config.width, inner, config, rngs, bias=config.qkv_bias)
        self.key = Linear(config.width, outer, config, rngs, bias=config.qkv_bias)
        self.value = Linear(config.width, outer, config, rngs, bias=config.qkv_bias)
        self.output = Linear(inner, config.width, config, rngs)
        self.query_norm = RMSNorm(config.head_dim, config) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, config) if config.qk_norm else None

    def queries(self, x: Array, turn: tuple[Array, Array]) -> Array:
        query = self._heads(self.query(x))
        return rotate(query if self.query_norm is None else self.query_norm(query), turn)

    def keys_values(self, x: Array, turn: tuple[Array, Array]) -> tuple[Array, Array]:
        key = self._heads(self.key(x))
        return rotate(key if self.key_norm is None else self.key_norm(key), turn), self._heads(self.value(x))

    def merge(self, mixed: Array) -> Array:
        return self.output(mixed.reshape(*mixed.shape[:2], -1))

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self.head_dim)


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) · up(x))`."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.gate = Linear(config.width, config.mlp_width, config, rngs)
        self.up = Linear(config.width, config.mlp_width, config, rngs)
        self.down = Linear(config.mlp_width, config.width, config, rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width, config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.width, config)
        self.mlp = SwiGLU(config, rngs)

    def finish(self, x: Array, mixed: Array) -> Array:
        x = x + self.attention.merge(mixed)
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nnx.Module):
    """One row per token id."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        noise = jax.random.normal(rngs.params(), (config.vocab_size, config.width), jnp.float32)
        # Unit-variance logits at the start when the head is tied to this table.
        self.table = nnx.Param((noise * jnp.float32(config.width**-0.5)).astype(config.param_dtype))


class Decoder(nnx.Module):
    """Decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU, tied or untied head.

    Args:
        config: Sizes and options.
        rngs: Source of the initial weights; `nnx.Rngs(seed)`.

    Source: Yang et al. 2025, Qwen3 Technical Report, section 2; Llama without `qk_norm`.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config, rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config.width, config)
        self.lm_head = None if config.tied_head else Linear(config.width, config.vocab_size, config, rngs)

    def __call__(self, tokens_BL: Int[Array, "B L"], ids: TokenIds) -> Float[Array, "B L V"]:
        """Float32 logits of every column: `head(hidden(tokens_BL, ids))`."""
        return self.head(self.hidden(tokens_BL, ids))

    def hidden(self, tokens_BL: Int[Array, "B L"], ids: TokenIds, *, outputs_from: int = 0) -> Float[Array, "B M D"]:
        """States after the final norm.

        Args:
            tokens_BL: int32, in [0, vocab_size).
            ids: Places and visibility of those tokens.
            outputs_from: First column whose state is wanted; earlier ones only lend their keys and values, which spares
                their last layer.

        Returns:
            `[B, L − outputs_from, D]` in `config.dtype`; finite for padding too.
        """
        x = self._embed(tokens_BL)
        turn = rotary(ids.positions_BL, self.config)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            start = outputs_from if index == last else 0
            normed = layer.attention_norm(x)
            keys, values = layer.attention.keys_values(normed, turn)
            query_turn = (turn[0][:, start:], turn[1][:, start:])
            query = layer.attention.queries(normed[:, start:], query_turn)
            mixed = attention(query, take_columns(ids, start), (keys, values, ids))
            x = layer.finish(x[:, start:], mixed)
        return self.norm(x)

    def head(self, hidden: Float[Array, "*lead D"]) -> Float[Array, "*lead V"]:
        """Float32 logits of final states."""
        kernel_DV = self.head_kernel().astype(hidden.dtype)
        flat = hidden.reshape(-1, hidden.shape[-1])
        return jnp.matmul(flat, kernel_DV, preferred_element_type=jnp.float32).reshape(*hidden.shape[:-1], -1)

    def head_kernel(self) -> Float[Array, "D V"]:
        """The head's weights: the transposed embedding when tied. There is no bias and no softcap in this family."""
        return self.embedding.table[...].T if self.lm_head is None else self.lm_head.kernel[...]

    def extend(
        self, tokens_BS: Int[Array, "B S"], ids_BS: TokenIds, cache: KeyValueCache, cache_ids: TokenIds
    ) -> tuple[Float[Array, "B S D"], KeyValueCache]:
        """Runs a few tokens against cached ones and themselves; writes nothing.

        Args:
            tokens_BS: The new tokens.
            ids_BS: Their ids.
            cache: Keys and values of T earlier tokens.
            cache_ids: `[B, T]`; segment 0 where the cache holds nothing.

        Returns:
            States after the final norm, and the keys and values `[layers, B, S, Hkv, head_dim]` of the S tokens.
        """
        x = self._embed(tokens_BS)
        turn = rotary(ids_BS.positions_BL, self.config)
        new_keys, new_values = [], []
        for index, layer in enumerate(self.layers):
            normed = layer.attention_norm(x)
            keys, values = layer.attention.keys_values(normed, turn)
            query = layer.attention.queries(normed, turn)
            cached = (cache.keys[index], cache.values[index], cache_ids)
            x = layer.finish(x, attention(query, ids_BS, cached, (keys, values, ids_BS)))
            new_keys.append(keys)
            new_values.append(values)
        return self.norm(x), KeyValueCache(jnp.stack(new_keys), jnp.stack(new_values))

    def _embed(self, tokens_BL: Array) -> Array:
        return self.embedding.table[...].astype(self.config.dtype)[tokens_BL]
