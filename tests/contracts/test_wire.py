"""The form in which arrays travel: bit exact, plain numpy, without copies where there need be none."""

import pickle

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from contracts.errors import WeightsError
from contracts.wire import WireArray, content_digest, decode, decode_tree, encode, encode_tree

PLAIN = (np.bool_, np.int8, np.uint16, np.int32, np.int64, np.float16, np.float32, np.float64)
EXTENSION = (
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2fnuz,
    ml_dtypes.float8_e4m3b11fnuz,
)
UNSIGNED = {1: np.uint8, 2: np.uint16}


@st.composite
def arrays(draw):
    """Any bits, NaN payloads included, of any dtype that travels; any shape from no axis and no element on."""
    dtype = np.dtype(draw(st.sampled_from(PLAIN + EXTENSION)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    if dtype.kind == "b":
        return draw(hnp.arrays(dtype, shape))
    raw = draw(st.binary(min_size=(size := int(np.prod(shape)) * dtype.itemsize), max_size=size))
    return np.frombuffer(raw, dtype).reshape(shape)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@given(arrays())
def test_an_array_arrives_bit_for_bit(array):
    wire = encode(array)
    assert same(decode(wire), array)
    assert wire.bits.dtype.kind in "biuf" and wire.bits.flags.c_contiguous
    assert (wire.shape, wire.nbytes, wire.dtype) == (array.shape, array.nbytes, array.dtype.name)


@given(arrays())
def test_it_survives_the_trip_to_another_process(array):
    assert same(decode(pickle.loads(pickle.dumps(encode(array)))), array)


@pytest.mark.parametrize("dtype", EXTENSION, ids=lambda dtype: np.dtype(dtype).name)
def test_every_bit_pattern_of_a_narrow_float_is_kept(dtype):
    width = np.dtype(dtype).itemsize
    every = np.arange(256**width, dtype=UNSIGNED[width]).view(dtype)
    np.testing.assert_array_equal(encode(every).bits, np.arange(256**width))
    assert same(decode(encode(every)), every)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_contiguous_arrays_are_neither_copied_to_be_sent_nor_to_be_read(dtype):
    array = np.ones((3, 4), dtype)
    wire = encode(array)
    assert np.shares_memory(wire.bits, array) and np.shares_memory(decode(wire), array)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_read_only_memory_stays_read_only(dtype):
    array = np.ones((3, 4), dtype)
    array.flags.writeable = False
    assert not encode(array).bits.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        decode(encode(array))[0, 0] = 2


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("turn", [np.transpose, np.asfortranarray, lambda array: array[:, ::2]])
def test_arrays_of_any_memory_order_are_sent_in_rows(dtype, turn):
    array = turn(np.arange(12).astype(dtype).reshape(3, 4))
    assert encode(array).bits.flags.c_contiguous
    assert same(decode(encode(array)), np.ascontiguousarray(array))


def test_narrow_floats_travel_out_of_band_as_they_would_not_by_themselves():
    def outside(value) -> int:
        buffers = []
        pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return sum(buffer.raw().nbytes for buffer in buffers)

    array = np.ones(1000, ml_dtypes.bfloat16)
    assert outside(encode(array)) == array.nbytes
    assert outside(array) == 0


def test_jax_arrays_are_sent_like_their_numpy_twins():
    for dtype in (jnp.float32, jnp.bfloat16, jnp.bool_, jnp.int32):
        array = jnp.arange(6).astype(dtype).reshape(2, 3)
        assert same(decode(encode(array)), np.asarray(array))


def test_a_tree_arrives_whole_and_in_the_order_of_its_names():
    tree = {"b": np.ones(2, ml_dtypes.bfloat16), "a": np.arange(3), "c": np.float32(1.5)}
    arrived = decode_tree(encode_tree(tree))
    assert list(arrived) == ["a", "b", "c"]
    assert all(same(arrived[name], np.asarray(tree[name])) for name in tree)


@pytest.mark.parametrize(
    "array",
    [np.ones(2, np.complex64), np.array(["a"]), np.array([{}]), np.ones(2, ml_dtypes.int4), np.array([], "M8[s]")],
    ids=lambda array: str(array.dtype),
)
def test_what_is_neither_real_nor_boolean_is_refused(array):
    with pytest.raises(WeightsError, match="only real and boolean arrays can be sent"):
        encode(array)


@pytest.mark.parametrize(
    "wire",
    [
        WireArray(np.ones(2, np.float32), "float64"),
        WireArray(np.ones(2, np.uint16), "float16"),
        # A view as bfloat16 would be twice as long.
        WireArray(np.ones(2, np.uint32), "bfloat16"),
        WireArray(np.ones(2, np.int8), "float8_e5m2"),
        WireArray(np.ones(2, np.uint8), "float8_unheard_of"),
    ],
    ids=lambda wire: f"{wire.dtype}-as-{wire.bits.dtype}",
)
def test_bits_of_another_dtype_than_stated_are_refused(wire):
    with pytest.raises(WeightsError, match=f"says dtype {wire.dtype} but carries {wire.bits.dtype}"):
        decode(wire)


def test_a_digest_depends_on_names_dtypes_shapes_and_every_bit_and_on_nothing_else():
    base = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.zeros(2, ml_dtypes.bfloat16)}
    digest = content_digest(base)
    assert len(digest) == 32 and int(digest, 16) >= 0
    assert content_digest(dict(reversed(base.items()))) == digest
    assert content_digest(base | {"x": np.asfortranarray(base["x"])}) == digest
    assert content_digest({name: jnp.asarray(array) for name, array in base.items()}) == digest
    edits = [
        base | {"x": base["x"].reshape(3, 2)},
        base | {"x": base["x"].view(np.int32)},
        base | {"x": base["x"][::-1]},
        base | {"y": np.zeros(2, np.uint16)},
        base | {"y": -np.zeros(2, ml_dtypes.bfloat16)},
        {"z": base["x"], "y": base["y"]},
        {"x": base["x"]},
        base | {"none": np.zeros((0,))},
        base | {"none": np.zeros((0, 2))},
    ]
    digests = {content_digest(edit) for edit in edits}
    assert len(digests) == len(edits) and digest not in digests


@given(st.integers(0, 47), st.integers(0, 7))
def test_any_flipped_bit_changes_the_digest(byte, bit):
    raw = np.arange(48, dtype=np.uint8)
    flipped = raw.copy()
    flipped[byte] ^= np.uint8(1 << bit)
    assert content_digest({"x": flipped}) != content_digest({"x": raw})
