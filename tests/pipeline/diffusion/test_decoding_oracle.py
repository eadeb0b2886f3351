"""Cached decoding against the full canvas, against plain autoregression, and against a float64 decoder."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from contracts.work import SamplerSettings
from pipeline.diffusion import decoding
from pipeline.diffusion.blocks import BlockLayout
from pipeline.diffusion.decoding import cache_lengths, decode, decode_blocks
from pipeline.diffusion.keys import Purpose, fold, row_keys
from pipeline.diffusion.uncached import decode_uncached
from pipeline.models.attention import causal_ids, visible
from pipeline.models.config import DecoderConfig
from pipeline.models.decoder import Decoder, KeyValueCache
from pipeline.models.tree import parameters

VOCAB, MASK, P = 12, 11, 6
STOPS, NO_STOPS = (3, 5), (90, 91)  # As many of each: their number decides the compiled program.
PROMPTS_BP = np.random.default_rng(0).integers(0, VOCAB - 1, (P, P)).astype(np.int32)
LENGTHS_B = np.arange(1, P + 1, dtype=np.int32)  # Every residue of the block sizes below.
KEYS_B = row_keys(3, 5, np.arange(P))
RULES = (("threshold", 0.5), ("static", 2.0), ("factor", 1.0), ("prefix", 0.4))
DRAWN = SamplerSettings("threshold", 0.5, temperature=0.8)


def decoder():
    """A model that is sure of something: its logits are scaled up from the start's near-uniform ones."""
    model = Decoder(DecoderConfig(VOCAB, 16, 2, 2, 1, 8, 24), nnx.Rngs(0))
    model.norm.scale[...] = model.norm.scale[...] * 3.0
    return model


class Pooling(Decoder):
    """Averages what it may see: compiles fast, and notices a wrong token, place, mask or cached column."""

    def __init__(self):
        self.config = DecoderConfig(VOCAB, 16, 1, 1, 1, 16, 1)
        table, out = np.random.default_rng(1).normal(size=(2, VOCAB, 16)).astype(np.float32)
        self.table, self.out = nnx.Param(jnp.asarray(table)), nnx.Param(jnp.asarray(out.T))

    def hidden(self, tokens_BL, ids, *, outputs_from=0):
        values = self._values(tokens_BL, ids)
        return self._pool(ids, (values, ids))

    def extend(self, tokens_BS, ids_BS, cache, cache_ids):
        values = self._values(tokens_BS, ids_BS)
        kept = values[None, :, :, None]
        return self._pool(ids_BS, (cache.values[0][:, :, 0], cache_ids), (values, ids_BS)), KeyValueCache(kept, kept)

    def head(self, hidden):
        return hidden @ self.out[...]

    def _values(self, tokens, ids):
        return self.table[...][tokens] * (1 + self._phase(ids))

    def _phase(self, ids):
        return jnp.cos(ids.positions_BL[:, :, None].astype(jnp.float32) * jnp.arange(1.0, 17.0)[None, None])

    def _pool(self, ids, *sources):
        sees = [visible(ids, source_ids).astype(jnp.float32) for _, source_ids in sources]
        total = sum(mask @ values for mask, (values, _) in zip(sees, sources, strict=True))
        count = sum(mask.sum(-1, keepdims=True) for mask in sees)
        return 2 * total / jnp.maximum(count, 1) + self._phase(ids)


MODEL, POOLING = decoder(), Pooling()


def layout(alignment, block_size, origin, prompt_attention, completion_length):
    mask = None if (alignment, block_size) == ("shifted", 1) else MASK
    return BlockLayout(block_size, origin, prompt_attention, alignment, "clean", P, completion_length, mask)


LAYOUTS = {
    "same position, response": layout("same_position", 4, "response", "causal", 10),
    "same position, response, full prompt": layout("same_position", 4, "response", "full", 10),
    "same position, sequence": layout("same_position", 4, "sequence", "causal", 10),
    "shifted, response": layout("shifted", 3, "response", "causal", 10),
    "shifted, sequence": layout("shifted", 3, "sequence", "causal", 10),
    "causal": layout("shifted", 1, "response", "causal", 7),
}


def run(model, layout, sampler, stops=STOPS, oracle=False):
    function = decode_uncached if oracle else decode
    return jax.device_get(function(model, PROMPTS_BP, LENGTHS_B, KEYS_B, layout, sampler, stops))


def assert_equal(cached, oracle):
    for name in ("tokens_BL", "commit_step_BC", "length_B", "truncated_B", "forwards_B"):
        np.testing.assert_array_equal(getattr(cached, name), getattr(oracle, name), err_msg=name)
    np.testing.assert_allclose(cached.log_prob_BC, oracle.log_prob_BC, atol=2e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_cached_decoding_equals_the_full_canvas_for_every_rule(name):
    for rule, value in RULES:
        sampler = SamplerSettings(rule, value, temperature=0.8)
        assert_equal(run(MODEL, LAYOUTS[name], sampler), run(MODEL, LAYOUTS[name], sampler, oracle=True))


def test_greedy_cached_decoding_equals_the_full_canvas_for_every_rule():
    for rule, value in RULES:
        cached = run(MODEL, LAYOUTS["same position, response"], SamplerSettings(rule, value))
        assert_equal(cached, run(MODEL, LAYOUTS["same position, response"], SamplerSettings(rule, value), oracle=True))


@pytest.mark.parametrize("alignment", ["same_position", "shifted"])
@pytest.mark.parametrize("origin", ["response", "sequence"])
@pytest.mark.parametrize("completion_length", [1, 2, 5])
def test_every_prompt_and_completion_length_modulo_the_block_decodes(alignment, origin, completion_length):
    residues = layout(alignment, 2, origin, "causal", completion_length)
    cached = run(POOLING, residues, SamplerSettings("prefix", 0.5), NO_STOPS)
    assert_equal(cached, run(POOLING, residues, SamplerSettings("prefix", 0.5), NO_STOPS, oracle=True))
    assert (cached.length_B == completion_length).all() and (cached.commit_step_BC >= 0).all()


def test_a_cache_that_grows_in_stages_decodes_the_same(monkeypatch):
    grown = layout("same_position", 2, "sequence", "causal", 13)
    monkeypatch.setattr(decoding, "SHORTEST_CACHE", 2)
    assert cache_lengths(grown) == (9, 18)
    sampler = SamplerSettings("threshold", 0.5)
    cached = run(POOLING, grown, sampler, NO_STOPS)
    assert_equal(cached, run(POOLING, grown, sampler, NO_STOPS, oracle=True))


def test_cache_stages_double_and_end_where_the_last_block_begins():
    assert cache_lengths(BlockLayout(4, "response", "causal", "same_position", "clean", 16, 64, 0)) == (76,)
    long = cache_lengths(BlockLayout(4, "response", "causal", "same_position", "clean", 16, 1024, 0))
    assert long == (130, 259, 518, 1036)
    assert cache_lengths(BlockLayout(8, "response", "causal", "same_position", "clean", 900, 512, 0)) == (1404,)


def test_a_causal_student_samples_like_a_plain_autoregressive_loop():
    model = jax.jit(MODEL)
    causal = run(MODEL, LAYOUTS["causal"], SamplerSettings("threshold", 0.9, temperature=1.0), stops=NO_STOPS)
    for row, prompt in enumerate(LENGTHS_B.tolist()):
        tokens = np.zeros((1, P + 7), np.int32)
        tokens[0, :prompt] = PROMPTS_BP[row, :prompt]
        positions = jnp.arange(P + 7)[None]
        for c in range(7):
            logits = model(jnp.asarray(tokens), causal_ids(positions, positions < prompt + c))[0, prompt + c - 1]
            key = fold(KEYS_B, Purpose.SEED, c, 0)[row]
            tokens[0, prompt + c] = jnp.argmax(logits + jax.random.gumbel(key, (1, VOCAB), jnp.float32)[0])
        np.testing.assert_array_equal(causal.tokens_BL[row, prompt : prompt + 7], tokens[0, prompt : prompt + 7])
    np.testing.assert_array_equal(causal.forwards_B, 7)
    np.testing.assert_array_equal(causal.commit_passes_B, 0)


@pytest.mark.parametrize("name", ["same position, response", "shifted, sequence"])
def test_recorded_log_probabilities_are_those_of_the_canvas_that_was_decided_on(name, numpy_decoder):
    layout = LAYOUTS[name]
    decoded = run(MODEL, layout, DRAWN, stops=NO_STOPS)
    weights, size = parameters(MODEL), layout.block_size
    shift = 1 if layout.alignment == "shifted" else 0
    for row, prompt in ((1, 2), (4, 5)):
        origin = prompt if layout.origin == "response" else 0
        for c in range(layout.completion_length):
            i, step = prompt + c, decoded.commit_step_BC[row, c]
            first = (i - origin) // size * size + origin
            seed = shift and i == first
            last = first if seed else min(first + size, prompt + layout.completion_length)
            tokens = decoded.tokens_BL[row, :last].copy()
            for j in range(max(first, prompt), last):
                is_seed = shift and j == first
                if not is_seed and decoded.commit_step_BC[row, j - prompt] >= step:
                    tokens[j] = MASK
            block = (np.arange(last) - origin) // size
            # A causal prompt sees only to its left; blocks see themselves and everything before.
            sees = block[:, None] >= block[None, :]
            if layout.origin == "response":
                sees[:prompt, :prompt] = np.tri(prompt, dtype=bool)
                sees[:prompt, prompt:] = False
            logits = numpy_decoder(MODEL.config, weights, tokens, np.arange(last), sees)[i - shift] / 0.8
            odds = np.exp(np.delete(logits, MASK))
            expected = logits[decoded.tokens_BL[row, i]] - np.log(odds.sum())
            assert decoded.log_prob_BC[row, c] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["same position, response", "shifted, sequence"])
def test_watching_step_by_step_ends_with_what_decode_returns_and_never_changes_a_committed_token(name):
    arguments = (POOLING, PROMPTS_BP, LENGTHS_B, KEYS_B, LAYOUTS[name], SamplerSettings("threshold", 0.5), STOPS)
    whole = jax.device_get(decode(*arguments))
    steps = [jax.device_get(canvas) for canvas in decode_blocks(*arguments)]
    blocks = [jax.device_get(canvas) for canvas in decode_blocks(*arguments, every="block")]
    for watched in (steps[-1], blocks[-1]):
        assert_equal(watched, whole)
        np.testing.assert_array_equal(watched.commit_passes_B, whole.commit_passes_B)
    assert len(blocks) < len(steps)
    columns_BC = LENGTHS_B[:, None] + np.arange(LAYOUTS[name].completion_length)
    for before, after in itertools.pairwise(steps):
        kept = before.commit_step_BC >= 0
        old, new = (np.take_along_axis(canvas.tokens_BL, columns_BC, 1) for canvas in (before, after))
        np.testing.assert_array_equal(old[kept], new[kept])
        np.testing.assert_array_equal(before.commit_step_BC[kept], after.commit_step_BC[kept])
