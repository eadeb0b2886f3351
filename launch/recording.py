"""Numbers and events of a run, written as they come: one JSON object a line."""

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np

from contracts.roles import Recorder
from launch.folder import RunFolder


class FileRecorder:
    """Writes metrics.jsonl, events.jsonl and rollouts.jsonl of a run folder.

    Events are never taken back. When a run goes back to a checkpoint it says so by an event ``resume`` with the open
    ``step``; metrics and rollouts from that step on are dropped then, since they will be written again.

    Attributes:
      refused: reason → number of batches refused, over the whole run, earlier parts of a resumed one included.
    """

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._started = time.monotonic()
        self._files: dict[Path, TextIOWrapper] = {}
        self.refused = Counter(event["reason"] for event in read_lines(folder.events) if event["kind"] == "refuse")

    def __enter__(self) -> "FileRecorder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def event(self, kind: str, **fields: Any) -> None:
        if kind == "refuse":
            self.refused[fields["reason"]] += 1
        if kind == "resume":
            self._drop_from(int(fields["step"]))
        self._write(
            self._folder.events, {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind, **fields}
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        elapsed = round(time.monotonic() - self._started, 3)
        self._write(self._folder.metrics, {"step": step, "elapsed": elapsed, **values})

    def samples(self, step: int, samples: Sequence[Any]) -> None:
        for sample in samples:
            self._write(self._folder.rollouts, {"step": step, **asdict(sample)})

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write(self, path: Path, line: Mapping[str, Any]) -> None:
        if path not in self._files:
            self._files[path] = path.open("a", encoding="utf-8", buffering=1)
        self._files[path].write(json.dumps(_plain(line), ensure_ascii=False, allow_nan=False) + "\n")

    def _drop_from(self, step: int) -> None:
        self.close()
        for path in (self._folder.metrics, self._folder.rollouts):
            kept = [line for line in read_lines(path) if line["step"] < step]
            if path.exists():
                path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept), encoding="utf-8")


class Recorders:
    """Tells several recorders the same."""

    def __init__(self, *recorders: Recorder):
        self._recorders = recorders

    def event(self, kind: str, **fields: Any) -> None:
        for recorder in self._recorders:
            recorder.event(kind, **fields)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for recorder in self._recorders:
            recorder.metrics(step, values)

    def samples(self, step: int, samples: Sequence[Any]) -> None:
        for recorder in self._recorders:
            recorder.samples(step, samples)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; none if it does not exist. A last line cut off by a kill is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].split("\n") if line]


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write a run's summary, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(
        json.dumps(_plain(summary), indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )
    partial.replace(path)


def _plain(value: Any) -> Any:
    """JSON of any reader: numbers of numpy as numbers, and what JSON has no number for as a text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
