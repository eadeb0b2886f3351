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
from pipeline.diffusion.commit import rule_index
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
      sampler: commit rule, temperature, confidence. Greedy or not, and the kind of confidence, are compiled in; a sweep
        over rules, values and temperatures compiles once.
      stop_ids: tokens that end a row.
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
    lengths = cache_lengths(layout)
    for length in lengths:
        state = state.with_cache_length(length)
        while length == lengths[-1] or rollout.has_room(state):
            state = _decide(rollout, state)
            pending, ended = bool(state.pending_B.any()), bool(state.ended_B.all())
            if every == "step" or not pending:
                yield _finish(rollout, state)
            if ended:
                return
            state = _denoise(rollout, state) if pending else _advance(rollout, state)


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
        rule=jnp.int32(rule_index(sampler.rule)),
        value=jnp.float32(sampler.value),
        temperature=jnp.float32(sampler.temperature),
        stop_ids_K=jnp.asarray(stop_ids, jnp.int32),
        block_limit=jnp.int32(layout.max_blocks if block_limit is None else block_limit),
        layout=layout,
        greedy=sampler.temperature == 0,
        confidence=sampler.confidence,
    )
    return rollout, jnp.asarray(prompt_tokens_BP, jnp.int32)


@jax.jit
def _decode(rollout: BlockRollout, prompt_tokens_BP: Array) -> Decoded:
    def decide_and_denoise(carry: tuple[RolloutState, Array]) -> tuple[RolloutState, Array]:
        state = rollout.decide(carry[0])
        pending = jnp.any(state.pending_B)
        if rollout.layout.is_causal:
            return state, pending
        # The conditional hands out only what changes: passing the cache through it would copy it.
        hidden_BSD = jax.lax.cond(
            pending, lambda state: rollout.denoise(state).hidden_BSD, lambda state: state.hidden_BSD, state
        )
        return state._replace(hidden_BSD=hidden_BSD, seeding=jnp.bool_(False)), pending

    def resolve_block(state: RolloutState) -> RolloutState:
        state, _ = jax.lax.while_loop(lambda carry: carry[1], decide_and_denoise, (state, jnp.bool_(True)))
        return state

    def next_block(state: RolloutState) -> RolloutState:
        state = resolve_block(state)
        nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(rollout.predict_next, state))
        over = jnp.all(state.ended_B)
        predicted = jax.lax.cond(over, lambda state: nothing, rollout.predict_next, state)
        return rollout.enter_next(state, *predicted)

    state = rollout.begin(prompt_tokens_BP)
    lengths = cache_lengths(rollout.layout)
    for length in lengths[:-1]:
        state = jax.lax.while_loop(rollout.has_room, next_block, state.with_cache_length(length))
    state = state.with_cache_length(lengths[-1])
    if rollout.layout.max_blocks == 1:
        state = resolve_block(state)
    else:
        state = jax.lax.while_loop(lambda state: ~jnp.all(state.ended_B), next_block, state)
    return rollout.finish(state)


_begin = jax.jit(lambda rollout, prompt_tokens_BP: rollout.begin(prompt_tokens_BP))
_decide = jax.jit(lambda rollout, state: rollout.decide(state))
_denoise = jax.jit(lambda rollout, state: rollout.denoise(state))
_advance = jax.jit(lambda rollout, state: rollout.enter_next(state, *rollout.predict_next(state)))
_finish = jax.jit(lambda rollout, state: rollout.finish(state))
