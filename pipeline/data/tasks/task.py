"""What a task is, and how a configuration finds one."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from contracts.errors import ConfigError
from contracts.work import Prompt

BUILT_IN = {
    "split": "pipeline.data.tasks.split:Split",
    "addition": "pipeline.data.tasks.addition:Addition",
    "instructions": "pipeline.data.tasks.instructions:Instructions",
}

Rows = Sequence[Mapping[str, Any]]


@runtime_checkable
class Task(Protocol):
    """Prompts in, a checker out."""

    def prompts(self) -> Mapping[str, Rows]:
        """Split → JSONL rows, each with a field ``prompt``.

        ``train`` is what the student writes completions for; every other split is only evaluated. A prompts file in the
        configuration takes the place of ``train``.
        """
        ...

    def correct(self, prompt: Prompt, completion: str) -> bool | None:
        """Whether a completion (its text without the stop token) answers the prompt; None where nobody can say."""
        ...


@dataclass(frozen=True)
class Example:
    """A right completion of a prompt, and how often it is drawn relative to others."""

    prompt: str
    completion: str
    weight: float = 1.0


@runtime_checkable
class CorpusTask(Task, Protocol):
    """A task that a fresh teacher can be trained on: it knows right answers."""

    alphabet: str
    """Every character of its prompts and completions."""

    def examples(self) -> Sequence[Example]:
        """All there is to learn, held-out prompts included: the teacher sees everything."""
        ...


def load_task(name: str) -> Task:
    """The built-in task of that name, or an instance of ``package.module:Class``.

    Raises:
      ConfigError: unknown name, or something that is no `Task`.
    """
    path = BUILT_IN.get(name, name)
    module_name, _, class_name = path.partition(":")
    if not class_name:
        raise ConfigError(
            f"task.name: there is no task {name!r}; the built-in ones are {', '.join(BUILT_IN)}, "
            "your own is written package.module:Class"
        )
    try:
        task = getattr(importlib.import_module(module_name), class_name)()
    except (ImportError, AttributeError) as problem:
        raise ConfigError(f"task.name: {name!r} cannot be imported: {problem}") from problem
    if not isinstance(task, Task):
        raise ConfigError(
            f"task.name: {name!r} is no task; it needs the methods prompts() and correct(prompt, completion)"
        )
    return cast(Task, task)
