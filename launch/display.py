"""What a run looks like while it runs: a live panel on a terminal, plain lines when piped."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch.readings import LOOP, Readings, Stage, clock, figure, sparkline, stage_label

SECONDS_BETWEEN_LINES = 2.0
LABEL_WIDTH = 16
BAR_WIDTH = 28
SPARK_WIDTH = 28


@runtime_checkable
class Display(Protocol):
    """A recorder that also hears of stages, and is open while a run runs."""

    def __enter__(self) -> "Display": ...

    def __exit__(self, *error: object) -> None: ...

    def progress(self, stage: str, done: int, total: int, **numbers: float) -> None: ...

    def event(self, kind: str, **fields: Any) -> None: ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def samples(self, step: int, samples: Sequence[Any]) -> None: ...


def display(console: Console, readings: Readings) -> Display:
    """The display that suits where the output goes."""
    return LiveDisplay(console, readings) if console.is_terminal else LineDisplay(console, readings)


class LiveDisplay:
    """One panel, redrawn a few times a second."""

    def __init__(self, console: Console, readings: Readings):
        self._readings = readings
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8)

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._readings.finish(failed=error[0] is not None)
        self._live.stop()

    def progress(self, stage: str, done: int, total: int, **numbers: float) -> None:
        self._readings.progress(stage, done, total, **numbers)

    def event(self, kind: str, **fields: Any) -> None:
        self._readings.event(kind, **fields)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._readings.metrics(step, values)

    def samples(self, step: int, samples: Sequence[Any]) -> None:
        self._readings.samples(step, samples)

    def _render(self) -> RenderableType:
        readings = self._readings
        parts: list[RenderableType] = [_stages(readings)]
        if readings.step is not None:
            parts += [Padding(_instruments(readings), (1, 0, 0, 3))]
        return Padding(Group(*parts), (0, 0, 1, 0))


class LineDisplay:
    """A line at the start and end of a stage, and every few seconds in between."""

    def __init__(self, console: Console, readings: Readings):
        self._console = console
        self._readings = readings
        self._last_line = 0.0

    def __enter__(self) -> "LineDisplay":
        return self

    def __exit__(self, *error: object) -> None:
        self._readings.finish(failed=error[0] is not None)

    def progress(self, stage: str, done: int, total: int, **numbers: float) -> None:
        self._readings.progress(stage, done, total, **numbers)
        if done in (0, total) or self._due():
            self._line(self._readings.stages[stage])

    def event(self, kind: str, **fields: Any) -> None:
        known = set(self._readings.stages)
        self._readings.event(kind, **fields)
        for name in self._readings.stages.keys() - known:
            self._line(self._readings.stages[name])
        if kind in ("refuse", "replace", "lost", "unusable", "evaluation", "alarm"):
            shown = {name: figure(value) if isinstance(value, float) else value for name, value in fields.items()}
            self._say("  ".join([kind, *(f"{name} {value}" for name, value in shown.items())]))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._readings.metrics(step, values)
        stage = self._readings.stages[LOOP]
        if stage.done in (1, stage.total) or self._due():
            self._line(stage, self._readings.figures())

    def samples(self, step: int, samples: Sequence[Any]) -> None:
        self._readings.samples(step, samples)

    def _due(self) -> bool:
        return time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES

    def _line(self, stage: Stage, figures: Mapping[str, str] | None = None) -> None:
        figures = figures or {name: figure(value) for name, value in stage.numbers.items()}
        head = [f"{stage_label(stage.name):<16}", *([f"{stage.done}/{stage.total}"] if stage.total else [])]
        self._say(
            "  ".join([clock(self._readings.elapsed), *head, *(f"{name} {value}" for name, value in figures.items())])
        )

    def _say(self, line: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)
        self._console.file.flush()


def _stages(readings: Readings) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=1)
    table.add_column(style="bold", no_wrap=True, min_width=LABEL_WIDTH)
    table.add_column(no_wrap=True, min_width=BAR_WIDTH)
    table.add_column(justify="right", no_wrap=True, min_width=9)
    table.add_column(justify="right", no_wrap=True, style="dim", min_width=5)
    table.add_column(no_wrap=True, style="dim")
    # A copy: this is drawn by a thread of its own, while the run goes on.
    for stage in list(readings.stages.values()):
        mark = (
            Text("✗", "bold red")
            if stage.failed
            else Text("✓", "green")
            if stage.ended is not None
            else Text("●", "cyan")
        )
        numbers = (
            "" if stage.name == LOOP else "  ".join(f"{name} {figure(value)}" for name, value in stage.numbers.items())
        )
        left = "" if stage.left is None else f"{clock(stage.left)} left"
        count = f"{stage.done}/{stage.total}" if stage.total else ""
        table.add_row(mark, stage_label(stage.name), _bar(stage), count, clock(stage.seconds), numbers or left)
    return table


def _bar(stage: Stage) -> RenderableType:
    calm = {"width": BAR_WIDTH, "complete_style": "cyan", "finished_style": "green", "pulse_style": "cyan"}
    if stage.total:
        return ProgressBar(total=stage.total, completed=min(stage.done, stage.total), **calm)
    return "" if stage.ended is not None else ProgressBar(total=None, pulse=True, **calm)


def _instruments(readings: Readings) -> Group:
    """Figures with their course so far; then what has no course."""
    courses, states = _grid(), _grid()
    courses.add_column(style="cyan", no_wrap=True)
    for name, value in readings.figures().items():
        if name in readings.history:
            courses.add_row(name, value, sparkline(readings.history[name], SPARK_WIDTH))
        else:
            states.add_row(name, value)
    if readings.latest is not None:
        sample = readings.latest
        verdict = {True: Text(" ✓", "green"), False: Text(" ✗", "red"), None: Text("")}[sample.correct]
        text = Text(_one_line(sample.prompt), "dim").append(" ").append(_one_line(sample.completion), "not dim")
        states.add_row("latest", text.append(verdict))
    return Group(courses, states)


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, min_width=LABEL_WIDTH)
    table.add_column(no_wrap=True, min_width=8)
    return table


def _one_line(text: str) -> str:
    return " ".join(text.split())[-60:]
