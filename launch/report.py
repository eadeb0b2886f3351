"""What a run says at its end: before, after and teacher side by side, where the time went, what to try next."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launch.folder import RunFolder
from launch.readings import LOOP, clock, stage_label
from pipeline.config import RunConfig, SamplerConfig

NOTHING = "·"
"""In a cell that has no meaning: a teacher writes one token per forward pass whatever the rule."""
BAR = 24
WEAK_TEACHER = 0.97
GOOD = 0.95
MOST_SUGGESTIONS = 4
WAITED = "waited for "
FROM_THE_LEFT = "--rollout.rule prefix --rollout.value 0.9 --objective.soft 1 --objective.hard 0"


def print_report(console: Console, config: RunConfig, folder: RunFolder, summary: Mapping[str, Any]) -> None:
    """Print the end of a run."""
    parts: list[RenderableType] = [results(config, summary)]
    if stages := times(summary["seconds"]):
        parts += [Text("where the time went", "bold"), stages, ""]
    parts += [Text("what to try next", "bold"), suggestions(config, folder, summary), ""]
    parts += [
        Text(f"{folder.root}  weights {summary['weights_fingerprint']}  config {summary['config_digest']}", "dim")
    ]
    console.print(Padding(Group(*parts), (0, 0, 1, 0)), highlight=False)


def results(config: RunConfig, summary: Mapping[str, Any]) -> Table:
    """The student right after the conversion, after a warm start if there was one, and at the end; and the teacher."""
    warmed = config.warm_start.steps > 0
    columns = {"before": "before", **({"warm start": "warm_start"} if warmed else {}), "after": "after"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column(f"{config.run.name}, {summary['steps']} steps", no_wrap=True)
    for heading in [*columns, "teacher"]:
        table.add_column(heading, justify="right", style="bold green" if heading == "after" else None)

    def row(label: str, form: str, teacher: Any, **student: Any) -> None:
        cells = [_cell(student.get(column), form) for column in columns.values()]
        table.add_row(label, *cells, _cell(teacher, form))

    accuracies = {column: summary.get(f"student_accuracy_{column}") for column in columns.values()}
    row(f"accuracy at {rule_label(config.deployed_sampler)}", ".3f", summary.get("teacher_accuracy"), **accuracies)
    for split, value in (summary.get("student_accuracy_held_out") or {}).items():
        row(f"  on {split.replace('_', ' ')} prompts", ".3f", None, after=value)
    row("tokens per forward", ".2f", 1.0, after=summary.get("tokens_per_forward"))
    row("accuracy, one forward per block", ".3f", None, after=summary.get("accuracy_one_forward_per_block"))
    distinct = summary.get("distinct_right_answers") or {}
    row(
        f"distinct right answers of {config.evaluation.diversity_samples}",
        ".1f",
        distinct.get("teacher"),
        after=distinct.get("student"),
        warm_start=distinct.get("student_warm_start"),
    )
    return table


def times(seconds: Mapping[str, float]) -> Table | None:
    """Seconds by stage as bars; under the on-policy steps, whom they waited for. None without stages."""
    waits = {name: value for name, value in seconds.items() if name.startswith(WAITED)}
    stages = {name: value for name, value in seconds.items() if name != "total" and name not in waits}
    total = seconds.get("total", sum(stages.values()))
    if not stages or total <= 0:
        return None
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column()

    def row(label: str, value: float, style: str) -> None:
        if round(value):
            table.add_row(label, clock(value), Text("▇" * round(BAR * value / total), style))

    for name, value in stages.items():
        row(f"  {stage_label(name)}", value, "cyan")
        if name == LOOP:
            for wait, waited in waits.items():
                row(f"    waiting for {wait.removeprefix(WAITED)}", waited, "dim")
    row("  starting, stopping", max(0.0, total - sum(stages.values())), "cyan")
    table.add_row("  total", clock(total), "", style="bold")
    return table


def suggestions(config: RunConfig, folder: RunFolder, summary: Mapping[str, Any]) -> Group:
    """What the numbers ask for, most urgent first; then how to look at the student. Each with its command."""
    again = f"limbeck run --config {folder.config} --run.name {config.run.name}-2"
    prompt = _PROMPTS.get(config.task.name, "...")
    found = [*_asked_for(config, summary, again, f"limbeck eval {folder.root}")][: MOST_SUGGESTIONS - 1]
    found.append(("watch it write, block by block", f'limbeck generate {folder.root} --prompt "{prompt}"'))
    return Group(*(Text(f"  {why}\n").append(f"    {command}", "cyan") for why, command in found))


_PROMPTS = {"split": "42=", "addition": "17+25="}


def _asked_for(config: RunConfig, summary: Mapping[str, Any], again: str, measure: str) -> Iterator[tuple[str, str]]:
    """Reason and command."""
    teacher, after = summary.get("teacher_accuracy"), summary.get("student_accuracy_after")
    at_once = summary.get("accuracy_one_forward_per_block")
    distinct = summary.get("distinct_right_answers") or {}
    fresh = config.model.source == "fresh"
    if fresh and teacher is not None and teacher < WEAK_TEACHER:
        yield (
            f"the teacher is right only {teacher:.0%} of the time",
            f"{again} --teacher.steps {2 * config.teacher.steps}",
        )
    if after is not None and after < GOOD * (teacher or 1.0):
        if fresh and config.warm_start.steps == 0:
            yield "from the raw conversion a student learns slowly", f"{again} --warm_start.steps 1000"
        yield (
            f"the student is right {after:.0%} of the time so far",
            f"{again} --training.steps {2 * config.training.steps}",
        )
    elif at_once is not None and at_once >= GOOD * (teacher or 1.0):
        yield (
            f"with one forward pass per block it is right {at_once:.0%} of the time: it can be deployed that way",
            f"{measure} --evaluation.sampler.rule static --evaluation.sampler.value 1",
        )
    student, original = distinct.get("student"), distinct.get("teacher")
    if student is not None and original and student < original / 3 and config.rollout.rule != "prefix":
        yield (
            f"of the teacher's {original:.1f} right answers it keeps {student:.1f}; commits from the left keep more",
            "limbeck run split-diverse" if config.task.name == "split" else f"{again} {FROM_THE_LEFT}",
        )


def rule_label(sampler: SamplerConfig) -> str:
    """`threshold(0.9)`, with the temperature where it is not greedy."""
    temperature = f", T {sampler.temperature:g}" if sampler.temperature else ""
    return f"{sampler.rule}({sampler.value:g}{temperature})"


def _cell(value: float | None, form: str) -> str:
    return NOTHING if value is None else format(value, form)
