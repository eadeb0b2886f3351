"""How a command ends: its exit code, and one readable sentence."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from contracts.errors import CheckpointError, ConfigError, LimbeckError, PromptError, RunFolderError

if TYPE_CHECKING:
    import launch.folder

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
INPUT_ERRORS = (ConfigError, PromptError, RunFolderError, CheckpointError)


class Outcome:
    """`with Outcome(console):` turns what a command raises into a message and an exit code.

    2: input that cannot be used, and whatever Limbeck refuses before a run has begun. 130: interrupted. 1: anything else.
    The screen gets the error's own sentence; the traceback goes to `error.txt` of the run's folder once there is one, and
    to the screen only for an error that Limbeck did not raise on purpose.

    Attributes:
      folder: of the run that has begun, or None.
    """

    def __init__(self, console: Console):
        self._console = console
        self.folder: launch.folder.RunFolder | None = None

    def __enter__(self) -> "Outcome":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception | KeyboardInterrupt):
            return
        if self.folder is not None:
            self.folder.record_error(error)
        raise SystemExit(self._told(error)) from None

    def _told(self, error: Exception | KeyboardInterrupt) -> int:
        """Say what happened; returns the exit code."""
        if isinstance(error, KeyboardInterrupt):
            kept = self.folder is not None and self.folder.has_checkpoint
            self._say(
                "interrupted", f"--resume continues {self.folder.root}" if kept and self.folder else "nothing was saved"
            )
            return INTERRUPTED
        if isinstance(error, INPUT_ERRORS) or (self.folder is None and isinstance(error, LimbeckError)):
            self._say("limbeck", str(error))
            return BAD_INPUT
        self._say("the run failed" if self.folder else "failed", sentence(error))
        if self.folder is not None:
            self._say("traceback", str(self.folder.error))
        elif not isinstance(error, LimbeckError):
            sys.excepthook(type(error), error, error.__traceback__)
        return FAILED

    def _say(self, head: str, message: str) -> None:
        self._console.print(Text(f"{head}: ", "bold red").append(message, "default not bold"), soft_wrap=True)


def sentence(error: Exception) -> str:
    """The error's message, with its kind in front where the message does not stand by itself."""
    message = str(error).strip()
    return message if isinstance(error, LimbeckError) and message else f"{type(error).__name__}: {message}".rstrip(": ")
