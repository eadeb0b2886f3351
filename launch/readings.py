"""The instruments of a run: what the displays show, however they show it."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

LOOP = "on_policy"
"""The stage of the on-policy steps, whose progress comes from the recorder."""

MEASURING, MEASURING_AGAIN = "measuring", "measuring_again"

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = {
    "divergence": "distill/soft_loss",
    "accuracy": "rollout/accuracy",
    "tokens/forward": "rollout/tokens_per_forward",
    "tokens/s": "tokens/s",
}
_WORKERS = ("rollout", "teacher", "trainer")


@dataclass
class Stage:
    """One part of a run and how far it is.

    Attributes:
      began, ended: seconds on the readings' clock; ``ended`` None while it goes on.
      failed: it ended the run.
      first: what was done already when it began (a resumed run).
    """

    name: str
    clock: Callable[[], float]
    began: float
    done: int = 0
    total: int = 0
    first: int = 0
    ended: float | None = None
    failed: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return (self.clock() if self.ended is None else self.ended) - self.began

    @property
    def left(self) -> float | None:
        """Estimated seconds to the end; None when over, or too early to say."""
        made = self.done - self.first
        if self.ended is not None or made < 2:
            return None
        return self.seconds / made * (self.total - self.done)


class Readings:
    """Stages, figures and their history. A recorder, and a listener for progress.

    Args:
      steps: windows the run will close.
      now: a clock, in seconds.
    """

    def __init__(self, steps: int, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._began = now()
        self.steps = steps
        self.stages: dict[str, Stage] = {}
        self.history: dict[str, list[float]] = {}
        self.step: int | None = None
        self.refused = 0
        self._replaced = 0
        self._alarms: list[Mapping[str, Any]] = []
        self._evaluated: Mapping[str, Any] = {}
        self.latest: Any = None
        self._waited: Mapping[str, float] = {}
        self._lag = 0

    def progress(self, stage: str, done: int, total: int, **numbers: float) -> None:
        """``done`` of ``total`` units of a stage (total 0: nobody can say how many).

        A stage begins when it is first named, and the one before it ends then.
        """
        if stage not in self.stages:
            self.finish()
            self.stages[stage] = Stage(stage, self._now, self._now(), first=done)
        entry = self.stages[stage]
        entry.done, entry.total = done, total
        entry.numbers = {**entry.numbers, **numbers}
        if done >= total > 0 and entry.ended is None:
            entry.ended = self._now()

    def event(self, kind: str, **fields: Any) -> None:
        if kind == "refuse":
            self.refused += 1
        elif kind == "alarm":
            self._alarms.append(fields)
        elif kind == "replace":
            self._replaced += 1
        elif kind == "evaluation":
            self._evaluated = fields
            if MEASURING in self.stages and self.stages[MEASURING].ended is None:
                self.finish()
        elif kind == "resume":
            if fields["step"] >= self.steps:
                self.progress(MEASURING_AGAIN, 0, 0)
        elif kind == "publish" and fields["step"] in (0, self.steps):
            self.progress(MEASURING if fields["step"] == 0 else MEASURING_AGAIN, 0, 0)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        if LOOP not in self.stages:
            self.progress(LOOP, step, self.steps)
        shown = dict(values)
        if values.get("seconds", 0.0) > 0 and "rollout/tokens" in values:
            shown["tokens/s"] = values["rollout/tokens"] / values["seconds"]
        for name, key in _SHOWN.items():
            if key in shown:
                self.history.setdefault(name, []).append(float(shown[key]))
        self.step, self._lag = step, int(values.get("lag", 0))
        self._waited = {worker: values.get(f"waited/{worker}", 0.0) for worker in _WORKERS}
        self.progress(LOOP, step + 1, self.steps)

    def samples(self, step: int, samples: Sequence[Any]) -> None:
        if samples:
            self.latest = samples[-1]

    def finish(self, *, failed: bool = False) -> None:
        """Whatever is still open ends now, well or not."""
        for stage in list(self.stages.values()):
            if stage.ended is None:
                stage.ended, stage.failed = self._now(), failed

    def figures(self) -> dict[str, str]:
        """Name → latest value, for reading."""
        shown = {name: figure(values[-1], name) for name, values in list(self.history.items())}
        shown |= {"lag": str(self._lag), "refused": str(self.refused)}
        if self._replaced:
            shown["replaced"] = str(self._replaced)
        if self._alarms:
            last = self._alarms[-1]
            name, value, tolerance = last["metric"].split("/")[-1], figure(last["value"]), figure(last["tolerance"])
            shown["alarms"] = f"{len(self._alarms)}, last {name} {value} > {tolerance} at step {last['step']}"
        total = sum(self._waited.values())
        if total > 0:
            shown["waits for"] = "  ".join(f"{worker} {self._waited[worker] / total:.0%}" for worker in _WORKERS)
        accuracies = {
            name.split("/")[1]: value for name, value in self._evaluated.items() if name.endswith("/accuracy")
        }
        if accuracies:
            parts = "  ".join(f"{split.replace('_', ' ')} {figure(value)}" for split, value in accuracies.items())
            shown["evaluated"] = f"{parts}  after step {self._evaluated['step']}"
        return shown

    @property
    def elapsed(self) -> float:
        """Seconds since the readings began."""
        return self._now() - self._began


def figure(value: float, name: str = "") -> str:
    """A number as short as it can be read."""
    if name in ("tokens/s", "tokens/forward"):
        return f"{value:,.0f}" if name == "tokens/s" else f"{value:.2f}"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6 and name not in _SHOWN:
        return str(int(value))
    return f"{value:.4f}" if 0 < abs(value) < 0.1 else f"{value:.3f}"


def clock(seconds: float) -> str:
    """`1:05`, or `1:02:03` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of a number in block characters: the means of ``width`` equal stretches, from lowest to highest."""
    if len(values) < 2:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low
    return "".join(_BARS[0] if span == 0 else _BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)


def stage_label(name: str) -> str:
    return name.replace("_", " ").replace("on policy", "on-policy")
