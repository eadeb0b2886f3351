"""The student's scorer: one forward over a clean and a noisy copy of each row, aligned to the noisy slots.

    columns   0 ......... S−1 | S ............ S+W−1          S = layout.context_length, W = layout.window
    stream    clean sequence  | noisy window                  position of window slot j = window start + j
    sees      clean, own and  | noisy of its own block,
              earlier blocks  | clean of earlier blocks

So every block is scored with the clean context it has at rollout, all blocks in one forward.
Source: Arriola et al. 2025, Block Diffusion, section 3.2 (vectorised training).
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from contracts.errors import BatchValueError
from pipeline.diffusion.blocks import BlockLayout, sequence_ids, window_ids, window_positions
from pipeline.models.attention import join
from pipeline.models.conversion import Append, Reserved, drop_mask_logit
from pipeline.models.decoder import Decoder

ModelInputs = Mapping[str, Any]


def two_stream_inputs(
    *,
    clean_tokens_BL: Int[Array, "B L"],
    clean_valid_BL: Bool[Array, "B L"],
    noisy_tokens_BW: Int[Array, "B W"],
    noisy_valid_BW: Bool[Array, "B W"],
    prompt_lengths_B: Int[Array, "B"],
    **beside: Array,
) -> dict[str, Array]:
    """What the student's scorer takes, as the `model_inputs` of a `DiffusionTokenBatch`.

    Args:
        clean_tokens_BL: Prompt and completion through the stop; anything where invalid.
        clean_valid_BL: Which columns those are.
        noisy_tokens_BW: The window's canvas: prompt tokens, committed tokens, mask ids.
        noisy_valid_BW: Slots of blocks that the rollout reached.
        prompt_lengths_B: int32, in [1, P].
        beside: Batch-major arrays that the scorer ignores and metrics read.
    """
    return {
        "clean_tokens": clean_tokens_BL,
        "clean_valid": clean_valid_BL,
        "noisy_tokens": noisy_tokens_BW,
        "noisy_valid": noisy_valid_BW,
        "prompt_lengths": prompt_lengths_B,
        **beside,
    }


def student_logits_fn(layout: BlockLayout) -> Callable[[Decoder, ModelInputs], Array]:
    """The `DiffusionLogitsFn` of a layout: `(model, model_inputs) -> [B, W, V_loss]` float32, aligned to the window."""
    score = student_hidden_fn(layout)

    def logits(model: Decoder, model_inputs: ModelInputs, /) -> Float[Array, "B W V"]:
        return loss_logits(model.head(score(model, model_inputs)), layout)

    return logits


def student_hidden_fn(layout: BlockLayout) -> Callable[[Decoder, ModelInputs], Array]:
    """As `student_logits_fn`, but the states `[B, W, D]` before the head, for losses that run the head in chunks."""

    def hidden(model: Decoder, model_inputs: ModelInputs, /) -> Float[Array, "B W D"]:
        if layout.is_causal:
            return _causal(layout, model, model_inputs)
        if layout.context == "corrupted":
            return _one_canvas(layout, model, model_inputs)
        return _two_streams(layout, model, model_inputs)

    return hidden


def loss_logits(logits: Float[Array, "*lead V"], layout: BlockLayout) -> Float[Array, "*lead V_loss"]:
    """Logits of a model that has the mask row, over the loss vocabulary.

    Raises:
        BatchValueError: The layout's mask id is not where it says in a head of this width.
    """
    width = logits.shape[-1]
    if layout.mask is None:
        return logits
    if (isinstance(layout.mask, Append) and layout.mask_id != width - 1) or (layout.mask_id or 0) >= width:
        where = "appended" if layout.mask_appended else "reserved"
        raise BatchValueError(f"{where} mask id {layout.mask_id} does not fit a head of {width} columns")
    return drop_mask_logit(logits, layout.mask)


def loss_head(model: Decoder, layout: BlockLayout) -> tuple[Array, Array | None]:
    """The student's head over the loss vocabulary, for losses that run it in chunks.

    Returns:
        Kernel `[D, V_loss]` in the weights' dtype, and a float32 bias `[V_loss]` that is −inf at a reserved mask id and
        0 elsewhere, or None: `loss_logits(model.head(h)) = h @ kernel + bias`.
    """
    kernel_DV = model.head_kernel()
    if isinstance(layout.mask, Append):
        return kernel_DV[:, :-1], None
    if isinstance(layout.mask, Reserved):
        return kernel_DV, jnp.zeros((kernel_DV.shape[1],), jnp.float32).at[layout.mask.id].set(-jnp.inf)
    return kernel_DV, None


def _two_streams(layout: BlockLayout, model: Decoder, inputs: ModelInputs) -> Array:
    prompt_lengths_B = inputs["prompt_lengths"]
    context = layout.context_length
    clean_ids = sequence_ids(layout, prompt_lengths_B, inputs["clean_valid"][:, :context])
    ids = join(clean_ids, window_ids(layout, prompt_lengths_B, inputs["noisy_valid"]))
    tokens = jnp.concatenate([inputs["clean_tokens"][:, :context], inputs["noisy_tokens"]], axis=1)
    if layout.alignment == "same_position":
        return model.hidden(tokens, ids, outputs_from=context)
    slots_W = jnp.arange(layout.window, dtype=jnp.int32)
    # A seed is the first slot of its block: the last clean token before it predicts it.
    seed_index_BW = window_positions(layout, prompt_lengths_B) - 1
    index_BW = jnp.where((slots_W % layout.block_size == 0)[None], seed_index_BW, (context + slots_W - 1)[None])
    return gather_columns(model.hidden(tokens, ids), index_BW)


def _causal(layout: BlockLayout, model: Decoder, inputs: ModelInputs) -> Array:
    """Every slot is a seed: the clean stream alone, an ordinary causal forward."""
    context = layout.context_length
    ids = sequence_ids(layout, inputs["prompt_lengths"], inputs["clean_valid"][:, :context])
    hidden = model.hidden(inputs["clean_tokens"][:, :context], ids)
    return gather_columns(hidden, window_positions(layout, inputs["prompt_lengths"]) - 1)


def _one_canvas(layout: BlockLayout, model: Decoder, inputs: ModelInputs) -> Array:
    """Noise everywhere: later blocks see earlier ones as corrupted as they are. Only for comparison."""
    prompt_lengths_B = inputs["prompt_lengths"]
    positions_BW = window_positions(layout, prompt_lengths_B)
    slot_BL = jnp.arange(layout.length, dtype=jnp.int32)[None] - positions_BW[:, :1]
    inside_BL = (slot_BL >= 0) & (slot_BL < layout.window)
    slot_BL = jnp.clip(slot_BL, 0, layout.window - 1)
    noisy_BL = inside_BL & jnp.take_along_axis(inputs["noisy_valid"], slot_BL, axis=1)
    canvas_BL = jnp.where(
        noisy_BL, jnp.take_along_axis(inputs["noisy_tokens"], slot_BL, axis=1), inputs["clean_tokens"]
    )
    valid_BL = noisy_BL | inputs["clean_valid"]
    hidden = model.hidden(canvas_BL, sequence_ids(layout, prompt_lengths_B, valid_BL))
    return gather_columns(hidden, positions_BW - (1 if layout.alignment == "shifted" else 0))


def gather_columns(x_BLD: Float[Array, "B L D"], index_BW: Int[Array, "B W"]) -> Float[Array, "B W D"]:
    """Columns by index per row, clipped: an index outside belongs to a slot that does not exist, of weight 0."""
    return jnp.take_along_axis(x_BLD, jnp.clip(index_BW, 0, x_BLD.shape[1] - 1)[:, :, None], axis=1)
