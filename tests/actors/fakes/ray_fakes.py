"""Workers without a model that misbehave on request; importable in Ray's workers through PYTHONPATH (see conftest.py)."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from contracts.errors import ConfigError, StaleBatchError
from contracts.roles import Tree
from contracts.weights import WeightVersion
from contracts.work import Rollout, RolloutRequest, TeacherTargets
from pipeline.config import RunConfig, parse_config
from pipeline.testing import FakeRolloutWorker, FakeTeacher


def run_config(**runner: Any) -> RunConfig:
    """The smallest config; keywords are settings of ``runner``."""
    return parse_config(
        {
            "run": {"name": "fake"},
            "task": {"name": "split", "prompt_length": 4, "completion_length": 4},
            "teacher": {"steps": 1},
            "diffusion": {"block_size": 2},
            "training": {"steps": 3, "rows": 2, "micro_batches": 2},
            "runner": {"rollout": {"count": 1}, "start_deadline": 60.0, "item_deadline": 60.0, **runner},
        }
    )


def tiny_config(folder: Path, **sections: Any) -> RunConfig:
    """A config of a real run that takes seconds; keywords are whole sections."""
    return parse_config(
        {
            "run": {"name": "tiny", "folder": str(folder), "cache": str(folder / "cache")},
            "task": {"name": "split", "prompt_length": 3, "completion_length": 6},
            "model": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 32},
            "teacher": {"steps": 2, "rows": 8},
            "diffusion": {"block_size": 3},
            "rollout": {"rule": "static", "value": 2},
            "training": {"steps": 2, "rows": 2, "micro_batches": 2},
            "evaluation": {"rows": 4, "batch": 4, "diversity_samples": 1, "diversity_prompts": 1},
            "runner": {"rollout": {"count": 1}, "start_deadline": 120.0, "item_deadline": 120.0},
            **sections,
        }
    )


class Scribe(FakeRolloutWorker):
    """A fake student that can be told to sleep, raise, die, or look around."""

    def rest(self, seconds: float, label: str) -> tuple[str, str]:
        time.sleep(seconds)
        return self.name, label

    def join(self, *labels: Any) -> tuple[Any, ...]:
        return labels

    def big(self, numbers: int) -> np.ndarray:
        return np.arange(numbers, dtype=np.float64)

    def total(self, array: np.ndarray) -> float:
        return float(array.sum())

    def refuse(self, text: str) -> None:
        raise StaleBatchError(text)

    def die(self) -> None:
        os._exit(13)

    def history(self) -> list[tuple[int, int]]:
        return self.loads

    def surroundings(self) -> dict[str, str]:
        names = ("NPROC", "JAX_PLATFORMS", "OMP_NUM_THREADS", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
        return {name: os.environ[name] for name in names if name in os.environ} | {
            "platform": jax.devices()[0].platform,
            "devices": str(jax.device_count()),
            "pid": str(os.getpid()),
        }


class Mortal(Scribe):
    """Dies at the first request of a stated item; ``marker`` remembers, beyond this process, that it did."""

    def __init__(self, marker: str, item: int, *, name: str):
        super().__init__(name=name)
        self._marker, self._item = Path(marker), item

    def generate(self, request: RolloutRequest) -> Rollout:
        if request.item == self._item and not self._marker.exists():
            self._marker.touch()
            os._exit(13)
        return super().generate(request)


class Stillborn(Scribe):
    """Dies in its constructor, once."""

    def __init__(self, marker: str, *, name: str):
        if not Path(marker).exists():
            Path(marker).touch()
            os._exit(13)
        super().__init__(name=name)


class Misconfigured(Scribe):
    def __init__(self, *, name: str):
        raise ConfigError(f"{name} has no use for this config")


class Forgetful(Scribe):
    """Acknowledges other weights than it was given, as one does that did not load them."""

    def load(self, version: WeightVersion, tree: Tree, intent: int) -> WeightVersion:
        return replace(super().load(version, tree, intent), fingerprint="0" * 16)

    def generate(self, request: RolloutRequest) -> Rollout:
        raise AssertionError("a worker that does not hold the weights was asked to write")


class Fickle(FakeTeacher):
    """A teacher whose replacement holds other weights, and which dies at its first work."""

    def __init__(self, marker: str, *, name: str):
        super().__init__(name=name)
        self._marker = Path(marker)

    def load(self, tree: Tree) -> str:
        return "second" if self._marker.exists() else "first"

    def score(self, rollout: Rollout) -> TeacherTargets:
        if not self._marker.exists():
            self._marker.touch()
            os._exit(13)
        return super().score(rollout)
