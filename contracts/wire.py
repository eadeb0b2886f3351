"""How arrays cross a process boundary: plain numpy, bit exact, and digests of what crossed.

Ray's object store is zero-copy for numpy's own dtypes only; a bfloat16 or float8 array, like every ``jax.Array``,
travels in-band and copied. Such arrays therefore travel as an unsigned view of their bits beside the dtype's name.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from contracts.errors import WeightsError

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_EXTENSION_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz")
}


@dataclass(frozen=True)
class WireArray:
    """An array in the form in which it travels.

    Attributes:
      bits: C-contiguous numpy array of a plain numpy dtype.
      dtype: name of the dtype that ``bits`` is a view of, e.g. ``"bfloat16"``; for plain dtypes, its own.
    """

    bits: np.ndarray
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes


def encode(array) -> WireArray:
    """Bring an array (numpy or JAX) to the host in wire form. Bits are preserved, NaN payloads included."""
    host = np.ascontiguousarray(np.asarray(array)).reshape(np.shape(array))
    name = host.dtype.name
    if name in _EXTENSION_DTYPES:
        return WireArray(host.view(_UNSIGNED[host.dtype.itemsize]), name)
    if host.dtype.kind not in "biuf":
        raise WeightsError(f"only real and boolean arrays can be sent, not dtype {host.dtype}; convert it first")
    return WireArray(host, name)


def decode(wire: WireArray) -> np.ndarray:
    """The array that `encode` was given, as a (possibly read-only) view of the same bytes."""
    dtype = _EXTENSION_DTYPES.get(wire.dtype)
    carried = wire.dtype if dtype is None else np.dtype(_UNSIGNED[dtype.itemsize]).name
    if wire.bits.dtype.name != carried:
        raise WeightsError(f"wire array says dtype {wire.dtype} but carries {wire.bits.dtype}; encode it with `encode`")
    return wire.bits if dtype is None else wire.bits.view(dtype)


def encode_tree(tree: Mapping[str, object]) -> dict[str, WireArray]:
    """`encode` every leaf of a flat name → array mapping."""
    return {name: encode(tree[name]) for name in sorted(tree)}


def decode_tree(tree: Mapping[str, WireArray]) -> dict[str, np.ndarray]:
    """`decode` every leaf of a flat name → array mapping."""
    return {name: decode(tree[name]) for name in sorted(tree)}


def content_digest(arrays: Mapping[str, object]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of host arrays, 32 hex digits; independent of mapping order."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        wire = encode(arrays[name])
        digest.update(f"{name}|{wire.dtype}|{wire.shape}|".encode())
        digest.update(wire.bits.tobytes())
    return digest.hexdigest()[:32]
