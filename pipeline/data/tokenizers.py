"""Text to token ids and back: one protocol, a character tokenizer for toy tasks, and the Hugging Face one.

Two models may only teach each other when their ids mean the same text, so every tokenizer has a digest that is compared
before a run starts.
"""

import hashlib
import importlib
import json
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from contracts.errors import ConfigError, PromptError

if TYPE_CHECKING:
    import tokenizers


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the pipeline may ask of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id that `encode` returns is below it."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a completion, unless the configuration names others."""
        ...

    @property
    def pad_id(self) -> int | None:
        """Id that fills up batches, None where there is none."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Id that begins a text, None where there is none."""
        ...

    @property
    def digest(self) -> str:
        """Hex sha256 over the vocabulary and its merges: equal where equal ids stand for equal text, and only there.

        End tokens and chat templates are apart: models of one vocabulary may differ in them and still teach each other.
        """
        ...

    def encode(self, text: str, /) -> list[int]:
        """The ids of `text`, without any token that the text does not contain."""
        ...

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of `ids`; special tokens are written out, not dropped."""
        ...


class CharacterTokenizer:
    """One id per character, then one id per special token; ids are dense from 0.

    `encode` never produces a special token, so no prompt can contain an end by accident.

    Args:
        alphabet: the characters, in the order of their ids; no repeats.
        specials: names of the special tokens, in the order of their ids, which follow the alphabet's.
        eos: those of the specials that end a completion; by default the first one.

    Raises:
        ConfigError: repeated or empty entries, or an `eos` that is no special.

    >>> tokenizer = CharacterTokenizer("0123456789+=", ["<end>"])
    >>> tokenizer.encode("12+7="), tokenizer.eos_ids, tokenizer.decode([1, 9, 12])
    ([1, 2, 10, 7, 11], (12,), '19<end>')
    """

    def __init__(
        self, alphabet: str, specials: Sequence[str] = ("<end>",), *, eos: Sequence[str] | None = None
    ) -> None:
        tokens = [*alphabet, *specials]
        ends = tuple(specials[:1]) if eos is None else tuple(eos)
        repeated = sorted({token for token in tokens if tokens.count(token) > 1})
        if not alphabet or "" in tokens or repeated:
            raise ConfigError(
                f"the alphabet {alphabet!r} with the specials {list(specials)} must be non-empty, distinct tokens; "
                f"repeated: {repeated}"
            )
        if unknown := [name for name in ends if name not in specials]:
            raise ConfigError(f"{unknown} should end a completion, but the special tokens are {list(specials)}")
        self._tokens = tuple(tokens)
        self._id_of_character = {character: index for index, character in enumerate(alphabet)}
        self._id_of_special = {name: len(alphabet) + index for index, name in enumerate(specials)}
        self.vocab_size = len(tokens)
        self.eos_ids = tuple(self._id_of_special[name] for name in ends)
        self.pad_id = self.bos_id = None
        self.digest = _digest({"alphabet": alphabet, "specials": list(specials)})

    def special_id(self, name: str) -> int:
        """The id of a special token; `ConfigError` if there is none of that name."""
        if name not in self._id_of_special:
            raise ConfigError(f"there is no special token {name!r}; the special tokens are {list(self._id_of_special)}")
        return self._id_of_special[name]

    def encode(self, text: str, /) -> list[int]:
        """One id per character; `PromptError` names the first character outside the alphabet and its position."""
        for position, character in enumerate(text):
            if character not in self._id_of_character:
                raise PromptError(
                    f"character {character!r} at position {position} of {text!r} is not in the alphabet "
                    f"{''.join(self._id_of_character)!r}"
                )
        return [self._id_of_character[character] for character in text]

    def decode(self, ids: Sequence[int], /) -> str:
        """Characters as they are, special tokens by name; `PromptError` names an id outside the vocabulary."""
        _refuse_foreign_ids(ids, self.vocab_size)
        return "".join(self._tokens[index] for index in ids)


class HuggingFaceTokenizer:
    """A `tokenizers.Tokenizer` with its end tokens and, for an instruct model, its chat template.

    Args:
        tokenizer: the tokenizer itself.
        eos_ids: ids that end a completion, each below the tokenizer's size.
        chat_template: a jinja template as transformers understands it, or None for a base model.
        pad_id, bos_id: ids that fill up a batch and begin a text, where the model has such.

    Raises:
        ConfigError: no end token, or one outside the vocabulary.
    """

    def __init__(
        self,
        tokenizer: "tokenizers.Tokenizer",
        eos_ids: Iterable[int],
        chat_template: str | None = None,
        *,
        pad_id: int | None = None,
        bos_id: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.pad_id, self.bos_id = pad_id, bos_id
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_ids = tuple(int(index) for index in eos_ids)
        if not self.eos_ids or any(not 0 <= index < self.vocab_size for index in self.eos_ids):
            raise ConfigError(
                f"the end tokens {list(self.eos_ids)} must be at least one id in [0, {self.vocab_size}), "
                "the tokenizer's vocabulary"
            )
        merges = json.loads(tokenizer.to_str())["model"].get("merges")
        self.digest = _digest({"vocabulary": tokenizer.get_vocab(with_added_tokens=True), "merges": merges})

    @property
    def special_tokens(self) -> dict[int, str]:
        """Id and text of each token that the tokenizer treats as a control token, never as part of a word."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {index: token.content for index, token in sorted(added.items()) if token.special}

    def encode(self, text: str, /) -> list[int]:
        """The ids of `text`; the text of a special token becomes that token, nothing is put before or after.

        Raises:
            PromptError: a byte-level vocabulary lacks a byte of the text, which would otherwise be dropped silently.
        """
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if type(self.tokenizer.decoder).__name__ == "ByteLevel":
            normalizer = self.tokenizer.normalizer
            wanted = normalizer.normalize_str(text) if normalizer is not None else text
            held = self.tokenizer.decode(ids, skip_special_tokens=False)
            if held != wanted:
                position = next(i for i, (a, b) in enumerate(zip_longest(held, wanted)) if a != b)
                raise PromptError(
                    f"the vocabulary cannot write {wanted[position : position + 1]!r} at {position} of {text!r}"
                )
        return ids

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of `ids`, special tokens written out; `PromptError` names an id outside the vocabulary."""
        _refuse_foreign_ids(ids, self.vocab_size)
        return self.tokenizer.decode([int(index) for index in ids], skip_special_tokens=False)


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a package that only an optional extra installs.

    Raises:
        ConfigError: it is not installed; the message says which extra to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"the package {missing.name!r} is needed and not installed: pip install 'limbeck[{extra}]'"
        ) from missing


def _refuse_foreign_ids(ids: Sequence[int], vocab_size: int) -> None:
    for position, index in enumerate(ids):
        if not 0 <= index < vocab_size:
            raise PromptError(f"id {int(index)} at position {position} is outside the vocabulary of {vocab_size} ids")


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
