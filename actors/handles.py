"""A call on Ray, and which of Ray's errors mean what."""

from enum import Enum
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from contracts.errors import DeadlineError, NotDoneError, WorkerLostError
from contracts.work import RolloutRequest

if TYPE_CHECKING:
    from actors.pool import RayPool

LOST_WORKER = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)
"""A worker is gone: these come bare when the called actor itself died."""

LOST_INPUT = (ObjectLostError, *LOST_WORKER)
"""The same, and lost objects, as the *cause* of a `RayTaskError`: the callee lives, what it was given does not."""


FETCH_DEADLINE = 300.0
"""Seconds for a finished result to be brought here: a gibibyte at 4 MB/s."""


class Kind(Enum):
    """Why a call is made."""

    START = "start"
    PREPARE = "prepare"
    LOAD = "load"
    WORK = "work"


class RayHandle:
    """One call: what is asked, and where the result lives once it has run.

    Attributes:
      name: the call, with the request that it goes back to.
      pool: whose call it is; None for a stored value.
      kind, method, arguments: what is called, and why. Kept as long as the handle, so that a result that is lost with its
        node can be asked for again.
      attempts: how often it was sent.
      reference: the result in the object store.
      error: what the call raised.
    """

    def __init__(
        self,
        name: str,
        pool: "RayPool | None" = None,
        kind: Kind = Kind.WORK,
        method: str = "",
        arguments: tuple[Any, ...] = (),
    ):
        self.name = name
        self.pool = pool
        self.kind = kind
        self.method = method
        self.arguments = arguments
        self.attempts = 0
        self.reference: ray.ObjectRef | None = None
        self.error: BaseException | None = None

    def __repr__(self) -> str:
        return self.name

    @property
    def done(self) -> bool:
        return self.reference is not None or self.error is not None

    @property
    def inputs(self) -> "list[RayHandle]":
        """The handles among the arguments."""
        return [argument for argument in self.arguments if isinstance(argument, RayHandle)]

    @property
    def input_error(self) -> BaseException | None:
        """What the work behind one of the arguments raised: it is this call's error, too."""
        return next((given.error for given in self.inputs if given.error is not None), None)

    def lost_inputs(self, cause: Exception) -> "list[RayHandle]":
        """The inputs that the worker did not find; all of them, where the cause does not say which."""
        lost_id = getattr(cause, "object_ref_hex", None)
        named = [given for given in self.inputs if given.reference is not None and given.reference.hex() == lost_id]
        return named or self.inputs

    def wire_arguments(self) -> list[Any]:
        """The arguments as they are sent: references stay references, since they travel inside this list."""
        return [argument.reference if isinstance(argument, RayHandle) else argument for argument in self.arguments]

    def keep(self, reference: "ray.ObjectRef") -> None:
        self.reference = reference

    def fail(self, error: BaseException) -> None:
        self.error, self.reference = error, None

    def lose(self) -> None:
        """The result is gone; the handle is not done any more."""
        self.reference = None

    def result(self) -> Any:
        """The value, brought to this process: for small ones.

        Raises:
          NotDoneError: no waiter has reported it.
          WorkerLostError: it was lost with the node that it lived on.
          DeadlineError: it did not arrive.
        """
        if self.error is not None:
            raise self.error
        if self.reference is None:
            raise NotDoneError(f"{self.name} is not done; wait for it before asking for its result")
        try:
            return fetch(self.reference, self.name)
        except LOST_INPUT as error:
            raise WorkerLostError(f"the result of {self.name} was lost with its node: {first_words(error)}") from error


def fetch(reference: "ray.ObjectRef", name: str, seconds: float = FETCH_DEADLINE) -> Any:
    """The value of a result that exists; Ray alone would wait for ever where it can't be brought here.

    Raises:
      DeadlineError: it did not arrive.
    """
    try:
        return ray.get(reference, timeout=seconds)
    except GetTimeoutError as error:
        raise DeadlineError(
            f"the result of {name} exists but did not arrive within {seconds:g} s: the network between Ray's nodes, or "
            "the object store, is stuck or too slow. See ray status, then resume the run."
        ) from error


def call_name(owner: str, method: str, arguments: tuple[Any, ...]) -> str:
    """A call for people: who does what, and the requests that it goes back to."""
    subjects = [
        argument.request_id if isinstance(argument, RolloutRequest) else getattr(argument, "name", "")
        for argument in arguments
    ]
    return f"{owner}.{method}({', '.join(filter(None, subjects))})"


def raised_by_worker(error: RayTaskError) -> BaseException:
    """The worker's own exception, with the remote traceback as its ``__cause__``; Ray's wrapper has that as its text."""
    cause = error.cause
    if not isinstance(cause, BaseException):
        return error
    cause.__cause__ = error
    return cause


def first_words(error: BaseException, limit: int = 300) -> str:
    """An error's text on one line."""
    return " ".join(str(error).split())[:limit]
