"""From a causal language model to a block-diffusion student: the same weights and a mask token."""

from dataclasses import dataclass


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
