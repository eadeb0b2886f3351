import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.diffusion.blocks import BlockLayout
from pipeline.diffusion.decoded import Decoded
from pipeline.diffusion.keys import row_keys
from pipeline.diffusion.states import StateWeights, as_decoded, random_states, trajectory_states

MASK, ROWS, PROMPT, SIZE, BUDGET = 99, 4, 4, 3, 7
LENGTHS = np.arange(1, PROMPT + 1)
LAYOUTS = {
    f"{origin}-{alignment}": BlockLayout(SIZE, origin, "causal", alignment, "clean", PROMPT, BUDGET, MASK)
    for origin in ("response", "sequence")
    for alignment in ("same_position", "shifted")
}


ALL_TEACH = StateWeights()


@functools.cache
def trajectories(layout, weights=ALL_TEACH):
    return jax.jit(lambda decoded, lengths, keys: trajectory_states(decoded, lengths, keys, layout, weights))


@functools.cache
def randoms(layout, weights=ALL_TEACH, min_noise=0.05):
    return jax.jit(lambda decoded, lengths, keys: random_states(decoded, lengths, keys, layout, weights, min_noise))


def on_device(decoded):
    return Decoded(*(jnp.asarray(part) for part in decoded))


def run(states, decoded, lengths=LENGTHS, seed=0, rows=None):
    keys = row_keys(seed, 0, np.arange(len(lengths)) if rows is None else np.asarray(rows))
    batch = states(on_device(decoded), jnp.asarray(lengths, jnp.int32), keys)
    return batch.validate(), {name: np.asarray(leaf) for name, leaf in batch.model_inputs.items()}


def start_of(layout, prompt):
    return prompt if layout.origin == "response" else prompt // SIZE * SIZE


def simulate(layout, seed):
    """Rollouts as a sampler leaves them: any commit order, stops anywhere, what follows a stop in its block as visited."""
    rng = np.random.default_rng(seed)
    tokens = np.full((ROWS, layout.length), MASK)
    steps = np.full((ROWS, BUDGET), -1)
    log_probs = np.zeros((ROWS, BUDGET))
    length = rng.integers(1, BUDGET + 1, ROWS)
    truncated = (length == BUDGET) & (rng.random(ROWS) < 0.5)
    for row, prompt in enumerate(LENGTHS):
        start = start_of(layout, prompt)
        tokens[row, :prompt] = rng.integers(0, 50, prompt)
        for first in range(start, prompt + length[row], SIZE):
            slots = [p for p in range(first, first + SIZE) if prompt <= p < prompt + BUDGET]
            if layout.alignment == "shifted" and first in slots:
                slots.remove(first)
                steps[row, first - prompt] = 0
            order, step = rng.permutation(slots).tolist(), 0
            while any(p < prompt + length[row] for p in order):
                for _ in range(rng.integers(1, 3)):
                    if order:
                        steps[row, order.pop() - prompt] = step
                step += 1
        done = np.flatnonzero(steps[row] >= 0)
        tokens[row, prompt + done] = rng.integers(0, 50, len(done))
        log_probs[row, done] = -rng.random(len(done)) - 0.1
    none = np.zeros(ROWS, np.int32)
    arrays = tokens.astype(np.int32), steps.astype(np.int32), log_probs.astype(np.float32), length.astype(np.int32)
    return Decoded(*arrays, truncated, none, none)


def expected_block(layout, decoded, row, first, step):
    """One block's slots, told one by one, if the canvas before denoising step `step` is trained on."""
    prompt, end = LENGTHS[row], LENGTHS[row] + decoded.length_B[row]
    slots, left_open = [], False
    for position in range(first, first + SIZE):
        index = position - prompt
        slot = {"noisy": 0, "valid": False, "weight": 0.0, "target": -1, "left": not left_open, "now": False}
        if position < prompt:
            slot |= {"noisy": decoded.tokens_BL[row, position], "valid": True}
        elif index < BUDGET:
            seed = layout.alignment == "shifted" and position == first
            committed = decoded.commit_step_BC[row, index]
            shown = seed or 0 <= committed < step
            slot |= {"noisy": decoded.tokens_BL[row, position] if shown else MASK, "valid": True}
            if position < end:
                now = seed or committed == step
                slot |= {"now": now, "weight": float(seed or not shown)}
                if now or slot["weight"]:
                    slot["target"] = decoded.tokens_BL[row, position]
            left_open |= not shown
        slots.append(slot)
    return slots


def block_of(batch, inputs, row, block):
    """The same, read from a batch; slots past the window do not exist."""
    names = {"noisy": inputs["noisy_tokens"], "valid": inputs["noisy_valid"], "weight": batch.loss_weights}
    names |= {"target": batch.target_ids, "left": inputs["left_context_committed"], "now": inputs["committed_now"]}
    span = slice(block * SIZE, (block + 1) * SIZE)
    columns = {name: np.asarray(array)[row, span] for name, array in names.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(columns["noisy"]))]


@pytest.mark.parametrize("name", LAYOUTS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_every_block_of_a_trajectory_state_is_a_canvas_that_was_visited(name, seed):
    layout = LAYOUTS[name]
    decoded = simulate(layout, seed)
    batch, inputs = run(trajectories(layout), decoded, seed=seed)
    ends = LENGTHS + decoded.length_B
    for row in range(ROWS):
        np.testing.assert_array_equal(inputs["clean_valid"][row], np.arange(layout.length) < ends[row])
        np.testing.assert_array_equal(inputs["clean_tokens"][row, : ends[row]], decoded.tokens_BL[row, : ends[row]])
        for block in range(layout.max_blocks):
            got = block_of(batch, inputs, row, block)
            first = start_of(layout, LENGTHS[row]) + block * SIZE
            if first >= ends[row]:
                assert not any(slot["valid"] or slot["weight"] for slot in got)
                continue
            indices = [p - LENGTHS[row] for p in range(first, first + SIZE)]
            taken = {int(decoded.commit_step_BC[row, i]) for i in indices if 0 <= i < BUDGET} - {-1}
            options = [expected_block(layout, decoded, row, first, step)[: len(got)] for step in taken]
            assert got in options
    # What was recorded goes with the slot that was committed.
    for row, slot in np.argwhere(inputs["committed_now"]):
        index = start_of(layout, LENGTHS[row]) + slot - LENGTHS[row]
        assert inputs["recorded_log_probs"][row, slot] == decoded.log_prob_BC[row, index]
    assert np.isnan(inputs["recorded_log_probs"][~inputs["committed_now"]]).all()


def test_a_stop_inside_a_block_ends_weights_and_clean_stream_but_not_the_canvas():
    layout = BlockLayout(4, "response", "causal", "same_position", "clean", 2, 8, MASK)
    # Stop 7 at completion slot 4, first of block 1; slot 6 was committed before it, slots 5 and 7 never.
    decoded = Decoded(
        tokens_BL=np.array([[1, 2, 11, 12, 13, 14, 7, MASK, 16, MASK]], np.int32),
        commit_step_BC=np.array([[0, 0, 0, 0, 1, -1, 0, -1]], np.int32),
        log_prob_BC=np.array([[-1, -2, -3, -4, -5, 0, -7, 0]], np.float32),
        length_B=np.array([5], np.int32),
        truncated_B=np.array([False]),
        forwards_B=np.array([3], np.int32),
        commit_passes_B=np.array([1], np.int32),
    )
    canvases = set()
    for seed in range(8):
        batch, inputs = run(trajectories(layout), decoded, lengths=[2], seed=seed)
        np.testing.assert_array_equal(inputs["clean_tokens"], [[1, 2, 11, 12, 13, 14, 7, 0, 0, 0]])
        np.testing.assert_array_equal(inputs["clean_valid"], [[True] * 7 + [False] * 3])
        np.testing.assert_array_equal(inputs["noisy_valid"], [[True] * 8])
        np.testing.assert_array_equal(batch.loss_weights, [[1, 1, 1, 1, 1, 0, 0, 0]])
        np.testing.assert_array_equal(batch.target_ids, [[11, 12, 13, 14, 7, -1, -1, -1]])
        canvas = inputs["noisy_tokens"][0, 4:].tolist()
        late = canvas == [MASK, MASK, 16, MASK]
        assert late or canvas == [MASK] * 4
        np.testing.assert_array_equal(inputs["committed_now"], [[True] * 4 + [late] + [False] * 3])
        canvases.add(late)
    assert canvases == {True, False}


@pytest.mark.parametrize("name", LAYOUTS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_what_follows_the_stop_changes_nothing_but_the_canvas_of_its_own_block(name, seed):
    layout = LAYOUTS[name]
    decoded = simulate(layout, seed)
    rng = np.random.default_rng(seed)
    after = np.arange(layout.length) >= (LENGTHS + decoded.length_B)[:, None]
    noise = rng.integers(0, 50, decoded.tokens_BL.shape).astype(np.int32)
    changed = decoded._replace(tokens_BL=np.where(after, noise, decoded.tokens_BL))
    for states in (trajectories(layout), randoms(layout)):
        (one, left), (two, right) = (run(states, rollout, seed=seed) for rollout in (decoded, changed))
        np.testing.assert_array_equal(one.loss_weights, two.loss_weights)
        np.testing.assert_array_equal(one.target_ids, two.target_ids)
        for leaf in left.keys() - {"noisy_tokens"}:
            np.testing.assert_array_equal(left[leaf], right[leaf])
        # The canvas differs only where a token after the stop was visited.
        differs = left["noisy_tokens"] != right["noisy_tokens"]
        positions = np.array([start_of(layout, p) for p in LENGTHS])[:, None] + np.arange(layout.window)
        assert not (differs & (positions < (LENGTHS + decoded.length_B)[:, None])).any()
        assert not (differs & ~left["noisy_valid"]).any()


def test_every_step_of_a_block_is_drawn_equally_often_and_each_block_for_itself():
    layout = BlockLayout(4, "response", "causal", "same_position", "clean", 1, 8, MASK)
    rows = 1000
    steps = np.tile(np.array([[0, 1, 2, 3, 3, 1, 2, 0]], np.int32), (rows, 1))
    tokens = np.tile(np.arange(9, dtype=np.int32), (rows, 1))
    full, none = np.full(rows, 8, np.int32), np.zeros(rows, np.int32)
    decoded = Decoded(tokens, steps, np.zeros((rows, 8), np.float32), full, none > 0, none, none)
    _, inputs = run(trajectories(layout), decoded, lengths=np.ones(rows))
    hidden = (inputs["noisy_tokens"] == MASK).reshape(rows, 2, 4).sum(-1)
    counts = np.zeros((4, 4))
    np.add.at(counts, (4 - hidden[:, 0], 4 - hidden[:, 1]), 1)
    # Each of 16 pairs has mean 62.5 and deviation 7.7.
    assert counts.min() > 62.5 - 5 * 7.7
    assert counts.max() < 62.5 + 5 * 7.7


@pytest.mark.parametrize("make", [trajectories, randoms])
def test_a_row_draws_by_its_key_whatever_its_slot_and_its_company(make):
    layout = LAYOUTS["sequence-same_position"]
    decoded = simulate(layout, 3)
    batch, inputs = run(make(layout), decoded)
    order = np.array([2, 0, 3, 1])
    moved, moved_inputs = run(make(layout), Decoded(*(part[order] for part in decoded)), LENGTHS[order], rows=order)
    np.testing.assert_array_equal(moved.loss_weights, batch.loss_weights[order])
    np.testing.assert_array_equal(moved_inputs["noisy_tokens"], inputs["noisy_tokens"][order])
    others = run(make(layout), decoded, seed=1)[1]
    assert (others["noisy_tokens"] != inputs["noisy_tokens"]).any()


@pytest.mark.parametrize("make", [trajectories, randoms])
def test_truncated_rows_are_kept_or_masked_and_teach_no_stop(make):
    layout = LAYOUTS["response-shifted"]
    decoded = simulate(layout, 0)._replace(truncated_B=np.array([True, False, True, False]))
    kept = np.asarray(run(make(layout), decoded)[0].loss_weights)
    assert (kept.sum(1) > 0).all()
    fewer = np.asarray(run(make(layout, StateWeights(truncated="mask", stop_token_weight=0)), decoded)[0].loss_weights)
    expected, last = kept.copy(), decoded.length_B - 1
    expected[[0, 2]] = 0
    assert expected[[1, 3], last[[1, 3]]].any()
    expected[[1, 3], last[[1, 3]]] = 0
    np.testing.assert_array_equal(fewer, expected)
    if make is trajectories:
        stopless = np.asarray(run(make(layout, StateWeights(stop_token_weight=0)), decoded)[0].loss_weights)
        np.testing.assert_array_equal(stopless[[0, 2]], kept[[0, 2]])


@pytest.mark.parametrize("name", LAYOUTS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_random_masks_nest_and_leave_every_block_something_to_learn(name, seed):
    layout = LAYOUTS[name]
    decoded = simulate(layout, seed)
    batch, inputs = run(randoms(layout), decoded, seed=seed)
    weights = np.asarray(batch.loss_weights)
    slots = np.arange(layout.window)
    positions = np.array([start_of(layout, p) for p in LENGTHS])[:, None] + slots
    answer = (positions >= LENGTHS[:, None]) & (positions < (LENGTHS + decoded.length_B)[:, None])
    masked = inputs["noisy_tokens"] == MASK
    seeds = answer & (slots % SIZE == 0) if layout.alignment == "shifted" else np.zeros_like(answer)
    assert not (masked & ~inputs["noisy_valid"]).any() and not (answer & ~inputs["noisy_valid"]).any()
    assert not (seeds & masked).any()
    np.testing.assert_array_equal(weights, (answer & masked) | seeds)
    np.testing.assert_array_equal(np.asarray(batch.target_ids) >= 0, weights > 0)
    for row in range(ROWS):
        for block in range(layout.max_blocks):
            maskable = (answer & ~seeds)[row] & (slots // SIZE == block)
            assert not maskable.any() or masked[row, maskable].any()
    clear = answer & ~masked
    np.testing.assert_array_equal(
        inputs["noisy_tokens"][clear],
        np.take_along_axis(decoded.tokens_BL, np.minimum(positions, layout.length - 1), axis=1)[clear],
    )
    assert not inputs["committed_now"].any() and np.isnan(inputs["recorded_log_probs"]).all()


def test_the_masked_share_of_a_random_block_is_uniform_above_its_floor():
    layout = BlockLayout(32, "response", "causal", "same_position", "clean", 1, 32, MASK)
    rows = 800
    lengths = jnp.ones(rows, jnp.int32)
    decoded = as_decoded(layout, jnp.zeros((rows, 33), jnp.int32), lengths, lengths * 32)
    for floor in (0.0, 0.6):
        batch, _ = run(randoms(layout, min_noise=floor), decoded, lengths=lengths)
        share = np.asarray(batch.loss_weights).mean(1)
        # t ~ U(floor, 1): mean and quarter points, the share being a noisy t.
        np.testing.assert_allclose(share.mean(), (1 + floor) / 2, atol=0.03)
        np.testing.assert_allclose(
            np.quantile(share, [0.25, 0.75]), floor + (1 - floor) * np.array([0.25, 0.75]), atol=0.05
        )


def test_completions_of_a_data_set_read_as_rollouts_of_one_step():
    layout = LAYOUTS["response-same_position"]
    lengths, ends = jnp.asarray(LENGTHS, jnp.int32), jnp.array([1, 3, 7, 5], jnp.int32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (ROWS, layout.length)), jnp.int32)
    decoded = as_decoded(layout, tokens, lengths, ends)
    batch, inputs = run(trajectories(layout), decoded)
    answer = np.arange(layout.window) < np.asarray(ends)[:, None]
    np.testing.assert_array_equal(batch.loss_weights, answer)
    np.testing.assert_array_equal(inputs["noisy_tokens"] == MASK, inputs["noisy_valid"])
    np.testing.assert_array_equal(
        np.asarray(decoded.tokens_BL)[inputs["clean_valid"]], np.asarray(tokens)[inputs["clean_valid"]]
    )


def test_a_causal_student_needs_no_mask_and_learns_every_token():
    layout = BlockLayout(1, "response", "causal", "shifted", "clean", PROMPT, BUDGET, None)
    decoded = simulate(LAYOUTS["response-same_position"], 1)
    decoded = decoded._replace(
        commit_step_BC=np.where(np.arange(BUDGET) < decoded.length_B[:, None], 0, -1).astype(np.int32)
    )
    for make in (trajectories, randoms):
        batch, _ = run(make(layout), decoded)
        np.testing.assert_array_equal(batch.loss_weights, np.arange(BUDGET) < decoded.length_B[:, None])
