"""The roles and the seams between them. Each protocol is small; fakes are in pipeline/testing.py.

The three workers are plain classes of one shape: constructed from a config, *loaded* with weights, then asked to do one
thing. Pools call them, in process or as Ray actors; the loop knows pools, handles and one waiter, and nothing of either.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from contracts.weights import WeightVersion
from contracts.wire import WireArray
from contracts.work import (
    Evaluation,
    EvaluationRequest,
    ItemReport,
    Rollout,
    RolloutRequest,
    StepReport,
    TeacherTargets,
)

Tree = Mapping[str, WireArray]


@runtime_checkable
class RolloutWorker(Protocol):
    """The student, writing."""

    def load(self, version: WeightVersion, tree: Tree, intent: int) -> WeightVersion:
        """Hold these weights; returns the version with the fingerprint computed over the arrays now held.

        ``intent`` rises with each load that the loop decides on: the newest intent wins, also when it asks for an older
        version, and an older intent that arrives late changes nothing.
        """
        ...

    def generate(self, request: RolloutRequest) -> Rollout: ...

    def evaluate(self, request: EvaluationRequest) -> Evaluation: ...


@runtime_checkable
class TeacherWorker(Protocol):
    """The frozen teacher, scoring what the student wrote."""

    def load(self, tree: Tree) -> str:
        """Hold the teacher's weights; returns their fingerprint as held."""
        ...

    def score(self, rollout: Rollout) -> TeacherTargets: ...


@runtime_checkable
class Trainer(Protocol):
    """The student, learning. Refuses what is not admissible, at the moment of use."""

    def load(self, tree: Tree) -> WeightVersion: ...

    def accumulate(self, rollout: Rollout, targets: TeacherTargets) -> ItemReport: ...

    def update(self) -> StepReport: ...

    def publish(self) -> Tree:
        """The weights of the latest version in wire form, in the dtype in which they are trained."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """A trainer that can go back to where it was, between two windows."""

    def save(self) -> int:
        """Write a checkpoint: state, and every published tree that a later step may be written by; returns the step."""
        ...

    def restore(self) -> list[WeightVersion]:
        """Go to the newest checkpoint; returns the versions that later steps may be written by, in order.

        Raises:
          CheckpointError: there is none, it is damaged, or another run made it.
        """
        ...

    def published(self, step: int) -> Tree:
        """The weights of a version that is still kept, in wire form."""
        ...


@runtime_checkable
class Handle(Protocol):
    """A result that may not exist yet. Only its pool knows where it lives."""

    name: str

    def result(self) -> Any:
        """The value; only of a handle that a `Waiter` reported done. Raises what the work raised."""
        ...


@runtime_checkable
class WorkerPool(Protocol):
    """Workers of one role. Work goes to an idle worker; results belong to the loop."""

    def submit(self, method: str, *arguments: Any) -> Handle:
        """Ask one worker to call ``method``. Arguments that are handles arrive as their values.

        Work is started in the order of submission; a handle among the arguments must be done, unless it comes from this
        same pool.
        """
        ...

    def prepare(self, method: str, *arguments: Any) -> Sequence[Handle]:
        """Have every worker, later replacements included, call ``method`` before anything else; one handle a worker."""
        ...

    def publish(self, version: WeightVersion, tree: Handle) -> None:
        """Make these weights available: a worker loads them before its next request that names ``version``."""
        ...

    def forget(self, kept_steps: frozenset[int]) -> None:
        """Let go of published trees of other steps."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Waiter(Protocol):
    """The one place where time passes."""

    def wait(self, handles: Sequence[Handle], timeout: float) -> list[Handle]:
        """Those that are done, at least one; in the order given.

        Raises:
          DeadlineError: none was done within ``timeout`` seconds; the message names what was waited for.
        """
        ...

    def now(self) -> float:
        """Seconds on this waiter's clock."""
        ...


@runtime_checkable
class Runtime(Protocol):
    """Where a run's workers live: in this process (pipeline/inline.py) or on Ray (actors/runner.py)."""

    @property
    def rollout(self) -> WorkerPool: ...

    @property
    def teacher(self) -> WorkerPool: ...

    @property
    def trainer(self) -> WorkerPool: ...

    @property
    def waiter(self) -> Waiter: ...

    def put(self, name: str, value: Any) -> Handle:
        """Store a value once, to be handed to many workers."""
        ...

    def close(self) -> None:
        """End every worker; what was started for this run is stopped, what was found running is left."""
        ...


@runtime_checkable
class Recorder(Protocol):
    """Where a run's numbers and events go: files, a display, a test's list."""

    def event(self, kind: str, **fields: Any) -> None: ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None: ...

    def samples(self, step: int, samples: Sequence[Any]) -> None: ...
