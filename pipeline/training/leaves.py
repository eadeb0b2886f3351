"""Trees of arrays as named leaves: how they are compared, digested and saved."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from contracts.errors import CheckpointError
from contracts.weights import fingerprint


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by dotted path, in the tree's order.

    Raises:
        CheckpointError: Two leaves have one path.
    """
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
        if name in named:
            raise CheckpointError(f"two leaves of one tree are called {name!r}: rename one of the keys")
        named[name] = leaf
    return named


def spec(leaf: Any) -> str:
    """Shape and dtype, for example `float32[4, 8]`."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def spec_differences(expected: Mapping[str, str], found: Mapping[str, str], *, sides: tuple[str, str]) -> list[str]:
    """What differs between two described trees, one line per leaf.

    Args:
        expected: Name → `spec` on the first side.
        found: Name → `spec` on the second side.
        sides: What to call the two.
    """
    return [
        f"{name}: {sides[0]} {expected.get(name, 'absent')}, {sides[1]} {found.get(name, 'absent')}"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]


def is_random_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key, whose bits are only reachable as key data."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def key_bits(leaf: Any) -> Any:
    """The leaf itself, or the key data of a typed PRNG key."""
    return jax.random.key_data(leaf) if is_random_key(leaf) else leaf


def digest(leaf: Any) -> str:
    """The fingerprint of one leaf (key data for a PRNG key); independent of sharding."""
    return fingerprint({"leaf": key_bits(leaf)})
