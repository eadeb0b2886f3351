"""Tasks: prompts in, a checker out. A user's own is any class of this shape, named by its import path."""

from pipeline.data.tasks.task import CorpusTask, Example, Task, load_task

__all__ = ["CorpusTask", "Example", "Task", "load_task"]
