"""Where blocks begin, and the ids that make one attention rule serve every layout.

Rows are right-padded: the prompt at columns `0..p−1`, the completion at `p..p+C−1`; a column is a logical position.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from contracts.errors import ConfigError
from pipeline.models.attention import CLEAN, NOISY, TokenIds
from pipeline.models.conversion import Append, MaskToken, Reserved


@dataclass(frozen=True)
class BlockLayout:
    """How prompt and completion are cut into blocks, and which logit predicts which token; static, hashable.

    Args:
        block_size: Slots of a block, ≥ 1.
        origin: `response`: block 0 starts at the first completion token, the prompt is a prefix. `sequence`: blocks are
            counted from position 0, so the first completion block may begin inside the prompt.
        prompt_attention: Of the prefix under `origin: response`: `causal` or `full`. Under `origin: sequence` the
            prompt is cut into blocks like the rest and this stays `causal`.
        alignment: `same_position`: the logit at i predicts token i. `shifted`: the logit at i − 1 does; the first slot
            of each block is a clean seed, predicted by the last clean logit before it.
        context: `clean`: earlier blocks are seen as clean tokens (two streams). `corrupted`: one canvas, noise and all.
        prompt_length: P, columns of the longest prompt, ≥ 1.
        completion_length: C, completion slots of every row, ≥ 1.
        mask_id: The mask token; None for a causal student (`shifted`, block size 1).
        mask_appended: The mask is the extra last row of the student's vocabulary, not a reserved one.

    Raises:
        ConfigError: A combination that no rollout produces.
    """

    block_size: int
    origin: Literal["response", "sequence"]
    prompt_attention: Literal["causal", "full"]
    alignment: Literal["same_position", "shifted"]
    context: Literal["clean", "corrupted"]
    prompt_length: int
    completion_length: int
    mask_id: int | None
    mask_appended: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "prompt_length", "completion_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, legal in (
            ("origin", ("response", "sequence")),
            ("prompt_attention", ("causal", "full")),
            ("alignment", ("same_position", "shifted")),
            ("context", ("clean", "corrupted")),
        ):
            if getattr(self, name) not in legal:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown: use one of {', '.join(legal)}")
        if self.origin == "sequence" and self.prompt_attention == "full":
            raise ConfigError(
                "prompt_attention='full' has no meaning with origin='sequence', where the prompt is cut into blocks:"
                " use prompt_attention='causal' or origin='response'"
            )
        if self.mask_id is None and not self.is_causal:
            raise ConfigError(
                f"alignment={self.alignment!r} with block_size={self.block_size} needs a mask id;"
                " only a causal student (alignment='shifted', block_size=1) has none"
            )
        if self.mask_id is not None and self.mask_id < 0:
            raise ConfigError(f"mask_id must be nonnegative, got {self.mask_id}")

    @property
    def is_causal(self) -> bool:
        """Next-token prediction: every slot is a seed."""
        return self.alignment == "shifted" and self.block_size == 1

    @property
    def length(self) -> int:
        """L = P + C, columns of a sequence."""
        return self.prompt_length + self.completion_length

    @property
    def window(self) -> int:
        """W, slots of the noisy window: it starts at the start of the first completion block and holds all of them."""
        head = 0 if self.origin == "response" else self.block_size - 1
        return self.completion_length + head

    @property
    def max_blocks(self) -> int:
        """N, blocks of the window; the last may be shorter."""
        return -(-self.window // self.block_size)

    @property
    def context_length(self) -> int:
        """Columns of the clean stream that some slot can depend on: never the last block of any row."""
        last = (self.completion_length - 1) % self.block_size + 1 if self.origin == "response" else 1
        return self.length - last

    @property
    def mask(self) -> MaskToken | None:
        """Where the mask id lives in the vocabulary."""
        if self.mask_id is None:
            return None
        return Append() if self.mask_appended else Reserved(self.mask_id)


def columns(layout: BlockLayout, rows: int) -> Int[Array, "B L"]:
    """Logical positions of the columns: `[0, L)` in every row, int32."""
    return jnp.broadcast_to(jnp.arange(layout.length, dtype=jnp.int32)[None], (rows, layout.length))


def window_starts(layout: BlockLayout, prompt_lengths_B: Int[Array, "B"]) -> Int[Array, "B"]:
    """Logical position of window column 0: p, or the start of the block that holds p; a block starts there."""
    if layout.origin == "response":
        return prompt_lengths_B
    return prompt_lengths_B // layout.block_size * layout.block_size


def window_positions(layout: BlockLayout, prompt_lengths_B: Int[Array, "B"]) -> Int[Array, "B W"]:
    """Logical positions of the window's slots; a row's slots past p + C − 1 do not exist."""
    offsets_W = jnp.arange(layout.window, dtype=jnp.int32)
    return window_starts(layout, prompt_lengths_B)[:, None] + offsets_W[None]


def block_ids(layout: BlockLayout, positions_BL: Int[Array, "B L"], prompt_lengths_B: Int[Array, "B"]) -> Array:
    """Block of each position, int32 `[B, L]`: `(pos − origin) // block_size`, floored.

    A causal prompt is told to the one attention rule by making each prompt token a block of its own (negative ids, in
    order); a full prompt is block −1 as a whole.
    """
    if layout.origin == "sequence":
        return positions_BL // layout.block_size
    offsets_BL = positions_BL - prompt_lengths_B[:, None]
    prompt_BL = offsets_BL if layout.prompt_attention == "causal" else jnp.full_like(offsets_BL, -1)
    return jnp.where(offsets_BL < 0, prompt_BL, offsets_BL // layout.block_size)


def sequence_ids(layout: BlockLayout, prompt_lengths_B: Int[Array, "B"], valid_BL: Bool[Array, "B L"]) -> TokenIds:
    """Ids of the clean stream: column = position, segment 1 where valid.

    Args:
        layout: The layout.
        prompt_lengths_B: int32, in [1, P].
        valid_BL: Which columns hold a token; may be cut to the first columns.
    """
    positions_BL = columns(layout, valid_BL.shape[0])[:, : valid_BL.shape[1]]
    return token_ids(layout, positions_BL, prompt_lengths_B, valid_BL, CLEAN)


def window_ids(layout: BlockLayout, prompt_lengths_B: Int[Array, "B"], valid_BW: Bool[Array, "B W"]) -> TokenIds:
    """Ids of the noisy stream: the window's slots, segment 1 where valid."""
    return token_ids(layout, window_positions(layout, prompt_lengths_B), prompt_lengths_B, valid_BW, NOISY)


def token_ids(
    layout: BlockLayout, positions_BL: Array, prompt_lengths_B: Array, valid_BL: Array, stream: int
) -> TokenIds:
    """Ids of tokens at any positions, all of one stream."""
    return TokenIds(
        positions_BL,
        block_ids(layout, positions_BL, prompt_lengths_B),
        valid_BL.astype(jnp.int32),
        jnp.full_like(positions_BL, stream),
    )
