"""A completion being written, as `limbeck generate` draws it."""

from types import SimpleNamespace

import numpy as np
import pytest

from launch.canvas import MASK, STOP, completion, draw, row_of

STOP_ID = 9
LAYOUT = SimpleNamespace(block_size=2, origin="response")


def letters(ids) -> str:
    return "".join("abcdefgh"[index] for index in ids)


def canvas(tokens, steps, length, truncated, forwards=1):
    """A `Decoded` of one row whose prompt has two tokens."""
    return SimpleNamespace(
        tokens_BL=np.array([[0, 0, *tokens]]),
        commit_step_BC=np.array([steps]),
        length_B=np.array([length]),
        truncated_B=np.array([truncated]),
        forwards_B=np.array([forwards]),
    )


def drawn(decoded, before=None) -> str:
    return draw(row_of("p:", decoded, 0, 2, LAYOUT, before), letters, (STOP_ID,)).plain


@pytest.mark.parametrize(
    ("tokens", "steps", "length", "truncated", "text"),
    [
        # Nothing yet: the first block is masks, later ones have not begun.
        ([7, 7, 7, 7], [-1, -1, -1, -1], 0, True, f"p:{MASK}{MASK}"),
        ([7, 1, 7, 7], [-1, 0, -1, -1], 1, True, f"p:{MASK}b"),
        ([0, 1, 7, 3], [1, 0, -1, 0], 3, True, f"p:ab{MASK}d"),
        # A stop token with a mask to its left does not end the row.
        ([7, STOP_ID, 7, 7], [-1, 0, -1, -1], 2, False, f"p:{MASK}{STOP}"),
        # What was committed after a stop token is no part of the completion.
        ([0, STOP_ID, 2, 7], [0, 0, 0, -1], 2, False, f"p:a{STOP}"),
    ],
)
def test_a_row_shows_what_is_written_so_far(tokens, steps, length, truncated, text):
    assert drawn(canvas(tokens, steps, length, truncated)) == text


def test_what_the_last_step_committed_is_fresh():
    first = row_of("p:", canvas([7, 1, 7, 7], [-1, 0, -1, -1], 1, True), 0, 2, LAYOUT, None)
    second = row_of("p:", canvas([0, 1, 7, 7], [1, 0, -1, -1], 2, True), 0, 2, LAYOUT, first)
    assert (first.fresh, second.fresh) == ({1}, {0})


def test_the_finished_completion_is_without_its_stop_token():
    row = row_of("p:", canvas([0, 1, STOP_ID, 7], [0, 1, 0, -1], 3, False, forwards=2), 0, 2, LAYOUT, None)
    assert completion(row, letters, (STOP_ID,)) == "ab"
    assert (row.tokens, row.forwards, row.truncated) == (3, 2, False)


@pytest.mark.parametrize(
    ("prompt_length", "steps", "cells"),
    [
        # Blocks are [p p p c] [c c c c]: nothing yet, the first block done, one slot of the second.
        (3, [-1, -1, -1, -1, -1], 1),
        (3, [0, -1, -1, -1, -1], 1),
        (3, [0, -1, 0, -1, -1], 5),
        # A prompt that ends with its block.
        (4, [-1, -1, -1, -1, -1], 4),
        (4, [0, 0, 0, 0, -1], 4),
    ],
)
def test_blocks_that_are_counted_from_the_start_of_the_sequence_begin_inside_the_prompt(prompt_length, steps, cells):
    decoded = SimpleNamespace(
        tokens_BL=np.zeros((1, prompt_length + 5), int),
        commit_step_BC=np.array([steps]),
        length_B=np.array([sum(step >= 0 for step in steps)]),
        truncated_B=np.array([True]),
        forwards_B=np.array([1]),
    )
    layout = SimpleNamespace(block_size=4, origin="sequence")
    assert len(row_of("p:", decoded, 0, prompt_length, layout, None).slots) == cells
