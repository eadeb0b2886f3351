"""Which canvases the student is trained on: those it visited (`trajectory`), or freshly masked ones (`random`).

Given clean earlier blocks, blocks are independent. So each draws a state of its own, and all are stitched into one
canvas: every block teaches, in one forward. Weights carry no 1/t: with one draw per block its variance is infinite.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Key

from contracts.tokens import DiffusionTokenBatch
from pipeline.diffusion.blocks import BlockLayout, columns, window_positions
from pipeline.diffusion.decoded import Decoded
from pipeline.diffusion.keys import Purpose, fold
from pipeline.diffusion.streams import two_stream_inputs

IGNORED = -1
"""Target id of a slot that has neither a weight nor a recorded log-probability."""


@dataclass(frozen=True)
class StateWeights:
    """Which generated tokens teach; static, hashable.

    Args:
        truncated: `keep` or `mask` (weight 0) the rows that spent their budget without a stop.
        stop_token_weight: Of the first stop token itself; 1 or 0.
    """

    truncated: Literal["keep", "mask"] = "keep"
    stop_token_weight: Literal[0, 1] = 1


class _Window(NamedTuple):
    """Completions seen slot by slot of the window; all `[B, W]`."""

    tokens_BW: Array
    steps_BW: Array  # Commit step; −1 where never resolved, and outside the completion.
    log_probs_BW: Array
    prompt_BW: Array  # Prompt tokens in front of the completion, in its first block.
    inside_BW: Array  # Completion slots, within the budget, of blocks that hold part of the answer.
    answer_BW: Array  # Completion slots through the first stop.
    seed_BW: Array  # Completion slots that are predicted from the clean stream.


def trajectory_states(
    decoded: Decoded,
    prompt_lengths_B: Int[Array, "B"],
    row_keys_B: Key[Array, "B"],
    layout: BlockLayout,
    weights: StateWeights = StateWeights(),
) -> DiffusionTokenBatch:
    """Canvases that the rollout really visited, rebuilt from its commit steps.

    Per block one denoising step s is drawn uniformly from those taken. The canvas shows what was committed before s;
    the slots still masked then have weight 1. A shifted seed is clean and has weight 1. After the stop: weight 0 and
    not in the clean stream, but in the stop's own block the canvas keeps what was there.

    Args:
        decoded: The rollout.
        prompt_lengths_B: int32, in [1, P].
        row_keys_B: One key per row; `Purpose.STATE` and the block are folded in.
        layout: Of the rollout; static.
        weights: Which tokens teach; static.

    Returns:
        Batch over the window. Its `model_inputs` are those of `two_stream_inputs` and, `[B, W]` each:
        `left_context_committed`, bool, no mask is left of the slot in its block; `committed_now`, bool, answer slots
        that were committed at step s, and seeds; `recorded_log_probs`, float32, theirs at rollout, NaN elsewhere.
    """
    window = _window(layout, decoded, prompt_lengths_B)
    denoised_BNS = _blocks(layout, window.inside_BW & ~window.seed_BW & (window.steps_BW >= 0), False)
    steps_BNS = _blocks(layout, window.steps_BW, -1)
    # Every denoising step commits at least one slot, so those taken run from the smallest to the largest seen.
    last_BN = jnp.max(jnp.where(denoised_BNS, steps_BNS, -1), axis=-1)
    first_BN = jnp.min(jnp.where(denoised_BNS, steps_BNS, last_BN[:, :, None]), axis=-1)
    drawn_BN = _per_block(layout, row_keys_B, _uniform_step, first_BN, last_BN + 1)
    drawn_BW = _slots(layout, jnp.broadcast_to(drawn_BN[:, :, None], steps_BNS.shape))

    shown_BW = window.prompt_BW | window.seed_BW | ((window.steps_BW >= 0) & (window.steps_BW < drawn_BW))
    now_BW = window.answer_BW & (window.seed_BW | (window.steps_BW == drawn_BW))
    return _batch(layout, weights, decoded, prompt_lengths_B, window, shown_BW, now_BW)


def random_states(
    decoded: Decoded,
    prompt_lengths_B: Int[Array, "B"],
    row_keys_B: Key[Array, "B"],
    layout: BlockLayout,
    weights: StateWeights = StateWeights(),
    min_noise: float = 0.05,
) -> DiffusionTokenBatch:
    """Canvases masked at random: per block t ~ U(min_noise, 1), each slot masked with probability t, at least one.

    Shifted seeds stay clean; slots that were never resolved are masked.

    Args:
        decoded: A rollout, or `as_decoded` completions of a data set.
        prompt_lengths_B: int32, in [1, P].
        row_keys_B: One key per row; `Purpose.STATE` and the block are folded in.
        layout: Of the rollout; static.
        weights: Which tokens teach; static.
        min_noise: In [0, 1]; static.

    Returns:
        As `trajectory_states`; `committed_now` is False everywhere, for nothing was recorded about these canvases.
    """
    window = _window(layout, decoded, prompt_lengths_B)
    maskable_BNS = _blocks(layout, window.answer_BW & ~window.seed_BW, False)
    noise_BN, draws_BNS = _per_block(layout, row_keys_B, partial(_noise, layout, min_noise))
    least_BN1 = jnp.min(jnp.where(maskable_BNS, draws_BNS, jnp.inf), axis=-1, keepdims=True)
    masked_BNS = (draws_BNS < noise_BN[:, :, None]) | (draws_BNS == least_BN1)

    shown_BW = window.prompt_BW | window.seed_BW | ((window.steps_BW >= 0) & ~_slots(layout, masked_BNS))
    return _batch(layout, weights, decoded, prompt_lengths_B, window, shown_BW, jnp.zeros_like(shown_BW))


def as_decoded(
    layout: BlockLayout, tokens_BL: Int[Array, "B L"], prompt_lengths_B: Int[Array, "B"], length_B: Int[Array, "B"]
) -> Decoded:
    """Completions of a data set in the form of a rollout, each token committed at step 0, with no log-probability.

    Args:
        layout: The layout.
        tokens_BL: Prompt and completion; anything past the completion.
        prompt_lengths_B: int32, in [1, P].
        length_B: int32, completion tokens through the stop, in [1, C]; rows without a stop must be cut by the caller.
    """
    none_B = jnp.zeros_like(length_B)
    slots_BC = jnp.broadcast_to(jnp.arange(layout.completion_length)[None], (*length_B.shape, layout.completion_length))
    end_B = prompt_lengths_B + length_B
    fill = 0 if layout.mask_id is None else layout.mask_id
    return Decoded(
        tokens_BL=jnp.where(columns(layout, tokens_BL.shape[0]) < end_B[:, None], tokens_BL, fill),
        commit_step_BC=jnp.where(slots_BC < length_B[:, None], 0, -1).astype(jnp.int32),
        log_prob_BC=jnp.full(slots_BC.shape, jnp.nan, jnp.float32),
        length_B=length_B,
        truncated_B=none_B > 0,
        forwards_B=none_B,
        commit_passes_B=none_B,
    )


def _window(layout: BlockLayout, decoded: Decoded, prompt_lengths_B: Array) -> _Window:
    positions_BW = window_positions(layout, prompt_lengths_B)
    offsets_BW = positions_BW - prompt_lengths_B[:, None]
    index_BW = jnp.clip(offsets_BW, 0, layout.completion_length - 1)
    answer_BW = (offsets_BW >= 0) & (offsets_BW < decoded.length_B[:, None])
    reached_BN1 = jnp.any(_blocks(layout, answer_BW, False), axis=-1, keepdims=True)
    reached_BW = _slots(layout, jnp.broadcast_to(reached_BN1, (*reached_BN1.shape[:2], layout.block_size)))
    inside_BW = reached_BW & (offsets_BW >= 0) & (offsets_BW < layout.completion_length)
    first_W = jnp.arange(layout.window) % layout.block_size == 0
    seed_BW = inside_BW & first_W[None] if layout.alignment == "shifted" else jnp.zeros_like(inside_BW)
    return _Window(
        tokens_BW=jnp.take_along_axis(decoded.tokens_BL, jnp.minimum(positions_BW, layout.length - 1), axis=1),
        steps_BW=jnp.where(inside_BW, jnp.take_along_axis(decoded.commit_step_BC, index_BW, axis=1), -1),
        log_probs_BW=jnp.take_along_axis(decoded.log_prob_BC, index_BW, axis=1),
        prompt_BW=reached_BW & (offsets_BW < 0),
        inside_BW=inside_BW,
        answer_BW=answer_BW,
        seed_BW=seed_BW,
    )


def _batch(
    layout: BlockLayout,
    weights: StateWeights,
    decoded: Decoded,
    prompt_lengths_B: Array,
    window: _Window,
    shown_BW: Array,
    now_BW: Array,
) -> DiffusionTokenBatch:
    noisy_valid_BW = window.prompt_BW | window.inside_BW
    end_B1 = (prompt_lengths_B + decoded.length_B)[:, None]
    # Tokens outside the masks are cleared: what a pad or a dropped block held must not reach a digest, a teacher whose
    # vocabulary lacks the mask id, or a gather.
    clean_valid_BL = columns(layout, prompt_lengths_B.shape[0]) < end_B1
    mask_id = 0 if layout.mask_id is None else layout.mask_id
    noisy_BW = jnp.where(noisy_valid_BW, jnp.where(shown_BW, window.tokens_BW, mask_id), 0)

    taught_BW = window.answer_BW & (window.seed_BW | ~shown_BW)
    if weights.stop_token_weight == 0:
        stop_BW = (window_positions(layout, prompt_lengths_B) == end_B1 - 1) & ~decoded.truncated_B[:, None]
        taught_BW &= ~stop_BW
    if weights.truncated == "mask":
        taught_BW &= ~decoded.truncated_B[:, None]

    hidden_BNS = _blocks(layout, window.inside_BW & ~shown_BW, False).astype(jnp.int32)
    hidden_left_BNS = jnp.cumsum(hidden_BNS, axis=-1) - hidden_BNS
    inputs = two_stream_inputs(
        clean_tokens_BL=jnp.where(clean_valid_BL, decoded.tokens_BL, 0),
        clean_valid_BL=clean_valid_BL,
        noisy_tokens_BW=noisy_BW,
        noisy_valid_BW=noisy_valid_BW,
        prompt_lengths_B=prompt_lengths_B,
        left_context_committed=_slots(layout, hidden_left_BNS == 0),
        committed_now=now_BW,
        recorded_log_probs=jnp.where(now_BW, window.log_probs_BW, jnp.nan),
    )
    return DiffusionTokenBatch.create(
        model_inputs=inputs,
        target_ids=jnp.where(taught_BW | now_BW, window.tokens_BW, IGNORED),
        loss_weights=taught_BW.astype(jnp.float32),
    )


def _blocks(layout: BlockLayout, x_BW: Array, fill: int | bool) -> Array:
    """`[B, W]` to `[B, N, block_size]`: a block starts at window slot 0 in every row."""
    pad = layout.max_blocks * layout.block_size - layout.window
    padded = jnp.pad(x_BW, ((0, 0), (0, pad)), constant_values=fill)
    return padded.reshape(x_BW.shape[0], layout.max_blocks, layout.block_size)


def _slots(layout: BlockLayout, x_BNS: Array) -> Array:
    return x_BNS.reshape(x_BNS.shape[0], -1)[:, : layout.window]


def _per_block(layout: BlockLayout, row_keys_B: Array, draw: Callable, *arguments_BN: Array):
    """`draw(key, ...)` for every row and block; a row's draw depends on its key and the block's number alone."""
    keys_NB = jax.vmap(lambda block: fold(row_keys_B, Purpose.STATE, block))(jnp.arange(layout.max_blocks))
    return jax.vmap(jax.vmap(draw))(keys_NB.T, *arguments_BN)


def _uniform_step(key: Array, low: Array, high: Array) -> Array:
    return jax.random.randint(key, (), low, high)


def _noise(layout: BlockLayout, min_noise: float, key: Array) -> tuple[Array, Array]:
    level_key, slots_key = jax.random.split(key)
    level = jax.random.uniform(level_key, (), jnp.float32, min_noise, 1.0)
    return level, jax.random.uniform(slots_key, (layout.block_size,), jnp.float32)
