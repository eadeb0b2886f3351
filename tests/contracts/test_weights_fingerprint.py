"""The fingerprint of a tree of weights, against its definition in plain numpy and against edits that must show."""

import hashlib
import os
import subprocess
import sys
from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import WeightsError
from contracts.weights import WeightVersion, fingerprint

DTYPES = (
    np.bool_,
    np.int8,
    np.uint16,
    np.int32,
    np.uint64,
    np.float16,
    np.float32,
    np.float64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
)


def mix(word: np.ndarray) -> np.ndarray:
    """MurmurHash3's 32-bit finaliser in Python integers wide enough not to overflow."""
    word = word.astype(object)
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) % 2**32
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) % 2**32
    return word ^ (word >> 16)


def by_definition(tree) -> str:
    lanes = [0, 0]
    for name, leaf in tree.items():
        leaf = np.asarray(leaf)
        raw = np.frombuffer(leaf.tobytes(), {1: "<u1", 2: "<u2"}.get(leaf.dtype.itemsize, "<u4"))
        for lane in range(2):
            text = f"{name}|{leaf.shape}|{leaf.dtype.name}|{lane}"
            salt = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
            lanes[lane] += sum(mix(raw.astype(object) ^ mix(np.arange(raw.size) ^ salt)))
    return "".join(f"{lane % 2**32:08x}" for lane in lanes)


def random_leaf(dtype, shape, seed=0) -> np.ndarray:
    dtype = np.dtype(dtype)
    generator = np.random.default_rng(seed)
    if dtype.kind == "b":
        return generator.random(shape) < 0.5
    # Any bits at all, NaNs and infinities included.
    return np.frombuffer(generator.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


@cache
def tree() -> dict[str, np.ndarray]:
    return {
        "a.kernel": random_leaf(np.float32, (6, 8), 1),
        "b.kernel": random_leaf(np.float32, (6, 8), 2),
        "scale": random_leaf(ml_dtypes.bfloat16, (8,), 3),
    }


def edited(name: str, edit) -> dict[str, np.ndarray]:
    leaf = tree()[name].copy()
    return tree() | {name: edit(leaf)}


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_it_is_what_its_definition_says_for_every_dtype(dtype):
    leaves = {"x": random_leaf(dtype, (3, 4, 5)), "scalar": random_leaf(dtype, ()), "none": random_leaf(dtype, (0, 2))}
    assert fingerprint(leaves) == by_definition(leaves)


def test_it_is_what_its_definition_says_for_a_tree_of_mixed_leaves():
    assert fingerprint(tree()) == by_definition(tree())


def test_it_never_changes_between_releases():
    leaf = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert fingerprint({"w": leaf}) == by_definition({"w": leaf}) == "23cdd1d94363e084"


def test_numpy_and_jax_arrays_of_equal_bits_have_equal_fingerprints():
    on_device = {name: jnp.asarray(leaf) for name, leaf in tree().items()}
    assert fingerprint(on_device) == fingerprint(tree())


def test_it_is_the_same_eager_and_jitted():
    jitted = fingerprint(tree())
    with jax.disable_jit():
        assert fingerprint(tree()) == jitted


def test_memory_order_and_order_of_names_do_not_matter():
    turned = {name: np.asfortranarray(leaf) for name, leaf in reversed(tree().items())}
    strided = {name: np.repeat(leaf, 2, axis=0)[::2] for name, leaf in tree().items()}
    assert fingerprint(turned) == fingerprint(strided) == fingerprint(tree())
    wide = random_leaf(np.float64, (4, 6))
    assert fingerprint({"w": wide.T}) == fingerprint({"w": np.ascontiguousarray(wide.T)})


def test_no_weights_have_no_fingerprint():
    assert fingerprint({}) == ""


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from contracts.weights import fingerprint
assert jax.device_count() == 4
mesh = jax.make_mesh((2, 2), ("x", "y"))
leaves = {
    "f32": np.random.default_rng(0).standard_normal((8, 12), np.float32),
    "bf16": np.random.default_rng(1).standard_normal((4, 8)).astype(jnp.bfloat16),
    "bool": np.arange(8) % 3 == 0,
}
for spec in (P(), P("x"), P(("x", "y")), P(None, "y"), P("y", "x")):
    placed = {
        name: jax.device_put(leaf, NamedSharding(mesh, P(*spec[: leaf.ndim]))) for name, leaf in leaves.items()
    }
    print(fingerprint(placed))
print(fingerprint(leaves))
"""


def test_sharding_over_four_devices_does_not_change_it():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    answer = subprocess.run(
        [sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    prints = answer.stdout.split()
    assert len(prints) == 6 and len(set(prints)) == 1


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["a.kernel", "scale"]), st.data())
def test_any_flipped_bit_shows(name, data):
    leaf = tree()[name]
    unsigned = {2: np.uint16, 4: np.uint32}[leaf.dtype.itemsize]
    where = data.draw(st.integers(0, leaf.size - 1))
    bit = data.draw(st.integers(0, 8 * leaf.dtype.itemsize - 1))

    def flip(leaf):
        leaf.reshape(-1).view(unsigned)[where] ^= unsigned(1 << bit)
        return leaf

    assert fingerprint(edited(name, flip)) != fingerprint(tree())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 47), min_size=1, max_size=48, unique=True))
def test_sign_flips_show_in_any_number_and_never_cancel(places):
    # Bit 31 times any odd constant is bit 31 again: in a linear hash an even number of sign flips adds up to nothing.
    def flip(leaf):
        leaf.reshape(-1).view(np.uint32)[places] ^= np.uint32(2**31)
        return leaf

    assert fingerprint(edited("a.kernel", flip)) != fingerprint(tree())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 47), st.integers(0, 47))
def test_two_swapped_elements_show(one, other):
    def swap(leaf):
        flat = leaf.reshape(-1).view(np.uint32)
        flat[[one, other]] = flat[[other, one]]
        return leaf

    assert (fingerprint(edited("a.kernel", swap)) == fingerprint(tree())) == (one == other)


def negate_bits(leaf: np.ndarray) -> np.ndarray:
    return (leaf.view(np.uint32) ^ np.uint32(2**31)).view(np.float32)


EDITS = {
    "a leaf is negated": lambda t: t | {"a.kernel": negate_bits(t["a.kernel"])},
    "both kernels are negated": lambda t: t | {name: negate_bits(t[name]) for name in ("a.kernel", "b.kernel")},
    "two leaves are swapped": lambda t: t | {"a.kernel": t["b.kernel"], "b.kernel": t["a.kernel"]},
    "two rows are swapped": lambda t: t | {"a.kernel": t["a.kernel"][[1, 0, 2, 3, 4, 5]]},
    "rows are rolled": lambda t: t | {"a.kernel": np.roll(t["a.kernel"], 1, axis=0)},
    "columns are reversed": lambda t: t | {"a.kernel": t["a.kernel"][:, ::-1]},
    "a leaf is renamed": lambda t: {("c.kernel" if name == "a.kernel" else name): t[name] for name in t},
    "a leaf is reshaped": lambda t: t | {"a.kernel": t["a.kernel"].reshape(8, 6)},
    "a leaf is read as integers": lambda t: t | {"a.kernel": t["a.kernel"].view(np.int32)},
    "a leaf is missing": lambda t: {name: t[name] for name in ("a.kernel", "scale")},
    "a leaf is doubled": lambda t: t | {"c.kernel": t["a.kernel"]},
    "everything is zero": lambda t: {name: np.zeros_like(leaf) for name, leaf in t.items()},
}


def test_no_two_of_these_edits_have_one_fingerprint():
    prints = {name: fingerprint(edit(tree())) for name, edit in EDITS.items()} | {"no edit": fingerprint(tree())}
    assert len(set(prints.values())) == len(prints)


def test_zeros_of_either_sign_and_nans_of_different_payload_are_different_weights():
    bits = [0x00000000, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFC00000, 0x7F800001]
    values = np.array(bits, np.uint32).view(np.float32)
    for make in (np.asarray, jnp.asarray):
        assert len({fingerprint({"w": make(values[index : index + 1])}) for index in range(len(bits))}) == len(bits)


def test_wide_host_leaves_are_not_narrowed():
    # Equal once rounded to 32 bits, which is what JAX would do with them.
    one, other = np.array([1.0]), np.array([1.0 + 2**-40])
    assert np.float32(one) == np.float32(other)
    assert fingerprint({"w": one}) != fingerprint({"w": other})
    assert fingerprint({"w": np.array([1])}) != fingerprint({"w": np.array([1 + 2**32])})


@pytest.mark.parametrize(
    "leaf",
    [
        1.0,
        [1.0],
        np.ones(2, np.complex64),
        np.array(["a"]),
        np.array([None]),
        np.ones(2, ml_dtypes.int4),
        np.ones(2, np.longdouble),
        jax.random.key(0),
    ],
    ids=lambda leaf: f"{type(leaf).__name__}-{getattr(leaf, 'dtype', '')}",
)
def test_what_is_not_a_real_array_of_whole_bytes_is_refused_by_name(leaf):
    with pytest.raises(WeightsError, match=r"weights\['head'\] is"):
        fingerprint({"head": leaf})


def test_a_version_reads_as_its_run_step_and_fingerprints():
    assert str(WeightVersion("run", 3, "", "ab")) == "run@3:ab"
    assert str(WeightVersion("run", 3, "cd", "ab")) == "run@3:cd+ab"
    assert WeightVersion("run", 3, "", "ab") != WeightVersion("run", 3, "", "ac")
