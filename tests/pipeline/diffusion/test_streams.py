import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import BatchValueError
from pipeline.diffusion.blocks import BlockLayout
from pipeline.diffusion.streams import loss_head, loss_logits, student_hidden_fn, student_logits_fn, two_stream_inputs
from pipeline.models import attention
from pipeline.models.config import DecoderConfig
from pipeline.models.decoder import Decoder
from pipeline.models.tree import parameters, with_parameters

CONFIG = DecoderConfig(
    vocab_size=11, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp_width=10, norm_eps=1e-3, rope_theta=30.0
)
MASK = 10
ROWS = PROMPT = 4
LENGTHS = np.arange(1, PROMPT + 1)
"""One row per prompt length, so that every remainder by every block size is there."""


@functools.cache
def build(config=CONFIG):
    blank = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(11)
    draw = {name: rng.normal(1.0 if "norm" in name else 0.0, 0.4, x.shape) for name, x in parameters(blank).items()}
    return with_parameters(blank, {name: jnp.asarray(x, jnp.float32) for name, x in draw.items()})


def layout_of(block_size, completion, origin, alignment, prompt_attention="causal", context="clean"):
    return BlockLayout(block_size, origin, prompt_attention, alignment, context, PROMPT, completion, MASK, True)


SHAPES = [(1, 2), (2, 4), (2, 5), (3, 6), (3, 7), (3, 8)]
"""(block size, completion length): every remainder of the completion by the block."""
LAYOUTS = [
    *(layout_of(*shape, "response", "same_position") for shape in SHAPES),
    *(layout_of(*shape, "sequence", "shifted") for shape in SHAPES),
    *(layout_of(*shape, "response", "shifted") for shape in ((1, 2), (3, 7))),
    layout_of(3, 7, "sequence", "same_position"),
    *(layout_of(3, 7, "response", way, "full") for way in ("same_position", "shifted")),
]
FEW = [layout for layout in LAYOUTS if layout.completion_length == 7 and layout.prompt_attention == "causal"]


def name_of(layout):
    return (
        f"{layout.origin}-{layout.alignment}-{layout.prompt_attention}-{layout.block_size}-{layout.completion_length}"
    )


@functools.cache
def scorer(layout):
    return jax.jit(lambda model, inputs: student_logits_fn(layout)(model, inputs))


def draw_case(layout, seed):
    """A ragged batch, made slot by slot: completions of any length, canvases with masks anywhere but on seeds."""
    rng = np.random.default_rng(seed)
    size, budget = layout.block_size, layout.completion_length
    case = SimpleNamespace(
        clean=rng.integers(0, 10, (ROWS, layout.length)),
        noisy=rng.integers(0, 10, (ROWS, layout.window)),
        clean_valid=np.zeros((ROWS, layout.length), bool),
        noisy_valid=np.zeros((ROWS, layout.window), bool),
        starts=np.zeros(ROWS, int),
        ends=np.zeros(ROWS, int),
    )
    for row, p in enumerate(LENGTHS):
        start = case.starts[row] = p if layout.origin == "response" else p // size * size
        end = case.ends[row] = p + rng.integers(1, budget + 1)
        case.clean_valid[row, :end] = True
        for slot in range(layout.window):
            position = start + slot
            case.noisy_valid[row, slot] = position < p + budget and slot // size <= (end - 1 - start) // size
            if position < p:
                case.noisy[row, slot] = case.clean[row, position]
            elif layout.alignment == "shifted" and slot % size == 0:
                case.noisy[row, slot] = case.clean[row, position] if position < end else 0
            elif rng.random() < 0.6:
                case.noisy[row, slot] = MASK
    return case


def inputs_of(case):
    return two_stream_inputs(
        clean_tokens_BL=jnp.asarray(case.clean, jnp.int32),
        clean_valid_BL=jnp.asarray(case.clean_valid),
        noisy_tokens_BW=jnp.asarray(case.noisy, jnp.int32),
        noisy_valid_BW=jnp.asarray(case.noisy_valid),
        prompt_lengths_B=jnp.asarray(LENGTHS, jnp.int32),
    )


def generated(layout, case):
    """Slots that can have a loss: completion slots of blocks that were reached."""
    return case.noisy_valid & (case.starts[:, None] + np.arange(layout.window) >= LENGTHS[:, None])


def block_mask(layout, prompt, length):
    """Who sees whom on one canvas, from the page's words: prompt as prefix, blocks two-way inside, causal across."""

    def block(position):
        if layout.origin == "sequence":
            return position // layout.block_size
        if position >= prompt:
            return (position - prompt) // layout.block_size
        return -1 if layout.prompt_attention == "full" else position - 1000

    return np.array([[block(key) <= block(query) for key in range(length)] for query in range(length)])


def one_canvas_oracle(numpy_decoder, layout, case, row, block):
    """Logits that the rollout would see for the slots of one block: clean prefix, that block's canvas, nothing else."""
    weights, prompt, size = parameters(build()), LENGTHS[row], layout.block_size
    first, stop = block * size, min((block + 1) * size, layout.window)
    slots = [slot for slot in range(first, stop) if case.noisy_valid[row, slot]]
    if not slots:
        return [], []
    start = case.starts[row] + first

    def run(tokens):
        mask = block_mask(layout, prompt, len(tokens))
        return numpy_decoder(CONFIG, weights, np.array(tokens), np.arange(len(tokens)), mask)[:, :MASK]

    prefix = case.clean[row, :start].tolist()
    canvas = run([*prefix, *case.noisy[row, slots]])
    if layout.alignment == "same_position":
        return slots, canvas[start:]
    seed = run(prefix)[-1] if prefix else np.zeros(MASK)
    return slots, np.concatenate([seed[None], canvas[start:-1]])


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_two_streams_score_each_block_as_its_own_canvas_would(numpy_decoder, layout):
    case = draw_case(layout, 0)
    logits = np.asarray(scorer(layout)(build(), inputs_of(case)))
    assert logits.shape == (ROWS, layout.window, MASK)
    counted, compared = generated(layout, case), np.zeros((ROWS, layout.window), bool)
    for row in range(ROWS):
        for block in range(layout.max_blocks):
            slots, expected = one_canvas_oracle(numpy_decoder, layout, case, row, block)
            for slot, logit in zip(slots, expected, strict=True):
                if counted[row, slot]:
                    np.testing.assert_allclose(logits[row, slot], logit, atol=1e-5)
                    compared[row, slot] = True
    np.testing.assert_array_equal(compared, counted)


@pytest.mark.parametrize("layout", FEW, ids=name_of)
@given(seed=st.integers(0, 2**32 - 1), block=st.integers(0, 2))
@settings(max_examples=15, deadline=None)
def test_tokens_of_later_blocks_and_hidden_answers_change_no_logit(layout, seed, block):
    case = draw_case(layout, seed)
    before = np.asarray(scorer(layout)(build(), inputs_of(case)))
    rng = np.random.default_rng(seed + 1)
    # Later blocks in both streams; and block k itself in the clean stream, which is what its masks hide.
    slots = np.arange(layout.window)
    later = slots // layout.block_size > block
    hidden_from = np.maximum(case.starts + block * layout.block_size, LENGTHS)
    hidden = np.arange(layout.length) >= hidden_from[:, None]
    case.noisy = np.where(later, rng.integers(0, 11, case.noisy.shape), case.noisy)
    case.clean = np.where(hidden, rng.integers(0, 10, case.clean.shape), case.clean)
    after = np.asarray(scorer(layout)(build(), inputs_of(case)))
    kept = generated(layout, case) & ~later
    np.testing.assert_array_equal(after[kept], before[kept])


@pytest.mark.parametrize("layout", FEW, ids=name_of)
def test_a_later_block_does_see_the_clean_tokens_before_it(layout):
    case = draw_case(layout, 2)
    case.clean_valid[:], case.noisy_valid[:] = True, True
    before = np.asarray(scorer(layout)(build(), inputs_of(case)))
    # The last completion slot of the first block.
    answers = case.starts + layout.block_size - 1
    case.clean[np.arange(ROWS), answers] = (case.clean[np.arange(ROWS), answers] + 1) % 10
    after = np.asarray(scorer(layout)(build(), inputs_of(case)))
    second = np.arange(layout.window) // layout.block_size == 1
    assert (np.abs(after - before).max(-1)[:, second].max(-1) > 1e-3).all()


@pytest.mark.parametrize("layout", FEW, ids=name_of)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_what_invalid_columns_hold_reaches_nothing(layout, seed):
    case = draw_case(layout, seed)
    before = np.asarray(scorer(layout)(build(), inputs_of(case)))
    rng = np.random.default_rng(seed)
    case.clean = np.where(case.clean_valid, case.clean, rng.integers(0, 11, case.clean.shape))
    case.noisy = np.where(case.noisy_valid, case.noisy, rng.integers(0, 11, case.noisy.shape))
    after = np.asarray(scorer(layout)(build(), inputs_of(case)))
    assert np.isfinite(after).all()
    kept = generated(layout, case)
    np.testing.assert_array_equal(after[kept], before[kept])


@pytest.mark.parametrize("layout", FEW[1:3], ids=name_of)
def test_a_row_alone_equals_the_row_in_a_padded_batch(layout):
    case = draw_case(layout, 4)
    inputs = inputs_of(case)
    batch = np.asarray(scorer(layout)(build(), inputs))
    for row in range(ROWS):
        alone = scorer(layout)(build(), jax.tree.map(lambda part, row=row: part[row : row + 1], inputs))
        np.testing.assert_allclose(alone[0], batch[row], atol=1e-5)


def test_a_row_of_weight_zero_is_a_row_removed():
    layout = FEW[0]
    case = draw_case(layout, 8)
    inputs = inputs_of(case)
    weights = jnp.asarray(generated(layout, case) * np.array([1, 1, 0, 1])[:, None], jnp.float32)

    @jax.jit
    def sums(model, inputs, weights):
        def loss(model):
            log_p = jax.nn.log_softmax(student_logits_fn(layout)(model, inputs))
            return -jnp.sum(log_p[:, :, 3] * weights)

        return jax.value_and_grad(loss)(model)

    kept = jnp.array([0, 1, 3])
    masked, removed = (
        sums(build(), inputs, weights),
        sums(build(), jax.tree.map(lambda x: x[kept], inputs), weights[kept]),
    )
    for one, other in zip(jax.tree.leaves(masked), jax.tree.leaves(removed), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.parametrize("alignment", ["same_position", "shifted"])
def test_a_corrupted_context_is_one_canvas_with_the_noise_of_every_block(numpy_decoder, alignment):
    layout = layout_of(3, 7, "sequence", alignment, context="corrupted")
    case = draw_case(layout, 6)
    logits = np.asarray(scorer(layout)(build(), inputs_of(case)))
    for row, prompt in enumerate(LENGTHS):
        start = case.starts[row]
        canvas = np.array([*case.clean[row, :start], *case.noisy[row, case.noisy_valid[row]]])
        mask = block_mask(layout, prompt, len(canvas))
        expected = numpy_decoder(CONFIG, parameters(build()), canvas, np.arange(len(canvas)), mask)[:, :MASK]
        for slot in np.flatnonzero(generated(layout, case)[row]):
            source = start + slot - (alignment == "shifted")
            np.testing.assert_allclose(logits[row, slot], expected[source], atol=1e-5)


def test_gradient_reaches_the_block_that_is_weighted_and_the_clean_tokens_before_it_only():
    layout = layout_of(3, 6, "response", "same_position")
    rows, prompt, window = 1, 2, layout.window
    # Every token is an id of its own, so that the gradient of the (untied) embedding tells who was read.
    clean, noisy = np.arange(layout.length)[None], np.arange(layout.length, layout.length + window)[None]
    config = replace(CONFIG, vocab_size=layout.length + window, tied_head=False)
    layout = replace(layout, mask_id=config.vocab_size - 1)
    inputs = two_stream_inputs(
        clean_tokens_BL=jnp.asarray(clean, jnp.int32),
        clean_valid_BL=jnp.ones(clean.shape, bool),
        noisy_tokens_BW=jnp.asarray(noisy, jnp.int32),
        noisy_valid_BW=jnp.ones(noisy.shape, bool),
        prompt_lengths_B=jnp.full((rows,), prompt, jnp.int32),
    )

    @jax.jit
    def readers(model, weights_W):
        def loss(model):
            return jnp.sum(student_logits_fn(layout)(model, inputs)[0] ** 2 * weights_W[:, None])

        return jnp.any(jax.grad(loss)(model).embedding.table[...] != 0, axis=-1)

    for block in (0, 1):
        weights = jnp.asarray(np.arange(window) // 3 == block, jnp.float32)
        read = np.flatnonzero(readers(build(config), weights))
        before = prompt + 3 * block
        assert read.tolist() == [*range(before), *noisy[0, 3 * block : 3 * block + 3]]
    assert not np.any(readers(build(config), jnp.zeros(window)))


@pytest.mark.parametrize("appended", [True, False])
def test_the_head_for_chunked_losses_is_the_head_of_the_logits(appended):
    layout = replace(
        layout_of(3, 6, "response", "same_position"), mask_id=MASK if appended else 4, mask_appended=appended
    )
    inputs = inputs_of(draw_case(layout, 1))

    @jax.jit
    def both(model):
        kernel, bias = loss_head(model, layout)
        logits = student_hidden_fn(layout)(model, inputs) @ kernel
        return student_logits_fn(layout)(model, inputs), logits if bias is None else logits + bias[None, None]

    whole, chunked = both(build())
    assert whole.shape[-1] == (MASK if appended else MASK + 1)
    assert np.isneginf(whole[..., 4]).all() == (not appended)
    np.testing.assert_allclose(chunked, whole, atol=1e-6)


@pytest.mark.parametrize(("mask_id", "appended"), [(9, True), (11, True), (11, False)])
def test_a_mask_id_that_is_not_where_the_layout_says_is_refused(mask_id, appended):
    layout = replace(layout_of(3, 6, "response", "same_position"), mask_id=mask_id, mask_appended=appended)
    with pytest.raises(BatchValueError, match=f"mask id {mask_id} does not fit a head of 11 columns"):
        loss_logits(jnp.zeros((1, 2, 11)), layout)


def largest_square(jaxpr):
    """The largest second-largest dimension of any array in a jaxpr: L for an `[.., L, L]` array."""
    largest = 0
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            largest = max(largest, sorted((0, 0, *variable.aval.shape))[-2])
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(parameter, "eqns"):
                largest = max(largest, largest_square(parameter))
    return largest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_sequences_never_hold_a_square_of_scores(monkeypatch, dtype):
    layout = BlockLayout(32, "response", "causal", "same_position", "clean", 1000, 3000, MASK, True)
    config = replace(CONFIG, dtype=dtype)
    shapes = {
        "clean_tokens": ((1, layout.length), jnp.int32),
        "clean_valid": ((1, layout.length), jnp.bool_),
        "noisy_tokens": ((1, layout.window), jnp.int32),
        "noisy_valid": ((1, layout.window), jnp.bool_),
        "prompt_lengths": ((1,), jnp.int32),
    }
    inputs = {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))

    def jaxpr():
        # A new function each time: traces are cached by function.
        loss = jax.grad(lambda model, inputs: jnp.sum(student_logits_fn(layout)(model, inputs)))
        return jax.make_jaxpr(loss)(model, inputs).jaxpr

    assert largest_square(jaxpr()) < 1000
    monkeypatch.setattr(attention, "DENSE_SCORES", 1 << 40)
    assert largest_square(jaxpr()) >= layout.window, "the dense path would have been seen"
