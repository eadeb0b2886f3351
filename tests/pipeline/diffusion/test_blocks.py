import jax.numpy as jnp
import numpy as np
import pytest

from contracts.errors import ConfigError
from pipeline.diffusion.blocks import (
    BlockLayout,
    block_ids,
    columns,
    sequence_ids,
    window_ids,
    window_positions,
    window_starts,
)
from pipeline.models.conversion import Append, Reserved

SETTINGS = {
    "block_size": 3,
    "origin": "response",
    "prompt_attention": "causal",
    "alignment": "same_position",
    "context": "clean",
    "prompt_length": 4,
    "completion_length": 5,
    "mask_id": 9,
}


def layout_of(**change):
    return BlockLayout(**{**SETTINGS, **change})


@pytest.mark.parametrize(
    ("change", "blocks"),
    [
        ({}, [-4, -3, -2, -1, 0, 0, 0, 1, 1]),
        ({"prompt_attention": "full"}, [-1, -1, -1, -1, 0, 0, 0, 1, 1]),
        ({"origin": "sequence"}, [0, 0, 0, 1, 1, 1, 2, 2, 2]),
    ],
)
def test_blocks_are_counted_from_their_origin(change, blocks):
    layout = layout_of(**change)
    ids = block_ids(layout, columns(layout, 1), jnp.array([4], jnp.int32))
    np.testing.assert_array_equal(ids, [blocks])


def test_a_shorter_prompt_moves_the_blocks_of_its_own_row_only():
    layout = layout_of()
    ids = block_ids(layout, columns(layout, 2), jnp.array([1, 4], jnp.int32))
    np.testing.assert_array_equal(ids, [[-1, 0, 0, 0, 1, 1, 1, 2, 2], [-4, -3, -2, -1, 0, 0, 0, 1, 1]])


@pytest.mark.parametrize("prompt", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("origin", ["response", "sequence"])
def test_the_window_starts_with_a_block_and_holds_every_completion_slot(origin, size, prompt):
    layout = layout_of(block_size=size, origin=origin)
    lengths_B = jnp.array([prompt], jnp.int32)
    positions = np.asarray(window_positions(layout, lengths_B))[0]
    assert positions[0] == window_starts(layout, lengths_B)[0]
    assert positions[0] <= prompt < positions[0] + size
    assert (positions[0] - (prompt if origin == "response" else 0)) % size == 0
    assert {*range(prompt, prompt + 5)} <= {*positions.tolist()}
    blocks = np.asarray(block_ids(layout, jnp.asarray(positions)[None], lengths_B))[0]
    np.testing.assert_array_equal(blocks - blocks[0], np.arange(layout.window) // size)
    assert layout.max_blocks == blocks[-1] - blocks[0] + 1


def test_ids_say_which_stream_and_hide_what_is_invalid():
    layout = layout_of()
    lengths_B = jnp.array([2], jnp.int32)
    clean = sequence_ids(layout, lengths_B, jnp.arange(9)[None] < 4)
    noisy = window_ids(layout, lengths_B, jnp.arange(5)[None] < 3)
    np.testing.assert_array_equal(clean.segments_BL, [[1, 1, 1, 1, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(noisy.segments_BL, [[1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(noisy.positions_BL, [[2, 3, 4, 5, 6]])
    assert not np.any(clean.streams_BL)
    assert np.all(np.asarray(noisy.streams_BL) == 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"completion_length": 0}, "completion_length must be at least 1"),
        ({"prompt_length": 0}, "prompt_length must be at least 1"),
        ({"origin": "sequence", "prompt_attention": "full"}, "no meaning with origin='sequence'"),
        ({"mask_id": None}, "alignment='same_position' with block_size=3 needs a mask id"),
        ({"mask_id": None, "alignment": "shifted"}, "alignment='shifted' with block_size=3 needs a mask id"),
        ({"mask_id": None, "block_size": 1}, "needs a mask id"),
        ({"mask_id": -1}, "mask_id must be nonnegative, got -1"),
    ],
)
def test_a_layout_that_no_rollout_produces_is_refused(change, words):
    with pytest.raises(ConfigError, match=words):
        layout_of(**change)


def test_only_a_causal_student_does_without_a_mask():
    assert layout_of(alignment="shifted", block_size=1, mask_id=None).mask is None
    assert layout_of(mask_appended=True).mask == Append()
    assert layout_of().mask == Reserved(9)
