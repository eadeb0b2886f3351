"""Keys and values of finished blocks, laid out for reading: a step reads all of them, a block writes once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.models.decoder import KeyValueCache


class BlockCache(NamedTuple):
    """Per layer, keys and values ``[B, Hkv, T, head_dim]``; column = logical position.

    Heads come before columns, and every layer has its own arrays, so that the two products of attention read them in
    place: with ``[layers, B, T, Hkv, head_dim]`` each step would first copy what it attends to (measured on CPU at
    T = 524: twice the time of a whole step).
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]

    @classmethod
    def of(cls, cache: KeyValueCache, length: int) -> "BlockCache":
        """The first ``length`` columns of keys and values as `Decoder.extend` returns them."""

        def layers(stacked: Array) -> tuple[Array, ...]:
            return tuple(jnp.swapaxes(layer[:, :length], 1, 2) for layer in stacked)

        return cls(layers(cache.keys), layers(cache.values))

    @property
    def length(self) -> int:
        """T, columns there is room for."""
        return self.keys[0].shape[2]

    def with_length(self, length: int) -> "BlockCache":
        """The same columns, with room for ``length``."""
        wider = ((0, 0), (0, 0), (0, length - self.length), (0, 0))
        return jax.tree.map(lambda layer: jnp.pad(layer, wider), self)

    def view(self) -> KeyValueCache:
        """As `Decoder.extend` indexes it: by layer, then ``[B, T, Hkv, head_dim]``; XLA folds the transposes away."""
        return KeyValueCache(
            tuple(jnp.swapaxes(layer, 1, 2) for layer in self.keys),
            tuple(jnp.swapaxes(layer, 1, 2) for layer in self.values),
        )

    def write(self, columns_BS: Array, written: KeyValueCache) -> "BlockCache":
        """Keep the first S tokens of what `Decoder.extend` returned, at these columns; those past the end are dropped."""
        rows_B1 = jnp.arange(columns_BS.shape[0])[:, None]
        slots = columns_BS.shape[1]

        def keep(layers: tuple[Array, ...], stacked: Array) -> tuple[Array, ...]:
            return tuple(
                layer.at[rows_B1, :, columns_BS].set(new[:, :slots], mode="drop")
                for layer, new in zip(layers, stacked, strict=True)
            )

        return BlockCache(keep(self.keys, written.keys), keep(self.values, written.values))
