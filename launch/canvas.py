"""A completion while it is being written: masks that turn into tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

if TYPE_CHECKING:
    from pipeline.diffusion.blocks import BlockLayout

MASK, STOP = "░", "⏹"


@dataclass(frozen=True)
class Row:
    """One prompt's completion as far as it is written.

    Attributes:
      prompt: as the user gave it.
      slots: token id of each committed slot of the blocks begun so far, None where there is still a mask.
      fresh: slots that the last step committed.
      tokens, forwards: written so far, through the stop if there is one, and forward passes spent on them.
      truncated: there is no stop token (yet).
    """

    prompt: str
    slots: tuple[int | None, ...]
    fresh: frozenset[int]
    tokens: int
    forwards: int
    truncated: bool


def row_of(prompt: str, decoded: Any, row: int, prompt_length: int, layout: "BlockLayout", before: Row | None) -> Row:
    """What a `Decoded` on the host says of one row.

    Args:
      prompt: the prompt's text.
      decoded: the canvas so far.
      row: its index in the batch.
      prompt_length: tokens of the prompt.
      layout: which slots are denoised together; with origin ``sequence`` the first block may begin inside the prompt.
      before: the same row one step earlier, None at the start.
    """
    committed_C = [bool(step >= 0) for step in decoded.commit_step_BC[row]]
    ids_C = decoded.tokens_BL[row, prompt_length : prompt_length + len(committed_C)]
    last = max((slot for slot, committed in enumerate(committed_C) if committed), default=0)
    inside_prompt = prompt_length % layout.block_size if layout.origin == "sequence" else 0
    blocks = (inside_prompt + last) // layout.block_size + 1
    begun = min(blocks * layout.block_size - inside_prompt, len(committed_C))
    length, truncated = int(decoded.length_B[row]), bool(decoded.truncated_B[row])
    if not truncated and all(committed_C[:length]):
        begun = length
    slots = tuple(int(ids_C[slot]) if committed_C[slot] else None for slot in range(begun))
    known = {slot for slot, token in enumerate(before.slots) if token is not None} if before else set()
    fresh = frozenset(slot for slot, token in enumerate(slots) if token is not None and slot not in known)
    return Row(prompt, slots, fresh, length, int(decoded.forwards_B[row]), truncated)


def draw(row: Row, decode: Callable[[Sequence[int]], str], stop_ids: Sequence[int]) -> Text:
    """The row as coloured text: prompt dim, masks as shaded cells, what the last step committed in green."""
    text = Text(row.prompt, "dim", overflow="fold")
    for slot, token in enumerate(row.slots):
        if token is None:
            text.append(MASK, "dim")
        elif token in stop_ids:
            text.append(STOP, "bold green" if slot in row.fresh else "dim")
        else:
            text.append(decode([token]), "bold green" if slot in row.fresh else "not dim")
    return text


def completion(row: Row, decode: Callable[[Sequence[int]], str], stop_ids: Sequence[int]) -> str:
    """The finished completion as one text, without its stop token."""
    tokens = [token for token in row.slots if token is not None]
    return decode([token for token in tokens if token not in stop_ids])
