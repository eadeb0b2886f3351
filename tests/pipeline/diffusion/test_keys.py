"""Every draw has a key of its own, and the key depends on what it should and on nothing else."""

import jax
import numpy as np
import pytest

from contracts.errors import BatchValueError
from pipeline.diffusion.keys import Purpose, evaluation_keys, fold, row_keys


def bits(keys):
    return [tuple(row) for row in np.asarray(jax.random.key_data(keys)).tolist()]


def test_a_row_has_the_same_key_in_any_slot_of_any_batch():
    one = bits(row_keys(3, 7, np.asarray([12])))
    many = bits(row_keys(3, 7, np.asarray([40, 2, 12, 9])))
    assert many[2] == one[0] and len(set(many)) == 4


def test_seed_step_and_stream_index_each_change_the_key_and_do_not_stand_in_for_one_another():
    keys = [bits(row_keys(*numbers, np.asarray([index])))[0] for *numbers, index in np.ndindex(3, 3, 3)]
    assert len(set(keys)) == 27


def test_numbers_beyond_32_bits_are_not_cut():
    high = 2**40
    assert bits(row_keys(high, 0, np.asarray([0]))) != bits(row_keys(0, 0, np.asarray([0])))
    assert bits(row_keys(0, 0, np.asarray([high + 5]))) != bits(row_keys(0, 0, np.asarray([5])))


@pytest.mark.parametrize("numbers", [(-1, 0, [0]), (0, -1, [0]), (0, 0, [3, -1]), (0, 0, [0.5]), (2**64, 0, [0])])
def test_a_number_that_is_no_count_is_refused(numbers):
    seed, step, indices = numbers
    with pytest.raises(BatchValueError, match=r"whole number in \[0, 2\^64\)"):
        row_keys(seed, step, np.asarray(indices))


def test_purpose_block_and_step_give_every_draw_its_own_key():
    keys_B = row_keys(0, 0, np.arange(2))
    draws = [
        key
        for purpose in Purpose
        for block, step in np.ndindex(3, 3)
        for key in bits(fold(keys_B, purpose, block, step))
    ]
    assert len(set(draws)) == len(draws) == 2 * len(Purpose) * 9


def test_traced_numbers_fold_like_plain_ones():
    keys_B = row_keys(0, 0, np.arange(2))
    traced = jax.jit(lambda block, step: fold(keys_B, Purpose.PROPOSAL, block, step))(4, 2)
    assert bits(traced) == bits(fold(keys_B, Purpose.PROPOSAL, 4, 2))


def test_no_key_of_a_measured_row_is_that_of_a_trained_row_or_of_one_of_its_draws():
    measured = set(bits(evaluation_keys(3, np.arange(8))))
    trained = [row_keys(3, step, np.arange(8)) for step in range(4)]
    draws = [fold(keys_B, int(purpose), block) for keys_B in trained for purpose in Purpose for block in range(3)]
    assert len(measured) == 8 and not measured & {key for keys_B in [*trained, *draws] for key in bits(keys_B)}
    assert set(bits(evaluation_keys(4, np.arange(8)))).isdisjoint(measured)
