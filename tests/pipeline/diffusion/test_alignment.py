import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import BatchValueError
from pipeline.diffusion.alignment import (
    causal_teacher_hidden,
    causal_teacher_logits,
    diffusion_teacher_logits,
    position_table,
)
from pipeline.diffusion.blocks import BlockLayout, window_positions
from pipeline.diffusion.keys import row_keys
from pipeline.diffusion.states import as_decoded, random_states, trajectory_states
from pipeline.diffusion.streams import student_logits_fn
from pipeline.models.config import DecoderConfig
from pipeline.models.decoder import Decoder
from pipeline.models.tree import parameters, with_parameters

CONFIG = DecoderConfig(
    vocab_size=10, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp_width=10, norm_eps=1e-3, rope_theta=30.0
)
MASK, ROWS, PROMPT = 10, 4, 4
LENGTHS = np.arange(1, PROMPT + 1)
LAYOUTS = {
    "response": BlockLayout(3, "response", "causal", "same_position", "clean", PROMPT, 7, MASK, True),
    "sequence": BlockLayout(3, "sequence", "causal", "shifted", "clean", PROMPT, 7, MASK, True),
}


@functools.cache
def build():
    blank = nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(5)
    draw = {name: rng.normal(1.0 if "norm" in name else 0.0, 0.4, x.shape) for name, x in parameters(blank).items()}
    return with_parameters(blank, {name: jnp.asarray(x, jnp.float32) for name, x in draw.items()})


@functools.cache
def teacher_of(origin):
    layout, model = LAYOUTS[origin], build()
    return jax.jit(lambda *arrays: causal_teacher_logits(model, *arrays, layout))


def draw_case(layout, seed):
    rng = np.random.default_rng(seed)
    tokens = jnp.asarray(rng.integers(0, 10, (ROWS, layout.length)), jnp.int32)
    ends = LENGTHS + rng.integers(1, layout.completion_length + 1, ROWS)
    valid = np.arange(layout.length) < ends[:, None]
    slots = np.asarray(window_positions(layout, jnp.asarray(LENGTHS, jnp.int32)))
    targets = (slots >= LENGTHS[:, None]) & (slots < ends[:, None])
    return tokens, jnp.asarray(valid), jnp.asarray(LENGTHS, jnp.int32), slots, targets


@pytest.mark.parametrize("origin", LAYOUTS)
def test_the_teacher_says_of_each_slot_what_a_causal_model_says_after_its_left_context(numpy_decoder, origin):
    tokens, valid, lengths, slots, targets = draw_case(LAYOUTS[origin], 0)
    logits = np.asarray(teacher_of(origin)(tokens, valid, lengths))
    for row, slot in np.argwhere(targets):
        before = np.asarray(tokens)[row, : slots[row, slot]]
        place = np.arange(len(before))
        expected = numpy_decoder(CONFIG, parameters(build()), before, place, place[None] <= place[:, None])
        np.testing.assert_allclose(logits[row, slot], expected[-1], atol=1e-5)


@pytest.mark.parametrize("origin", LAYOUTS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_the_target_of_a_slot_depends_on_tokens_before_it_only(origin, seed):
    tokens, valid, lengths, slots, targets = draw_case(LAYOUTS[origin], seed)
    before = np.asarray(teacher_of(origin)(tokens, valid, lengths))
    cut = np.random.default_rng(seed).integers(1, tokens.shape[1])
    changed = jnp.where(jnp.arange(tokens.shape[1])[None] >= cut, 9 - tokens, tokens)
    # Invalid columns change everywhere, before the cut too.
    after = np.asarray(teacher_of(origin)(jnp.where(valid, changed, 9 - tokens), valid, lengths))
    untouched = targets & (slots <= cut)
    np.testing.assert_array_equal(after[untouched], before[untouched])


@pytest.mark.parametrize("origin", LAYOUTS)
def test_physical_order_is_looked_up_never_assumed(origin):
    layout, model = LAYOUTS[origin], build()
    tokens, valid, lengths, _, targets = draw_case(layout, 1)
    order = np.random.default_rng(0).permutation(layout.length)
    positions = jnp.broadcast_to(jnp.asarray(order, jnp.int32)[None], tokens.shape)
    moved = jax.jit(lambda *arrays: causal_teacher_logits(model, *arrays[:3], layout, arrays[3]))(
        tokens[:, order], valid[:, order], lengths, positions
    )
    expected = np.asarray(teacher_of(origin)(tokens, valid, lengths))
    np.testing.assert_allclose(np.asarray(moved)[targets], expected[targets], atol=1e-5)


def test_a_slot_whose_left_neighbour_is_missing_gets_zeros_not_a_wrapped_column():
    layout, model = LAYOUTS["sequence"], build()
    tokens, valid, lengths, slots, _ = draw_case(layout, 2)
    hidden = np.asarray(jax.jit(lambda *arrays: causal_teacher_hidden(model, *arrays, layout))(tokens, valid, lengths))
    known = (slots > 0) & np.take_along_axis(np.asarray(valid), np.clip(slots - 1, 0, layout.length - 1), axis=1)
    known &= slots < layout.length
    assert (slots == 0).any()
    np.testing.assert_array_equal(hidden[~known], 0)
    assert (np.abs(hidden[known]).max(-1) > 0).all()


def test_pads_are_dropped_from_the_position_table():
    positions = jnp.array([[2, 0, 1, -1, 7], [0, -1, -1, -1, -1]], jnp.int32)
    valid = jnp.array([[True, True, True, True, True], [True, False, False, False, False]])
    np.testing.assert_array_equal(position_table(positions, valid, 4), [[1, 2, 0, 5], [0, 5, 5, 5]])


class Recital(Decoder):
    """Knows one string by heart: at position q it is sure of the token at q + ahead, whatever it reads."""

    def __init__(self, string, ahead, vocab_size):
        self.config = replace(CONFIG, vocab_size=vocab_size, width=vocab_size)
        self.string = nnx.data(jnp.asarray(string, jnp.int32))
        self.ahead = ahead

    def hidden(self, tokens_BL, ids, *, outputs_from=0):
        wanted = ids.positions_BL[:, outputs_from:] + self.ahead
        # Past its end the string has no token, and a wrong one must show.
        known = jnp.concatenate([self.string, jnp.full((8,), self.config.vocab_size - 2, jnp.int32)])
        return 100.0 * jax.nn.one_hot(known[wanted], self.config.width, dtype=jnp.float32)

    def head(self, hidden):
        return hidden


@pytest.mark.parametrize("alignment", ["same_position", "shifted"])
@pytest.mark.parametrize("origin", ["response", "sequence"])
@pytest.mark.parametrize(("size", "completion"), [(1, 4), (3, 7)])
def test_a_teacher_sure_of_a_string_costs_nothing_to_a_student_that_knows_it(origin, alignment, size, completion):
    layout = BlockLayout(size, origin, "causal", alignment, "clean", PROMPT, completion, MASK, True)
    string = np.random.default_rng(size).permutation(np.arange(layout.length) % 9)
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    tokens = jnp.broadcast_to(jnp.asarray(string, jnp.int32)[None], (ROWS, layout.length))
    # The stop falls anywhere from the first slot to the last.
    decoded = as_decoded(layout, tokens, lengths, jnp.asarray([1, completion, completion - 1, 2], jnp.int32))

    @jax.jit
    def run(decoded, keys):
        results = []
        for batch in (trajectory_states(decoded, lengths, keys, layout), random_states(decoded, lengths, keys, layout)):
            inputs = batch.model_inputs
            student = student_logits_fn(layout)(Recital(string, 1 if alignment == "shifted" else 0, MASK + 1), inputs)
            sequence = inputs["clean_tokens"], inputs["clean_valid"], inputs["prompt_lengths"]
            teacher = causal_teacher_logits(Recital(string, 1, MASK), *sequence, layout)
            p, q = jax.nn.log_softmax(teacher), jax.nn.log_softmax(student)
            results.append((batch, teacher, jnp.sum(jnp.exp(p) * (p - q), axis=-1)))
        return results

    slots = np.asarray(window_positions(layout, lengths))
    seen = np.zeros((ROWS, layout.window), bool)
    for seed in range(6):
        for batch, teacher, divergence in run(decoded, row_keys(seed, 0, np.arange(ROWS))):
            active = np.asarray(batch.loss_weights) > 0
            assert active.any(axis=1).all()
            np.testing.assert_allclose(np.asarray(divergence)[active], 0, atol=1e-6)
            np.testing.assert_array_equal(np.argmax(teacher, -1)[active], np.asarray(batch.target_ids)[active])
            seen |= active
    ends = LENGTHS + np.asarray(decoded.length_B)
    np.testing.assert_array_equal(seen, (slots >= LENGTHS[:, None]) & (slots < ends[:, None]))


def test_an_appended_mask_must_lie_one_past_the_causal_teachers_head():
    layout = replace(LAYOUTS["response"], mask_id=11)
    arrays = draw_case(layout, 0)[:3]
    with pytest.raises(BatchValueError, match="teacher's head has 10 columns, the student's loss vocabulary 11"):
        jax.eval_shape(lambda *arrays: causal_teacher_logits(build(), *arrays, layout), *arrays)


def test_a_reserved_mask_is_dropped_on_both_sides():
    layout, model = replace(LAYOUTS["response"], mask_id=6, mask_appended=False), build()
    tokens, _, lengths, _, _ = draw_case(layout, 3)

    @jax.jit
    def both(keys):
        batch = random_states(as_decoded(layout, tokens, lengths, lengths + 2), lengths, keys, layout)
        inputs = batch.model_inputs
        teacher = causal_teacher_logits(model, inputs["clean_tokens"], inputs["clean_valid"], lengths, layout)
        return teacher, student_logits_fn(layout)(model, inputs), diffusion_teacher_logits(model, inputs, layout)

    teacher, student, twin = both(row_keys(0, 0, np.arange(ROWS)))
    assert teacher.shape == student.shape
    for logits in (teacher, student):
        np.testing.assert_array_equal(np.isneginf(logits), np.broadcast_to(np.arange(10) == 6, logits.shape))
    np.testing.assert_array_equal(twin, student)
