"""Which weights: a version id that carries a fingerprint of the arrays themselves.

A counter can move while the weights do not. A fingerprint is computed from the bits, by whoever holds them, so equal
fingerprints mean equal weights, wherever and however sharded they are.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from contracts.errors import WeightsError

LANES = 2


@dataclass(frozen=True)
class WeightVersion:
    """Identity of published student weights.

    Attributes:
      run_id: the run that published them.
      step: number of closed windows before them; version 0 is the student before its first update.
      base_fingerprint: of the frozen base under an adapter; empty when every weight is published.
      fingerprint: of the published tree, see `fingerprint`.
    """

    run_id: str
    step: int
    base_fingerprint: str
    fingerprint: str

    def __str__(self) -> str:
        base = f"{self.base_fingerprint}+" if self.base_fingerprint else ""
        return f"{self.run_id}@{self.step}:{base}{self.fingerprint}"


def fingerprint(tree: Mapping[str, Any]) -> str:
    """Fingerprint of a flat tree of arrays, 16 hex digits.

    Each of two 32-bit lanes is ``Σ mix32(bits_i XOR mix32(i XOR salt))`` modulo 2^32 over all elements of all leaves,
    where ``bits_i`` are the element's bits zero-extended to 32 (an element of 8 bytes counts as two, the lower half first),
    ``i`` its row-major index in the unsharded leaf, ``salt`` a hash of the leaf's name, shape, dtype and lane, and
    ``mix32`` murmur3's 32-bit finaliser. ``mix32`` is a nonlinear
    bijection: with a linear one, flipping the sign bits of two elements would cancel.

    Computed on the arrays' own device in one pass; the value does not depend on sharding, memory order or jit.

    Args:
      tree: name → array of any real or boolean dtype of 1, 2, 4 or 8 bytes; numpy or JAX.

    Returns:
      16 lowercase hex digits; the empty string for an empty tree.

    Raises:
      WeightsError: for a leaf that is not a real or boolean array.
    """
    if not tree:
        return ""
    for name, leaf in tree.items():
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not _has_whole_bytes(dtype):
            raise WeightsError(
                f"weights[{name!r}] is {type(leaf).__name__} of dtype {dtype}; expected a real or boolean array of 1, 2, "
                "4 or 8 bytes an element"
            )
    # Over 64-bit host leaves: split them here, since JAX would silently narrow them to 32 bits.
    words = {name: _as_words(leaf) for name, leaf in tree.items()}
    salts = {
        name: tuple(_salt(name, jnp.shape(leaf), leaf.dtype.name, lane) for lane in range(LANES))
        for name, leaf in tree.items()
    }
    lanes = _lane_sums(words, {name: jnp.asarray(value, dtype=jnp.uint32) for name, value in salts.items()})
    return "".join(f"{int(lane):08x}" for lane in jax.device_get(lanes))


def _has_whole_bytes(dtype) -> bool:
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits in (8, 16, 32, 64)
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits in (8, 16, 32, 64)


def _as_words(leaf):
    if leaf.dtype.itemsize == 8 and not isinstance(leaf, jax.Array):
        return leaf.reshape(*leaf.shape, 1).view("uint32")
    return leaf


def _salt(name: str, shape: tuple[int, ...], dtype: str, lane: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{name}|{tuple(shape)}|{dtype}|{lane}".encode()).digest()[:4], "big")


def _mix32(word: jax.Array) -> jax.Array:
    word = (word ^ (word >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> jnp.uint32(16))


def _bits32(array: jax.Array) -> jax.Array:
    if array.dtype == bool:
        return array.astype(jnp.uint32)
    if array.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    return jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


@jax.jit
def _lane_sums(tree: dict[str, Any], salts: dict[str, jax.Array]) -> jax.Array:
    total = jnp.zeros((LANES,), jnp.uint32)
    for name in sorted(tree):
        bits = _bits32(jnp.asarray(tree[name]))
        index = jnp.zeros(bits.shape, jnp.uint32)
        stride = 1
        for axis in reversed(range(bits.ndim)):
            index = index + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride % 2**32)
            stride *= bits.shape[axis]
        lanes = [jnp.sum(_mix32(bits ^ _mix32(index ^ salts[name][lane])), dtype=jnp.uint32) for lane in range(LANES)]
        total = total + jnp.stack(lanes)
    return total
