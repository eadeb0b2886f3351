"""How a worker is made, wherever it will live."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerSpec:
    """A plain, importable class and its constructor arguments, small and picklable.

    A runtime constructs ``cls(*arguments, name=NAME)`` in the process that the worker lives in.
    """

    cls: type
    arguments: tuple[Any, ...]

    def construct(self, name: str) -> Any:
        return self.cls(*self.arguments, name=name)


@dataclass(frozen=True)
class WorkerSpecs:
    """One `WorkerSpec` a role."""

    rollout: WorkerSpec
    teacher: WorkerSpec
    trainer: WorkerSpec
