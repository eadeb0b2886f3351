"""What is measured of a model's answers."""

from collections.abc import Sequence
from typing import TypeVar

from contracts.work import Prompt
from pipeline.data.prompts import PromptRow
from pipeline.data.tasks import Task

Row = TypeVar("Row")


def evenly_spaced(rows: Sequence[Row], count: int) -> list[Row]:
    """``count`` of the rows, from the first to the last at equal distances; all of them if there are no more."""
    if len(rows) <= count:
        return list(rows)
    return [rows[index * (len(rows) - 1) // max(1, count - 1)] for index in range(count)]


def right_answers(task: Task, judged: Sequence[tuple[PromptRow, Sequence[str]]]) -> float | None:
    """Share of right completions over all prompts and samples; None where the task knows no right answer."""
    verdicts = [
        task.correct(Prompt(row.text, row.fields), completion)
        for row, completions in judged
        for completion in completions
    ]
    known = [verdict for verdict in verdicts if verdict is not None]
    return sum(known) / len(known) if known else None


def distinct_right_answers(task: Task, judged: Sequence[tuple[PromptRow, Sequence[str]]], samples: int) -> float | None:
    """Number of distinct right completions among the first ``samples`` of a prompt, averaged over prompts."""
    if right_answers(task, judged) is None or not samples:
        return None
    counts = [
        len({text for text in completions[:samples] if task.correct(Prompt(row.text, row.fields), text)})
        for row, completions in judged
    ]
    return sum(counts) / len(counts)
