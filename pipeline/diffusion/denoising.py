"""The three moves of a cached rollout. Each is one forward of the active block, then one commit decision.

    begin ──▶ ┌─▶ denoise ──▶ denoise … ─┐
              │                          ▼
              └──────── advance ◀── block resolved, some row goes on     (`same_position`: one forward over the finished
                            │                                             and the next block; `shifted`: over the
                            ▼                                             finished block, whose last logit is the seed)
                         finish ◀── every row has ended

Keys and values of a finished block never change, so each is computed once, in the pass that `advance` makes; there is
none after the last block. Rows walk from block to block together: a row that is done with a block waits, one that has
ended draws nothing any more.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from contracts.work import CommitRule
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
      block: int32, blocks finished.
      step: int32, denoising steps taken in the active block.
      pending_B: the row has an unresolved slot in the active block and has not ended.
      ended_B: the row draws nothing any more.
      forwards_B, commit_passes_B: as in `Decoded`.
    """

    tokens_BL: Array
    commit_steps_BL: Array
    log_probs_BL: Array
    cache: KeyValueCache
    block: Array
    step: Array
    pending_B: Array
    ended_B: Array
    forwards_B: Array
    commit_passes_B: Array

    @property
    def cache_length(self) -> int:
        return self.cache.keys.shape[2]

    def with_cache_length(self, length: int) -> "RolloutState":
        """The same state with room for ``length`` columns."""
        wider = ((0, 0), (0, 0), (0, length - self.cache_length), (0, 0), (0, 0))
        return self._replace(cache=jax.tree.map(lambda part: jnp.pad(part, wider), self.cache))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockRollout:
    """What stays the same during a rollout, and the moves. A pytree: the static fields decide the compiled program.

    Args:
      model: the decoder.
      prompt_lengths_B: int32 ``[B]``, in [1, P].
      keys_B: row keys.
      value, temperature: of the sampler, float32; traced, so that a sweep over them compiles once.
      block_limit: int32, blocks after which every row ends.
      layout, rule, confidence, stop_ids: see `decode`.
      greedy: propose the likeliest token at T = 1.
    """

    model: Any
    prompt_lengths_B: Any
    keys_B: Any
    value: Any
    temperature: Any
    block_limit: Any
    layout: BlockLayout = field(metadata={"static": True})
    rule: CommitRule = field(metadata={"static": True})
    greedy: bool = field(metadata={"static": True})
    confidence: Literal["proposed", "max"] = field(metadata={"static": True})
    stop_ids: tuple[int, ...] = field(metadata={"static": True})

    @property
    def shifted(self) -> bool:
        return self.layout.alignment == "shifted"

    def begin(self, prompt_tokens_BP: Array) -> RolloutState:
        """Keep the prompt's keys and values up to the first active block, and take that block's first step."""
        rows, width = prompt_tokens_BP.shape
        state = self._blank(prompt_tokens_BP)
        starts_B = window_starts(self.layout, self.prompt_lengths_B)
        tokens = prompt_tokens_BP
        ids = sequence_ids(self.layout, self.prompt_lengths_B, jnp.arange(width)[None, :] < starts_B[:, None])
        if not self.shifted:
            block_tokens_BS, block_ids = self._block(state, 0)
            tokens, ids = jnp.concatenate([tokens, block_tokens_BS], axis=1), join(ids, block_ids)
        nothing = sequence_ids(self.layout, self.prompt_lengths_B, jnp.zeros((rows, 1), jnp.bool_))
        hidden, written = self.model.extend(tokens, ids, state.cache, nothing)
        state = state._replace(cache=jax.tree.map(lambda part: part[:, :, :width], written))
        if self.shifted:
            # A row whose first block begins at position 0 has no state before it, and its seed is a prompt token.
            last_B11 = jnp.maximum(starts_B - 1, 0)[:, None, None]
            last_B1D = jnp.take_along_axis(hidden, last_B11, axis=1)
            hidden = jnp.broadcast_to(last_B1D, (rows, self.layout.block_size, hidden.shape[2]))
        return self._decide(state, hidden[:, -self.layout.block_size :], seeding=self.shifted)

    def denoise(self, state: RolloutState) -> RolloutState:
        """One forward of the active block, then one commit decision."""
        tokens_BS, ids = self._block(state, 0)
        hidden_BSD, _ = self.model.extend(tokens_BS, ids, state.cache, self._cache_ids(state))
        return self._decide(state, self._aligned(hidden_BSD), seeding=False)

    def advance(self, state: RolloutState) -> RolloutState:
        """Keep the finished block's keys and values, go to the next block and take its first step."""
        size = self.layout.block_size
        tokens, ids = self._block(state, 0)
        if not self.shifted:
            # Equal to two passes: the finished block does not see the next one, which sees it as the cache will show it.
            next_tokens_BS, next_ids = self._block(state, 1)
            tokens, ids = jnp.concatenate([tokens, next_tokens_BS], axis=1), join(ids, next_ids)
        hidden, written = self.model.extend(tokens, ids, state.cache, self._cache_ids(state))
        rows_B1 = jnp.arange(tokens.shape[0])[:, None]
        columns_BS = self._positions(state.block)

        def keep(cache: Array, new: Array) -> Array:
            return cache.at[:, rows_B1, columns_BS].set(new[:, :, :size], mode="drop")

        decided_nothing_B = ~state.ended_B & (not self.shifted)
        state = state._replace(
            cache=jax.tree.map(keep, state.cache, written),
            block=state.block + 1,
            step=jnp.int32(0),
            commit_passes_B=state.commit_passes_B + decided_nothing_B.astype(jnp.int32),
        )
        return self._decide(state, self._aligned(hidden[:, -size:]), seeding=self.shifted)

    def has_room(self, state: RolloutState) -> Array:
        """Whether the cache can take the active block of every row that goes on."""
        ends_B = self._positions(state.block)[:, -1] + 1
        return jnp.all(state.ended_B | (ends_B <= state.cache_length))

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
        shape = (rows, self.layout.length)
        canvas_BL = jnp.pad(prompt_tokens_BP, ((0, 0), (0, self.layout.completion_length)))
        in_prompt_BL = jnp.arange(self.layout.length)[None, :] < self.prompt_lengths_B[:, None]
        return RolloutState(
            tokens_BL=jnp.where(in_prompt_BL, canvas_BL, self.layout.mask_id or 0),
            commit_steps_BL=jnp.full(shape, -1, jnp.int32),
            log_probs_BL=jnp.zeros(shape, jnp.float32),
            # One column that nobody sees: attention needs a key to exist, not to be visible.
            cache=empty_cache(self.model.config, rows, 1),
            block=jnp.int32(0),
            step=jnp.int32(0),
            pending_B=jnp.ones((rows,), jnp.bool_),
            ended_B=jnp.zeros((rows,), jnp.bool_),
            forwards_B=jnp.zeros((rows,), jnp.int32),
            commit_passes_B=jnp.zeros((rows,), jnp.int32),
        )

    def _decide(self, state: RolloutState, hidden_BSD: Array, *, seeding: bool) -> RolloutState:
        """Commit slots of the active block, given the states that predict them, slot for slot."""
        positions_BS = self._positions(state.block)
        limits_B1 = (self.prompt_lengths_B + self.layout.completion_length)[:, None]
        generated_BS = (positions_BS >= self.prompt_lengths_B[:, None]) & (positions_BS < limits_B1)
        tokens_BS = _take(state.tokens_BL, positions_BS)
        unresolved_BS = generated_BS & (_take(state.commit_steps_BL, positions_BS) < 0)
        open_BS = unresolved_BS & ~state.ended_B[:, None]
        if seeding:
            open_BS &= (jnp.arange(self.layout.block_size) == 0)[None, :]

        purpose = Purpose.SEED if seeding else Purpose.PROPOSAL
        keys_B = None if self.greedy else fold(self.keys_B, int(purpose), state.block, state.step)
        logits_BSV = self.model.head(hidden_BSD)
        proposal = propose(logits_BSV, keys_B, self.temperature, self.layout.mask_id, self.confidence)
        chosen_BS = open_BS
        if not seeding:
            chosen_BS = slots_to_commit(self.rule, self.value, proposal.confidences_BS, open_BS, state.step)

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
            step=state.step if seeding else state.step + 1,
            pending_B=~ended_B & jnp.any(unresolved_BS, axis=1),
            ended_B=ended_B,
            forwards_B=state.forwards_B + jnp.any(open_BS, axis=1).astype(jnp.int32),
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
        columns_1T = jnp.arange(state.cache_length)[None, :]
        return sequence_ids(self.layout, self.prompt_lengths_B, columns_1T < self._positions(state.block)[:, :1])

    def _is_stop(self, tokens_BL: Array) -> Array:
        return jnp.any(tokens_BL[:, :, None] == jnp.asarray(self.stop_ids, jnp.int32)[None, None, :], axis=2)


def _take(values_BL: Array, columns_BS: Array) -> Array:
    return jnp.take_along_axis(values_BL, columns_BS, axis=1, mode="clip")
