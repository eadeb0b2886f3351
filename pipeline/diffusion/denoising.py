"""The moves of a cached rollout: a forward pass of the active block, then a decision on what to commit.

    begin ──▶ decide ──▶ denoise ──▶ decide ──▶ … ──▶ predict_next, enter_next ──▶ decide ──▶ … ──▶ finish
              │    ▲        │                         │
              │    └────────┘ while a slot is open    │ once the block is resolved, if some row goes on
              ▼                                       ▼
       the prompt, and the first     the finished block, whose keys and values are kept, and in the same pass
       block's first step            the next block's first step (`shifted`: its seed, from the last logit)

Keys and values of a finished block never change, so each is computed once; there is no such pass after the last block.
Rows walk from block to block together: a row that is done with a block waits, one that has ended draws nothing any more.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.diffusion.block_cache import BlockCache
from pipeline.diffusion.blocks import BlockLayout, sequence_ids, token_ids, window_starts
from pipeline.diffusion.commit import propose, slots_to_commit
from pipeline.diffusion.decoded import Decoded
from pipeline.diffusion.keys import Purpose, fold
from pipeline.models.attention import CLEAN, TokenIds, join
from pipeline.models.decoder import KeyValueCache, empty_cache


class RolloutState(NamedTuple):
    """A batch of rollouts between two moves.

    Attributes:
      tokens_BL: the canvas, int32; the mask id where nothing is committed yet.
      commit_steps_BL, log_probs_BL: as in `Decoded`, at logical positions.
      cache: keys and values of every token left of the active block.
      hidden_BSD: the states that predict the active block's slots, slot for slot, until `decide` has used them.
      seeding: they predict only the block's seed (`shifted`).
      block: int32, blocks finished.
      step: int32, denoising steps taken in the active block.
      pending_B: the row has an unresolved slot in the active block and has not ended.
      ended_B: the row draws nothing any more.
      forwards_B, commit_passes_B: as in `Decoded`.
    """

    tokens_BL: Array
    commit_steps_BL: Array
    log_probs_BL: Array
    cache: BlockCache
    hidden_BSD: Array
    seeding: Array
    block: Array
    step: Array
    pending_B: Array
    ended_B: Array
    forwards_B: Array
    commit_passes_B: Array

    def with_cache_length(self, length: int) -> "RolloutState":
        """The same state with room for ``length`` columns."""
        return self._replace(cache=self.cache.with_length(length))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockRollout:
    """What stays the same during a rollout, and the moves. A pytree: the static fields decide the compiled program.

    Args:
      model: the decoder.
      prompt_lengths_B: int32 ``[B]``, in [1, P].
      keys_B: row keys.
      rule, value, temperature: of the sampler; traced, so that a sweep over them compiles once.
      block_limit: int32, blocks after which every row ends.
      stop_ids_K: int32, tokens that end a row.
      layout, confidence: see `decode`.
      greedy: propose the likeliest token at T = 1.
    """

    model: Any
    prompt_lengths_B: Any
    keys_B: Any
    rule: Any
    value: Any
    temperature: Any
    stop_ids_K: Any
    block_limit: Any
    layout: BlockLayout = field(metadata={"static": True})
    greedy: bool = field(metadata={"static": True})
    confidence: Literal["proposed", "max"] = field(metadata={"static": True})

    @property
    def shifted(self) -> bool:
        return self.layout.alignment == "shifted"

    def begin(self, prompt_tokens_BP: Array) -> RolloutState:
        """Keep the prompt's keys and values up to the first active block, and predict that block."""
        rows, width = prompt_tokens_BP.shape
        size = self.layout.block_size
        state = self._blank(prompt_tokens_BP)
        starts_B = window_starts(self.layout, self.prompt_lengths_B)
        tokens = prompt_tokens_BP
        ids = sequence_ids(self.layout, self.prompt_lengths_B, jnp.arange(width)[None, :] < starts_B[:, None])
        if not self.shifted:
            block_tokens_BS, block_ids = self._block(state, 0)
            tokens, ids = jnp.concatenate([tokens, block_tokens_BS], axis=1), join(ids, block_ids)
        # One cached column that nobody sees: attention needs a key to exist, not to be visible.
        nothing = sequence_ids(self.layout, self.prompt_lengths_B, jnp.zeros((rows, 1), jnp.bool_))
        hidden, written = self.model.extend(tokens, ids, empty_cache(self.model.config, rows, 1), nothing)
        if self.shifted:
            # A row whose first block begins at position 0 has no state before it, and its seed is a prompt token.
            last_B1D = jnp.take_along_axis(hidden, jnp.maximum(starts_B - 1, 0)[:, None, None], axis=1)
            hidden = jnp.broadcast_to(last_B1D, (rows, size, hidden.shape[2]))
        return state._replace(
            cache=BlockCache.of(written, width), hidden_BSD=hidden[:, -size:], seeding=jnp.bool_(self.shifted)
        )

    def denoise(self, state: RolloutState) -> RolloutState:
        """One forward of the active block."""
        tokens_BS, ids = self._block(state, 0)
        hidden_BSD, _ = self.model.extend(tokens_BS, ids, state.cache.view(), self._cache_ids(state))
        return state._replace(hidden_BSD=self._aligned(hidden_BSD), seeding=jnp.bool_(False))

    def predict_next(self, state: RolloutState) -> tuple[Array, KeyValueCache]:
        """One forward of the finished block, with the next block beside it where its tokens are known.

        Returns:
          The states that predict the next block, and the new keys and values, the finished block's first.
        """
        tokens, ids = self._block(state, 0)
        if not self.shifted:
            # Equal to two passes: the finished block does not see the next one, which sees it as the cache will show it.
            next_tokens_BS, next_ids = self._block(state, 1)
            tokens, ids = jnp.concatenate([tokens, next_tokens_BS], axis=1), join(ids, next_ids)
        hidden, written = self.model.extend(tokens, ids, state.cache.view(), self._cache_ids(state))
        return self._aligned(hidden[:, -self.layout.block_size :]), written

    def enter_next(self, state: RolloutState, hidden_BSD: Array, written: KeyValueCache) -> RolloutState:
        """Keep the finished block's keys and values, and go to the next block; takes what `predict_next` returned."""
        decided_nothing_B = ~state.ended_B & (not self.shifted)
        return state._replace(
            cache=state.cache.write(self._positions(state.block), written),
            hidden_BSD=hidden_BSD,
            seeding=jnp.bool_(self.shifted),
            block=state.block + 1,
            step=jnp.int32(0),
            commit_passes_B=state.commit_passes_B + decided_nothing_B.astype(jnp.int32),
        )

    def decide(self, state: RolloutState) -> RolloutState:
        """Commit slots of the active block, and see which rows have ended."""
        positions_BS = self._positions(state.block)
        limits_B1 = (self.prompt_lengths_B + self.layout.completion_length)[:, None]
        generated_BS = (positions_BS >= self.prompt_lengths_B[:, None]) & (positions_BS < limits_B1)
        tokens_BS = _take(state.tokens_BL, positions_BS)
        unresolved_BS = generated_BS & (_take(state.commit_steps_BL, positions_BS) < 0)
        open_BS = unresolved_BS & ~state.ended_B[:, None]
        if self.shifted:
            open_BS &= ~state.seeding | (jnp.arange(self.layout.block_size) == 0)[None, :]

        purpose = jnp.where(state.seeding, jnp.int32(Purpose.SEED), jnp.int32(Purpose.PROPOSAL))
        keys_B = None if self.greedy else fold(self.keys_B, purpose, state.block, state.step)
        logits_BSV = self.model.head(state.hidden_BSD)
        proposal = propose(logits_BSV, keys_B, self.temperature, self.layout.mask_id, self.confidence)
        chosen_BS = slots_to_commit(self.rule, self.value, proposal.confidences_BS, open_BS, state.step)
        if self.shifted:
            chosen_BS = jnp.where(state.seeding, open_BS, chosen_BS)

        tokens_BS = jnp.where(chosen_BS, proposal.tokens_BS, tokens_BS)
        unresolved_BS &= ~chosen_BS
        stop_BS = generated_BS & ~unresolved_BS & self._is_stop(tokens_BS)
        before_stop_BS = jnp.cumsum(stop_BS, axis=1, dtype=jnp.int32) == 0
        stopped_B = jnp.any(stop_BS, axis=1) & ~jnp.any(unresolved_BS & before_stop_BS, axis=1)
        last_B = (positions_BS[:, -1] + 1 >= limits_B1[:, 0]) | (state.block + 1 >= self.block_limit)
        ended_B = state.ended_B | stopped_B | (last_B & ~jnp.any(unresolved_BS, axis=1))

        def write(canvas_BL: Array, values_BS: Array) -> Array:
            # A gather and a select: XLA turns a scatter into a serial loop on CPU.
            slots_BL = jnp.arange(self.layout.length)[None, :] - positions_BS[:, :1]
            inside_BL = (slots_BL >= 0) & (slots_BL < self.layout.block_size) & _take(chosen_BS, slots_BL)
            return jnp.where(inside_BL, _take(values_BS, slots_BL), canvas_BL)

        return state._replace(
            tokens_BL=write(state.tokens_BL, tokens_BS),
            commit_steps_BL=write(state.commit_steps_BL, jnp.broadcast_to(state.step, tokens_BS.shape)),
            log_probs_BL=write(state.log_probs_BL, proposal.log_probs_BS),
            step=jnp.where(state.seeding, state.step, state.step + 1),
            pending_B=~ended_B & jnp.any(unresolved_BS, axis=1),
            ended_B=ended_B,
            forwards_B=state.forwards_B + jnp.any(open_BS, axis=1).astype(jnp.int32),
        )

    def has_room(self, state: RolloutState) -> Array:
        """Whether some row goes on, and the cache can take the active block of each that does."""
        ends_B = self._positions(state.block)[:, -1] + 1
        return ~jnp.all(state.ended_B) & jnp.all(state.ended_B | (ends_B <= state.cache.length))

    def finish(self, state: RolloutState) -> Decoded:
        """The completion, cut out of the canvas."""
        columns_BC = self.prompt_lengths_B[:, None] + jnp.arange(self.layout.completion_length)[None, :]
        tokens_BC = jnp.take_along_axis(state.tokens_BL, columns_BC, axis=1)
        steps_BC = jnp.take_along_axis(state.commit_steps_BL, columns_BC, axis=1)
        stop_BC = (steps_BC >= 0) & self._is_stop(tokens_BC)
        stopped_B = jnp.any(stop_BC, axis=1)
        through_stop_B = jnp.argmax(stop_BC, axis=1).astype(jnp.int32) + 1
        written_B = jnp.sum(steps_BC >= 0, axis=1, dtype=jnp.int32)
        return Decoded(
            tokens_BL=state.tokens_BL,
            commit_step_BC=steps_BC,
            log_prob_BC=jnp.take_along_axis(state.log_probs_BL, columns_BC, axis=1),
            length_B=jnp.where(stopped_B, through_stop_B, written_B),
            truncated_B=~stopped_B,
            forwards_B=state.forwards_B,
            commit_passes_B=state.commit_passes_B,
        )

    def _blank(self, prompt_tokens_BP: Array) -> RolloutState:
        rows = prompt_tokens_BP.shape[0]
        config = self.model.config
        shape = (rows, self.layout.length)
        canvas_BL = jnp.pad(prompt_tokens_BP, ((0, 0), (0, self.layout.completion_length)))
        in_prompt_BL = jnp.arange(self.layout.length)[None, :] < self.prompt_lengths_B[:, None]
        return RolloutState(
            tokens_BL=jnp.where(in_prompt_BL, canvas_BL, self.layout.mask_id or 0),
            commit_steps_BL=jnp.full(shape, -1, jnp.int32),
            log_probs_BL=jnp.zeros(shape, jnp.float32),
            cache=BlockCache.of(empty_cache(config, rows, 0), 0),
            hidden_BSD=jnp.zeros((rows, self.layout.block_size, config.width), config.dtype),
            seeding=jnp.bool_(self.shifted),
            block=jnp.int32(0),
            step=jnp.int32(0),
            pending_B=jnp.ones((rows,), jnp.bool_),
            ended_B=jnp.zeros((rows,), jnp.bool_),
            forwards_B=jnp.zeros((rows,), jnp.int32),
            commit_passes_B=jnp.zeros((rows,), jnp.int32),
        )

    def _aligned(self, hidden_BSD: Array) -> Array:
        # Shifted: slot i is predicted by the state at i − 1, the seed by the last state of the block before.
        return jnp.roll(hidden_BSD, 1, axis=1) if self.shifted else hidden_BSD

    def _positions(self, block: Array | int) -> Array:
        starts_B = window_starts(self.layout, self.prompt_lengths_B) + block * self.layout.block_size
        return starts_B[:, None] + jnp.arange(self.layout.block_size, dtype=jnp.int32)[None, :]

    def _block(self, state: RolloutState, ahead: int) -> tuple[Array, TokenIds]:
        """Tokens and ids of the active block, or of the one ``ahead``; slots past the budget are invalid."""
        positions_BS = self._positions(state.block + ahead)
        exists_BS = positions_BS < (self.prompt_lengths_B + self.layout.completion_length)[:, None]
        ids = token_ids(self.layout, positions_BS, self.prompt_lengths_B, exists_BS, CLEAN)
        return _take(state.tokens_BL, positions_BS), ids

    def _cache_ids(self, state: RolloutState) -> TokenIds:
        columns_1T = jnp.arange(state.cache.length)[None, :]
        return sequence_ids(self.layout, self.prompt_lengths_B, columns_1T < self._positions(state.block)[:, :1])

    def _is_stop(self, tokens_BL: Array) -> Array:
        return jnp.any(tokens_BL[:, :, None] == self.stop_ids_K[None, None, :], axis=2)


def _take(values_BL: Array, columns_BS: Array) -> Array:
    return jnp.take_along_axis(values_BL, columns_BS, axis=1, mode="clip")
