"""Prompts from a JSONL file, in an order that is a function of the seed and of nothing else.

The global stream index `i` names a draw: epoch `i // rows`, place `i % rows` in that epoch's shuffled order. Whoever
asks for index `i`, whenever, gets the same row, and in each epoch every row comes up exactly once.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grain
import numpy as np
from jaxtyping import Int32

from contracts.errors import PromptError

PROBLEMS_SHOWN = 20
PAD = 0  # Any id would do: padding is known by the lengths, never by its id.


@dataclass(frozen=True)
class PromptRow:
    """One prompt.

    Attributes:
        text: the prompt as the file gives it.
        tokens: its ids as the model reads them, at least one.
        fields: the row's other fields, for the task's checker.
        row_number: index of the row in the file, from 0 (its line number less one).
    """

    text: str
    tokens: tuple[int, ...]
    fields: Mapping[str, Any]
    row_number: int


def read_prompts(
    path: str | Path, encode: Callable[[str], Sequence[int]], *, prompt_length: int, field: str = "prompt"
) -> list[PromptRow]:
    """Read and check a whole JSONL file, one object a line.

    Args:
        path: the file, UTF-8.
        encode: text to ids; a tokenizer's `encode`, or a `ChatPrompt`.
        prompt_length: the most tokens that a prompt may have.
        field: the name of the prompt's field; the others are kept in `PromptRow.fields`.

    Raises:
        PromptError: every problem of the file in one message, each with its line number.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as problem:
        raise PromptError(f"the prompts {path} cannot be read: {problem.strerror or problem}") from problem
    except UnicodeDecodeError as problem:
        raise PromptError(f"the prompts {path} are not UTF-8: {problem.reason} at byte {problem.start}") from problem
    return parse_prompts(text, f"prompts {path}", encode, prompt_length=prompt_length, field=field)


def parse_prompts(
    text: str, name: str, encode: Callable[[str], Sequence[int]], *, prompt_length: int, field: str = "prompt"
) -> list[PromptRow]:
    """Check the text of a JSONL file, one object a line; as `read_prompts`.

    Args:
        text: the lines.
        name: what the messages call it.
    """
    # Not splitlines(): a JSON string may hold U+2028, which is no line end of JSONL.
    lines = text.rstrip().split("\n")
    if lines == [""]:
        raise PromptError(f'the {name} are empty: give one JSON object a line, {{"{field}": "..."}}')
    rows: list[PromptRow] = []
    problems: list[str] = []
    for row_number, line in enumerate(lines):
        try:
            rows.append(_row(_parsed(line), row_number, encode, prompt_length, field))
        except PromptError as problem:
            problems.append(f"{name.removeprefix('prompts ')}:{row_number + 1}: {problem}")
    if problems:
        hidden = len(problems) - PROBLEMS_SHOWN
        more = [f"... and {hidden} more rows"] if hidden > 0 else []
        raise PromptError(
            "\n".join([f"{len(problems)} of {len(lines)} prompts cannot be used:", *problems[:PROBLEMS_SHOWN], *more])
        )
    return rows


class PromptSource:
    """Prompts by global stream index.

    Args:
        rows: the prompts; `read_prompts` makes them from a file.
        prompt_length: P, the padded length of a batch; no prompt may be longer.
        seed: decides the order; any integer >= 0.
        shuffle: False keeps the order of the rows in every epoch.
        epochs: how often the rows are gone through; None for no end.

    Raises:
        PromptError: no rows, or rows that are empty or longer than `prompt_length`.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        *,
        prompt_length: int,
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        if not rows:
            raise PromptError("a prompt source needs at least one row")
        if wrong := [row for row in rows if not 1 <= len(row.tokens) <= prompt_length]:
            shown = "; ".join(f"row {row.row_number}: {len(row.tokens)}" for row in wrong[:PROBLEMS_SHOWN])
            raise PromptError(
                f"{len(wrong)} of {len(rows)} prompts do not have 1 to {prompt_length} tokens (prompt_length): {shown}"
            )
        self.rows = tuple(rows)
        self.prompt_length = prompt_length
        self.epochs = epochs
        order = grain.MapDataset.source(self.rows)
        # grain shuffles epoch e with seed + e: mixed first, neighbouring run seeds share no epoch's order.
        self._order = order.shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0])) if shuffle else order
        content = [[row.text, row.tokens, dict(row.fields)] for row in self.rows]
        self.digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self.rows)

    def __getitem__(self, index: int) -> PromptRow:
        """The row at a global stream index >= 0; `IndexError` past the last epoch."""
        end = None if self.epochs is None else self.epochs * len(self.rows)
        if index < 0 or (end is not None and index >= end):
            bound = "any index >= 0" if end is None else f"{self.epochs} epochs of {len(self.rows)} rows, [0, {end})"
            raise IndexError(f"stream index {index} is outside this source, which has {bound}")
        return cast(PromptRow, self._order[index])

    def batch(self, indices: Sequence[int]) -> tuple[Int32[np.ndarray, "B P"], Int32[np.ndarray, "B"]]:
        """Right-padded prompts of several stream indices.

        Args:
            indices: B stream indices, in the order of the rows.

        Returns:
            `prompt_ids_BP` (P = `prompt_length`) and `prompt_lengths_B`; row b is valid at columns [0, length_b).
        """
        return pad_prompts([self[index] for index in indices], self.prompt_length)


def pad_prompts(
    rows: Sequence[PromptRow], prompt_length: int
) -> tuple[Int32[np.ndarray, "B P"], Int32[np.ndarray, "B"]]:
    """Right-padded ids `[B, P]`, P = `prompt_length`, and lengths `[B]`; row b is valid at columns [0, length_b)."""
    prompt_ids_BP = np.full((len(rows), prompt_length), PAD, dtype=np.int32)
    for place, row in enumerate(rows):
        prompt_ids_BP[place, : len(row.tokens)] = row.tokens
    return prompt_ids_BP, np.array([len(row.tokens) for row in rows], dtype=np.int32)


def _parsed(line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as problem:
        raise PromptError(f"not JSON: {problem.msg} at column {problem.colno}") from problem
    if not isinstance(content, dict):
        raise PromptError(f"a JSON {type(content).__name__}, not an object")
    return content


def _row(
    content: Mapping[str, Any], row_number: int, encode: Callable[[str], Sequence[int]], prompt_length: int, field: str
) -> PromptRow:
    """One checked row; `PromptError` without the place, which the caller knows."""
    if field not in content:
        raise PromptError(f"no field {field!r}; the fields are {sorted(content)}")
    text = content[field]
    if not isinstance(text, str):
        raise PromptError(f"field {field!r} is a {type(text).__name__}, not a string")
    if not text.strip():
        raise PromptError(f"field {field!r} is an empty prompt")
    tokens = tuple(int(token) for token in encode(text))
    if not 1 <= len(tokens) <= prompt_length:
        raise PromptError(
            f"{len(tokens)} tokens, but a prompt has 1 to {prompt_length}: shorten it or raise prompt_length"
        )
    return PromptRow(text, tokens, {name: content[name] for name in content if name != field}, row_number)
