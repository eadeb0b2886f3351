"""Block decoding without a cache: one full-canvas forward per denoising step, and plain loops over rows and slots.

The oracle of `pipeline/diffusion/decoding.py`: it shares the model and the sampler's arithmetic (`propose`), and none of
the bookkeeping: blocks, rules, endings and counts are written out a second time, on the host.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from contracts.work import SamplerSettings
from pipeline.diffusion.blocks import BlockLayout, sequence_ids
from pipeline.diffusion.commit import Proposal, propose
from pipeline.diffusion.decoded import Decoded
from pipeline.diffusion.keys import Purpose, fold
from pipeline.models.decoder import Decoder


def decode_uncached(
    model: Decoder,
    prompt_tokens_BP: Int[Array | np.ndarray, "B P"],
    prompt_lengths_B: Int[Array | np.ndarray, "B"],
    row_keys_B: Key[Array, "B"],
    layout: BlockLayout,
    sampler: SamplerSettings,
    stop_ids: tuple[int, ...],
    block_limit: int | None = None,
) -> Decoded:
    """Write completions as `decode` does, from its definition, at O(L²) attention per denoising step.

    Args, Returns: as `decode`, in numpy; ``commit_passes_B`` is 0, because nothing is kept.
    """
    rows, budget, size = len(prompt_lengths_B), layout.completion_length, layout.block_size
    prompts = [int(length) for length in prompt_lengths_B]
    blank = 0 if layout.mask_id is None else layout.mask_id
    tokens_BL = np.full((rows, layout.length), blank, np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BL[row, :prompt] = np.asarray(prompt_tokens_BP)[row, :prompt]
    steps_BC = np.full((rows, budget), -1, np.int32)
    log_probs_BC = np.zeros((rows, budget), np.float32)
    forwards_B = np.zeros(rows, np.int32)
    valid_BL = np.arange(layout.length)[None, :] < np.asarray(prompts)[:, None] + budget
    starts = [prompt if layout.origin == "response" else prompt // size * size for prompt in prompts]
    alive = set(range(rows))

    for block in range(layout.max_blocks if block_limit is None else block_limit):
        slots = {row: range(starts[row] + block * size, starts[row] + (block + 1) * size) for row in alive}
        answer = {row: [i for i in slots[row] if prompts[row] <= i < prompts[row] + budget] for row in alive}
        shift = 1 if layout.alignment == "shifted" else 0
        open_slots = {row: list(answer[row]) for row in alive}
        seeds = {row: [i for i in open_slots[row] if shift and i == slots[row][0]] for row in alive}
        step = 0
        while any(open_slots[row] for row in alive):
            seeding = any(seeds[row] for row in alive)
            # Column of slot j's logit; a seed's is the last one of the block before.
            columns_BS = np.zeros((rows, size), np.int32)
            for row in alive:
                columns_BS[row] = [min(max(i - shift, 0), layout.length - 1) for i in slots[row]]
            purpose = Purpose.SEED if seeding else Purpose.PROPOSAL
            keys_B = None if sampler.temperature == 0 else fold(row_keys_B, int(purpose), block, step)
            logits_BSV = canvas_logits(model, tokens_BL, np.asarray(prompts, np.int32), valid_BL, columns_BS, layout)
            proposal = _propose(logits_BSV, keys_B, sampler.temperature, layout.mask_id, sampler.confidence)
            proposal = jax.device_get(proposal)
            for row in alive:
                undecided = seeds[row] if seeding else open_slots[row]
                if not undecided:
                    continue
                forwards_B[row] += 1
                sure = {i: proposal.confidences_BS[row, i - slots[row][0]] for i in undecided}
                for i in undecided if seeding else _chosen(sampler, sure, step):
                    _commit(i, row, i - slots[row][0], prompts[row], step, proposal, tokens_BL, steps_BC, log_probs_BC)
                    open_slots[row].remove(i)
                stops = [i for i in answer[row] if i not in open_slots[row] and tokens_BL[row, i] in stop_ids]
                if stops and not any(i < stops[0] for i in open_slots[row]):
                    alive = alive - {row}
            if seeding:
                seeds = {row: [] for row in alive}
            else:
                step += 1
        alive = {row for row in alive if answer[row][-1] < prompts[row] + budget - 1}

    length_B, stopped_B = np.zeros(rows, np.int32), np.zeros(rows, np.bool_)
    for row, prompt in enumerate(prompts):
        written = [c for c in range(budget) if steps_BC[row, c] >= 0]
        stops = [c for c in written if tokens_BL[row, prompt + c] in stop_ids]
        stopped_B[row] = bool(stops)
        length_B[row] = stops[0] + 1 if stops else len(written)
    return Decoded(tokens_BL, steps_BC, log_probs_BC, length_B, ~stopped_B, forwards_B, np.zeros(rows, np.int32))


_propose = jax.jit(propose, static_argnames=("mask_id", "confidence"))


@jax.jit(static_argnames="layout")
def canvas_logits(model, tokens_BL, prompt_lengths_B, valid_BL, columns_BS, layout: BlockLayout) -> Array:
    """Float32 logits ``[B, S, V]`` of S columns per row, from a forward pass over the whole canvas ``[B, L]``."""
    hidden_BLD = model.hidden(tokens_BL, sequence_ids(layout, prompt_lengths_B, valid_BL))
    return model.head(jnp.take_along_axis(hidden_BLD, columns_BS[:, :, None], axis=1))


def _commit(i, row, slot, prompt, step, proposal: Proposal, tokens_BL, steps_BC, log_probs_BC):
    tokens_BL[row, i] = proposal.tokens_BS[row, slot]
    steps_BC[row, i - prompt] = step
    log_probs_BC[row, i - prompt] = proposal.log_probs_BS[row, slot]


def _chosen(sampler: SamplerSettings, sure: dict[int, np.float32], step: int) -> list[int]:
    """The commit rules of `slots_to_commit`, for one row, as sentences."""
    best_first = sorted(sure, key=lambda i: (-sure[i], i))
    value = np.float32(sampler.value)
    if sampler.rule == "threshold":
        return [i for i in best_first if sure[i] >= value] or best_first[:1]
    if sampler.rule == "static":
        return best_first[: math.ceil(len(sure) / max(int(sampler.value) - step, 1))]
    if sampler.rule == "factor":
        kept = 0
        while kept < len(sure) and np.float32(kept + 2) * (np.float32(1) - sure[best_first[kept]]) < value:
            kept += 1
        return best_first[: max(kept, 1)]
    left_to_right = sorted(sure)
    run = 0
    while run < len(sure) and sure[left_to_right[run]] >= value:
        run += 1
    return left_to_right[: max(run, 1)]
