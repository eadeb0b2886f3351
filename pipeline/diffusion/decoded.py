"""What a rollout hands on: tokens, and when and how sure the student was of each."""

from typing import Any, NamedTuple


class Decoded(NamedTuple):
    """What a rollout wrote, and when and how sure it was of each token.

    Attributes:
      tokens_BL: int32 ``[B, L]``, prompt and completion at their logical positions; the mask id where nothing was ever
        committed. Slots after the stop, inside its block, stay as the student saw them.
      commit_step_BC: int32 ``[B, C]``, the denoising step of its block, from 0, at which completion slot c (position
        p + c) was committed; −1 where it was not. The seed of a block (``shifted``) has step 0, like the slots that the
        first forward after it commits.
      log_prob_BC: float32 ``[B, C]``, log-probability of the token then, at the sampler's temperature (1 when greedy)
        over every id but the mask; 0 where ``commit_step_BC`` is −1.
      length_B: int32 ``[B]``, completion tokens through the first stop token, inclusive.
      truncated_B: bool ``[B]``, the budget was spent without a stop token.
      forwards_B: int32 ``[B]``, forward passes of one block that decided a token of this row; with ``shifted`` that
        includes the pass whose last logit is the seed (of the prompt, or of the block before).
      commit_passes_B: int32 ``[B]``, passes of one block that only kept its keys and values. One that shares a forward
        with the next block's first step counts as well: it is that much more work.
    """

    tokens_BL: Any
    commit_step_BC: Any
    log_prob_BC: Any
    length_B: Any
    truncated_B: Any
    forwards_B: Any
    commit_passes_B: Any
