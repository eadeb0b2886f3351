"""Cached block decoding as one compiled call, and the same decoding step by step for watching.

The cache grows by doubling, so that a step attends over little more than what exists; `pipeline/diffusion/denoising.py`
has the moves.

Source: Arriola et al. 2025, Block Diffusion (arXiv:2503.09573), section 3; Wu et al. 2025, Fast-dLLM v2
(arXiv:2509.26328) for the shifted contract.
"""

from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from contracts.errors import BatchValueError
from contracts.work import SamplerSettings
from pipeline.diffusion.blocks import BlockLayout
from pipeline.diffusion.decoded import Decoded
from pipeline.diffusion.denoising import BlockRollout, RolloutState
from pipeline.models.decoder import Decoder

SHORTEST_CACHE = 128
"""Below this many columns, attending over less saves nothing that another compiled stage would not cost."""


def cache_lengths(layout: BlockLayout) -> tuple[int, ...]:
    """Columns of the cache from the first stage of a rollout to the last, each at most twice the one before."""
    lengths = [layout.context_length]
    while lengths[0] // 2 >= max(layout.prompt_length, SHORTEST_CACHE):
        lengths.insert(0, -(-lengths[0] // 2))
    return tuple(lengths)


def decode(
    model: Decoder,
    prompt_tokens_BP: Int[Array | np.ndarray, "B P"],
    prompt_lengths_B: Int[Array | np.ndarray, "B"],
    row_keys_B: Key[Array, "B"],
    layout: BlockLayout,
    sampler: SamplerSettings,
    stop_ids: tuple[int, ...],
    block_limit: int | Int[Array, ""] | None = None,
) -> Decoded:
    """Write completions, denoising one block after another, with keys and values of finished blocks kept.

    In the active block, until its slots are resolved: propose a token for every slot, then commit the slots that the
    rule chooses. Committed tokens never change. A row ends when no unresolved slot lies left of its first stop token,
    or when its C slots are spent. Equal to `decode_uncached` token for token in float32; a row gives the same tokens
    alone and in any batch of the same shape.

    Args:
      model: the student.
      prompt_tokens_BP: int32 ``[B, P]`` right-padded; P is the layout's ``prompt_length``.
      prompt_lengths_B: int32 ``[B]``, in [1, P].
      row_keys_B: from `row_keys`; unused by a greedy sampler.
      layout: blocks, alignment and budget; static.
      sampler: commit rule, temperature, confidence. Only the rule, greedy or not, and the kind of confidence are
        compiled in; a sweep over values and temperatures compiles once.
      stop_ids: tokens that end a row; static.
      block_limit: end every row after this many blocks (for measuring); None is no limit.

    Returns:
      The completions and their statistics.

    Raises:
      BatchValueError: the prompts do not have the layout's shape.
    """
    rollout, prompt_tokens_BP = _prepare(
        model, prompt_tokens_BP, prompt_lengths_B, row_keys_B, layout, sampler, stop_ids, block_limit
    )
    return _decode(rollout, prompt_tokens_BP)


def decode_blocks(
    model: Decoder,
    prompt_tokens_BP: Int[Array | np.ndarray, "B P"],
    prompt_lengths_B: Int[Array | np.ndarray, "B"],
    row_keys_B: Key[Array, "B"],
    layout: BlockLayout,
    sampler: SamplerSettings,
    stop_ids: tuple[int, ...],
    every: Literal["step", "block"] = "step",
) -> Iterator[Decoded]:
    """Decode as `decode` does, yielding what is written so far after each denoising step, or after each block.

    Args:
      every: when to yield; the rest as in `decode`.

    Yields:
      The canvas so far; unresolved slots hold the mask id. The last one has the tokens that `decode` returns.

    Raises:
      BatchValueError: the prompts do not have the layout's shape.
    """
    rollout, prompt_tokens_BP = _prepare(
        model, prompt_tokens_BP, prompt_lengths_B, row_keys_B, layout, sampler, stop_ids, None
    )
    state = _begin(rollout, prompt_tokens_BP)
    yield _finish(rollout, state)
    lengths = cache_lengths(layout)
    for length in lengths:
        state = state.with_cache_length(length)
        while not state.ended_B.all() and (length == lengths[-1] or rollout.has_room(state)):
            state = _denoise(rollout, state) if state.pending_B.any() else _advance(rollout, state)
            if every == "step" or not state.pending_B.any():
                yield _finish(rollout, state)


def _prepare(model, prompt_tokens_BP, prompt_lengths_B, row_keys_B, layout, sampler, stop_ids, block_limit):
    rows = prompt_tokens_BP.shape[0]
    if prompt_tokens_BP.shape[1] != layout.prompt_length or prompt_lengths_B.shape != (rows,):
        raise BatchValueError(
            f"prompts are [{rows}, {prompt_tokens_BP.shape[1]}] with {prompt_lengths_B.shape[0]} lengths, the layout "
            f"decodes [B, {layout.prompt_length}] with B lengths: pad to the layout's prompt_length"
        )
    rollout = BlockRollout(
        model=model,
        prompt_lengths_B=jnp.asarray(prompt_lengths_B, jnp.int32),
        keys_B=row_keys_B,
        value=jnp.float32(sampler.value),
        temperature=jnp.float32(sampler.temperature),
        block_limit=jnp.int32(layout.max_blocks if block_limit is None else block_limit),
        layout=layout,
        rule=sampler.rule,
        greedy=sampler.temperature == 0,
        confidence=sampler.confidence,
        stop_ids=tuple(stop_ids),
    )
    return rollout, jnp.asarray(prompt_tokens_BP, jnp.int32)


def _denoise_while_pending(rollout: BlockRollout, state: RolloutState) -> RolloutState:
    return jax.lax.while_loop(lambda state: jnp.any(state.pending_B), rollout.denoise, state)


@jax.jit
def _decode(rollout: BlockRollout, prompt_tokens_BP: Array) -> Decoded:
    state = rollout.begin(prompt_tokens_BP)
    lengths = cache_lengths(rollout.layout)
    for length in lengths:

        def goes_on(state: RolloutState, last: bool = length == lengths[-1]) -> Array:
            alive = ~jnp.all(state.ended_B)
            return alive if last else alive & rollout.has_room(state)

        def finish_block(state: RolloutState) -> RolloutState:
            if not rollout.layout.is_causal:
                state = _denoise_while_pending(rollout, state)
            return jax.lax.cond(jnp.all(state.ended_B), lambda state: state, rollout.advance, state)

        state = state.with_cache_length(length)
        if rollout.layout.max_blocks == 1:
            state = _denoise_while_pending(rollout, state)
        else:
            state = jax.lax.while_loop(goes_on, finish_block, state)
    return rollout.finish(state)


@jax.jit
def _begin(rollout: BlockRollout, prompt_tokens_BP: Array) -> RolloutState:
    return rollout.begin(prompt_tokens_BP)


@jax.jit
def _denoise(rollout: BlockRollout, state: RolloutState) -> RolloutState:
    return rollout.denoise(state)


@jax.jit
def _advance(rollout: BlockRollout, state: RolloutState) -> RolloutState:
    return rollout.advance(state)


@jax.jit
def _finish(rollout: BlockRollout, state: RolloutState) -> Decoded:
    return rollout.finish(state)
