"""How rows end, what is counted for them, and that no row depends on another. The models' answers are written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from contracts.errors import BatchValueError
from contracts.work import SamplerSettings
from pipeline.diffusion.blocks import BlockLayout
from pipeline.diffusion.decoding import decode
from pipeline.diffusion.keys import row_keys
from pipeline.diffusion.measures import decoding_statistics
from pipeline.models.config import DecoderConfig
from pipeline.models.decoder import Decoder, KeyValueCache

A, B, C, STOP, MASK, VOCAB, LENGTH = 0, 1, 2, 3, 4, 5, 16


class Scripted(Decoder):
    """Says at each position what the script says, whatever it sees. ``script``: position → (token, its probability)."""

    def __init__(self, script, otherwise=(A, 0.5)):
        self.config = DecoderConfig(VOCAB, LENGTH, 1, 1, 1, 2, 1)
        table = np.zeros((LENGTH, VOCAB), np.float32)
        for position in range(LENGTH):
            token, p = script.get(position, otherwise)
            table[position] = np.log((1 - p) / 3)
            table[position, token] = np.log(p)
            table[position, MASK] = 50.0  # The sampler must exclude it.
        self.table = nnx.Param(jnp.asarray(table))

    def extend(self, tokens_BS, ids_BS, cache, cache_ids):
        nothing = jnp.zeros((1, *tokens_BS.shape, 1, 2))
        return jax.nn.one_hot(ids_BS.positions_BL, LENGTH), KeyValueCache(nothing, nothing)

    def head(self, hidden):
        return hidden @ self.table[...]


def layout(alignment="same_position", origin="response", completion_length=8, block_size=4):
    return BlockLayout(block_size, origin, "causal", alignment, "clean", 4, completion_length, MASK)


def write(model, layout, sampler, prompts=((A, B),), stops=(STOP,), indices=None):
    tokens_BP = np.zeros((len(prompts), 4), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BP[row, : len(prompt)] = prompt
    keys = row_keys(0, 0, np.arange(len(prompts)) if indices is None else np.asarray(indices))
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    return jax.device_get(decode(model, tokens_BP, lengths, keys, layout, sampler, stops))


def completion(decoded, row=0, prompt=2):
    return decoded.tokens_BL[row, prompt : prompt + decoded.commit_step_BC.shape[1]].tolist()


THRESHOLD = SamplerSettings("threshold", 0.9)


def test_a_flood_of_confident_stops_does_not_end_a_row_before_what_precedes_them_is_resolved():
    flood = Scripted({2: (B, 0.5), 3: (C, 0.6), 4: (STOP, 0.99), 5: (STOP, 0.98)})
    decoded = write(flood, layout(), THRESHOLD)
    assert completion(decoded) == [B, C, STOP, STOP, MASK, MASK, MASK, MASK]
    assert decoded.commit_step_BC[0].tolist() == [2, 1, 0, 0, -1, -1, -1, -1]
    assert (decoded.length_B[0], decoded.truncated_B[0]) == (3, False)
    assert (decoded.forwards_B[0], decoded.commit_passes_B[0]) == (3, 0)


def test_a_stop_that_appears_to_the_left_of_the_first_one_takes_its_place():
    decoded = write(Scripted({2: (B, 0.5), 3: (STOP, 0.6), 5: (STOP, 0.99)}), layout(), SamplerSettings("static", 4.0))
    # The stop at 5 leaves 2, 3 and 4 open; the one at 3 leaves 2; 4 is as sure as 2 but stands right of 3.
    assert completion(decoded)[:4] == [B, STOP, MASK, STOP]
    assert decoded.commit_step_BC[0, :4].tolist() == [2, 1, -1, 0]
    assert (decoded.length_B[0], decoded.forwards_B[0]) == (2, 3)


def test_a_row_ends_at_its_stop_and_keeps_the_rest_of_the_block_as_it_was_seen():
    prefix = Scripted({2: (B, 0.95), 3: (STOP, 0.95)})
    decoded = write(prefix, layout(), SamplerSettings("prefix", 0.9))
    assert completion(decoded) == [B, STOP, MASK, MASK, MASK, MASK, MASK, MASK]
    assert (decoded.length_B[0], decoded.forwards_B[0], decoded.commit_passes_B[0]) == (2, 1, 0)
    assert not decoded.truncated_B[0]
    np.testing.assert_array_equal(decoded.log_prob_BC[0, 2:], 0)


def test_an_empty_completion_is_a_stop_alone_and_is_counted():
    decoded = write(Scripted({2: (STOP, 0.95)}), layout(), SamplerSettings("prefix", 0.9))
    assert decoded.length_B[0] == 1
    assert decoding_statistics(decoded)["empty"] == (1.0, 1.0)


def test_a_spent_budget_is_truncated_and_no_block_is_kept_after_the_last():
    decoded = write(Scripted({}), layout(completion_length=7), SamplerSettings("static", 2.0))
    assert completion(decoded) == [A] * 7
    assert (decoded.length_B[0], decoded.truncated_B[0]) == (7, True)
    assert (decoded.forwards_B[0], decoded.commit_passes_B[0]) == (4, 1)


def test_no_stop_ids_means_every_row_spends_its_budget():
    assert write(Scripted({2: (STOP, 0.99)}), layout(), THRESHOLD, stops=()).truncated_B[0]


def test_a_stop_id_inside_the_prompt_ends_nothing():
    decoded = write(Scripted({}), layout(origin="sequence"), THRESHOLD, prompts=((A, STOP),))
    assert (decoded.length_B[0], decoded.truncated_B[0]) == (8, True)
    assert decoded.tokens_BL[0, :10].tolist() == [A, STOP] + [A] * 8


def test_a_seed_that_stops_ends_its_row_at_once():
    # Shifted: the script's answer at i − 1 is token i; the second block of a two-token prompt starts at 6.
    decoded = write(Scripted({5: (STOP, 0.99)}), layout("shifted"), THRESHOLD)
    assert completion(decoded) == [A, A, A, A, STOP, MASK, MASK, MASK]
    assert decoded.commit_step_BC[0].tolist() == [0, 0, 1, 2, 0, -1, -1, -1]
    # Two seeds and three denoising steps; the pass over the first block is the second seed's forward.
    assert (decoded.length_B[0], decoded.forwards_B[0], decoded.commit_passes_B[0]) == (5, 5, 0)


@pytest.mark.parametrize("rule", ["threshold", "static", "factor", "prefix"])
def test_the_mask_is_in_no_output_and_no_block_takes_more_steps_than_slots(rule):
    sampler = SamplerSettings(rule, 3.0 if rule == "static" else 0.6, temperature=1.0)
    decoded = write(Scripted({}), layout(), sampler, prompts=((A,), (A, B), (A, B, C)), stops=())
    for row in range(3):
        assert MASK not in completion(decoded, row, row + 1)
    steps_BNS = decoded.commit_step_BC.reshape(3, 2, 4)
    np.testing.assert_array_equal(decoded.forwards_B, (steps_BNS.max(-1) + 1).sum(-1))
    assert (steps_BNS.max(-1) < (3 if rule == "static" else 4)).all()


DRAWN = SamplerSettings("threshold", 0.6, temperature=1.0)
PROMPTS = ((A, B), (C,), (A, B, C), (B, B, B, B))


def test_the_same_keys_give_the_same_tokens_in_any_slot_of_the_batch():
    drawn = write(Scripted({}), layout(), DRAWN, PROMPTS, indices=[4, 5, 6, 7])
    order = [2, 0, 3, 1]
    moved = write(Scripted({}), layout(), DRAWN, [PROMPTS[i] for i in order], indices=[4 + i for i in order])
    for name in drawn._fields:
        np.testing.assert_array_equal(getattr(moved, name), getattr(drawn, name)[order], err_msg=name)


def test_a_prompt_that_repeats_in_a_batch_is_drawn_independently():
    drawn = write(Scripted({}), layout(), DRAWN, ((A, B),) * 4)
    assert len({tuple(completion(drawn, row)) for row in range(4)}) > 1
    again = write(Scripted({}), layout(), DRAWN, ((A, B),) * 4, indices=[0, 0, 0, 0])
    assert len({tuple(completion(again, row)) for row in range(4)}) == 1


def test_a_row_alone_equals_the_row_in_a_padded_batch_and_ignores_its_padding():
    # Rows stop at different places, so that ended rows wait for the others.
    model = Scripted({6: (STOP, 0.7), 9: (STOP, 0.9)}, otherwise=(A, 0.4))
    together = write(model, layout(), DRAWN, PROMPTS)
    assert len(set(together.length_B.tolist())) > 1
    for row, prompt in enumerate(PROMPTS):
        alone = write(model, layout(), DRAWN, (prompt,), indices=[row])
        for name in together._fields:
            np.testing.assert_array_equal(getattr(alone, name)[0], getattr(together, name)[row], err_msg=name)
    tokens_BP = np.full((4, 4), STOP, np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens_BP[row, : len(prompt)] = prompt
    lengths = np.asarray([len(prompt) for prompt in PROMPTS], np.int32)
    padded = jax.device_get(decode(model, tokens_BP, lengths, row_keys(0, 0, np.arange(4)), layout(), DRAWN, (STOP,)))
    for name in together._fields:
        np.testing.assert_array_equal(getattr(padded, name), getattr(together, name), err_msg=name)


def test_a_block_limit_ends_every_row_there_without_another_program():
    arguments = np.zeros((1, 4), np.int32), np.asarray([2], np.int32), row_keys(0, 0, np.arange(1)), layout()
    limited = decode(Scripted({}), *arguments, SamplerSettings("static", 2.0), (STOP,), block_limit=1)
    assert (int(limited.length_B[0]), int(limited.forwards_B[0]), int(limited.commit_passes_B[0])) == (4, 2, 0)


def test_prompts_of_another_width_than_the_layouts_are_refused():
    keys = row_keys(0, 0, np.arange(1))
    with pytest.raises(BatchValueError, match=r"\[1, 3\].*\[B, 4\]"):
        decode(Scripted({}), np.zeros((1, 3), np.int32), np.asarray([2], np.int32), keys, layout(), THRESHOLD, (STOP,))
