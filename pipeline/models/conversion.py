"""From a causal language model to a block-diffusion student: the same weights and a mask token.

Source: the conversion of autoregressive models, Gong et al. 2025, Scaling Diffusion Language Models via Adaptation from
Autoregressive Models.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from contracts.errors import ConfigError
from pipeline.models.config import DecoderConfig
from pipeline.models.decoder import Decoder
from pipeline.models.tree import parameters, with_parameters


@dataclass(frozen=True)
class Append:
    """The mask token is a new last row of the vocabulary."""


@dataclass(frozen=True)
class Reserved:
    """The mask token is an existing row that the tokenizer leaves free; only the config can know which.

    Args:
        id: That row, ≥ 0.
    """

    id: int


MaskToken = Append | Reserved


def convert_to_block_diffusion(teacher: Decoder, mask: MaskToken) -> tuple[Decoder, int]:
    """A student with copies of the teacher's weights and a mask row, initialised with the mean of the other rows.

    Args:
        teacher: The causal model; left as it is, and no array of it is shared (a trainer may donate the student's).
        mask: Where the mask token lives. `Append` also adds a column to an untied head; its logit is never used.

    Returns:
        The student and the mask id.

    Raises:
        ConfigError: The reserved id is not a row of the embedding.
    """
    config = teacher.config
    weights = {name: jnp.array(array, copy=True) for name, array in parameters(teacher).items()}
    table_VD = weights["embedding.table"]
    if isinstance(mask, Append):
        mask_id = config.vocab_size
        config = replace(config, vocab_size=mask_id + 1)
        weights["embedding.table"] = jnp.concatenate([table_VD, _mean_row(table_VD)])
        if not config.tied_head:
            kernel_DV = weights["lm_head.kernel"]
            weights["lm_head.kernel"] = jnp.concatenate([kernel_DV, _mean_row(kernel_DV.T).T], axis=1)
    else:
        mask_id = mask.id
        if not 0 <= mask_id < config.vocab_size:
            raise ConfigError(
                f"reserved mask id {mask_id} is not among the {config.vocab_size} rows of the embedding:"
                " name a free row below that, or use mask: append"
            )
        others_VD = jnp.delete(table_VD, mask_id, axis=0)
        weights["embedding.table"] = table_VD.at[mask_id].set(_mean_row(others_VD)[0])
    blank = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return with_parameters(blank, weights), mask_id


def drop_mask_logit(logits: Float[Array, "*lead V"], mask: MaskToken) -> Float[Array, "*lead V_loss"]:
    """Logits over the loss vocabulary, which is every id but the mask id; without it no softmax can reach the mask.

    Args:
        logits: Of a model that has the mask row.
        mask: `Append`: the last column is cut off. `Reserved`: its column becomes −inf and the width stays.
    """
    if isinstance(mask, Append):
        return logits[..., :-1]
    ids_V = jnp.arange(logits.shape[-1]).reshape((1,) * (logits.ndim - 1) + (-1,))
    return jnp.where(ids_V == mask.id, jnp.asarray(-jnp.inf, logits.dtype), logits)


def check_mask_id(
    mask_id: int, *, pad_id: int | None, bos_id: int | None, eos_id: int | None, stop_ids: Collection[int]
) -> None:
    """Refuses a mask id that already means something else.

    Args:
        mask_id: The mask token.
        pad_id: Of the tokenizer; None where it has none, likewise `bos_id`, `eos_id`.
        stop_ids: Every id that ends a completion.

    Raises:
        ConfigError: Naming each role that the id already has.
    """
    roles = {"pad": [pad_id], "bos": [bos_id], "eos": [eos_id], "stop": list(stop_ids)}
    taken = [name for name, ids in roles.items() if mask_id in ids]
    if taken:
        raise ConfigError(
            f"mask id {mask_id} is also {' and '.join(taken)} (pad {pad_id}, bos {bos_id}, eos {eos_id},"
            f" stop {sorted(stop_ids)}): reserve another row, or use mask: append"
        )


def check_head_sizes(
    student: DecoderConfig, teacher: DecoderConfig, mask: MaskToken | None, *, teacher_has_mask: bool = False
) -> None:
    """Refuses a teacher whose loss vocabulary is not the student's; heads are compared, not tokenizers.

    Args:
        student: Its sizes, mask row included.
        teacher: Its sizes.
        mask: Where the student's mask token lives; None for a causal student.
        teacher_has_mask: The teacher is a diffusion model with a mask row of its own in the same place.

    Raises:
        ConfigError: Showing both sizes.
    """
    extra = 1 if isinstance(mask, Append) else 0
    wanted = student.vocab_size - extra * (not teacher_has_mask)
    if teacher.vocab_size != wanted:
        raise ConfigError(
            f"the teacher's head has {teacher.vocab_size} columns, the student's {student.vocab_size}"
            f"{' with its appended mask' if extra else ''}: {wanted} are needed;"
            " cut or pad one head so that equal ids mean equal tokens"
        )


def _mean_row(rows_VD: jax.Array) -> jax.Array:
    mean_D = jnp.mean(rows_VD.astype(jnp.float32), axis=0)
    return mean_D.astype(rows_VD.dtype)[None]
