"""Teacher logits aligned to the student's targets: what the teacher says about the token of each window slot."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from contracts.errors import BatchValueError
from pipeline.diffusion.blocks import BlockLayout, columns, window_positions
from pipeline.diffusion.streams import ModelInputs, gather_columns, student_logits_fn
from pipeline.models.attention import causal_ids
from pipeline.models.conversion import Append, Reserved, drop_mask_logit
from pipeline.models.decoder import Decoder


def position_table(
    positions_BL: Int[Array, "B L"], valid_BL: Bool[Array, "B L"], length: int
) -> Int[Array, "B length"]:
    """Physical column of each logical position, L (one past the end) where a position has no token.

    Args:
        positions_BL: Logical positions, distinct within the valid columns of a row.
        valid_BL: Columns that hold a token.
        length: Positions in the table.
    """
    rows_B1 = jnp.arange(positions_BL.shape[0], dtype=jnp.int32)[:, None]
    columns_BL = jnp.broadcast_to(jnp.arange(positions_BL.shape[1], dtype=jnp.int32)[None], positions_BL.shape)
    # Pads go past the end and are dropped: −1 would wrap around and overwrite the last position.
    place_BL = jnp.where(valid_BL & (positions_BL >= 0), positions_BL, length)
    empty = jnp.full((positions_BL.shape[0], length), positions_BL.shape[1], jnp.int32)
    return empty.at[rows_B1, place_BL].set(columns_BL, mode="drop")


def causal_teacher_hidden(
    model: Decoder,
    tokens_BL: Int[Array, "B L"],
    valid_BL: Bool[Array, "B L"],
    prompt_lengths_B: Int[Array, "B"],
    layout: BlockLayout,
    positions_BL: Int[Array, "B L"] | None = None,
) -> Float[Array, "B W D"]:
    """States whose head gives `p(x_i | x_<i)` for the token i of each window slot: those at position i − 1.

    Args:
        model: The causal teacher.
        tokens_BL: The clean sequence: prompt and completion through the stop.
        valid_BL: Its columns; nothing else is seen.
        prompt_lengths_B: int32, in [1, P].
        layout: Of the student.
        positions_BL: Logical positions, where columns are not in order; distinct among valid ones.

    Returns:
        `[B, W, D]`, zeros for a slot whose position i − 1 holds no token.
    """
    if positions_BL is None:
        # In order, the last column predicts a position that is no slot.
        tokens_BL, valid_BL = tokens_BL[:, :-1], valid_BL[:, :-1]
        positions_BL = columns(layout, tokens_BL.shape[0])[:, :-1]
    hidden = model.hidden(tokens_BL, causal_ids(positions_BL, valid_BL))
    table = position_table(positions_BL, valid_BL, layout.length)
    before_BW = window_positions(layout, prompt_lengths_B) - 1
    inside_BW = (before_BW >= 0) & (before_BW < layout.length)
    index_BW = jnp.take_along_axis(table, jnp.clip(before_BW, 0, layout.length - 1), axis=1)
    known_BW = inside_BW & (index_BW < tokens_BL.shape[1])
    return jnp.where(known_BW[:, :, None], gather_columns(hidden, index_BW), jnp.zeros((), hidden.dtype))


def causal_teacher_logits(
    model: Decoder,
    tokens_BL: Int[Array, "B L"],
    valid_BL: Bool[Array, "B L"],
    prompt_lengths_B: Int[Array, "B"],
    layout: BlockLayout,
    positions_BL: Int[Array, "B L"] | None = None,
) -> Float[Array, "B W V"]:
    """Target-aligned logits `[B, W, V_loss]`, float32, of one causal forward on the clean sequence.

    Takes what `causal_teacher_hidden` takes.

    Raises:
        BatchValueError: The teacher's head is not as wide as the loss vocabulary.
    """
    hidden = causal_teacher_hidden(model, tokens_BL, valid_BL, prompt_lengths_B, layout, positions_BL)
    logits = model.head(hidden)
    width = logits.shape[-1]
    if isinstance(layout.mask, Append) and width != layout.mask_id:
        raise BatchValueError(
            f"the causal teacher's head has {width} columns, the student's loss vocabulary {layout.mask_id}:"
            " an appended mask id is one past the teacher's head"
        )
    return drop_mask_logit(logits, layout.mask) if isinstance(layout.mask, Reserved) else logits


def diffusion_teacher_logits(model: Decoder, model_inputs: ModelInputs, layout: BlockLayout) -> Float[Array, "B W V"]:
    """Logits `[B, W, V_loss]` of a block-diffusion teacher on the student's own canvas, aligned as the student's are.

    Args:
        model: A teacher of the student's layout and mask.
        model_inputs: The student's.
        layout: Of both.
    """
    return student_logits_fn(layout)(model, model_inputs)
