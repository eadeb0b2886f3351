"""The whole loop, against pools.

    PromptSource ──RolloutRequest──▶ rollout pool ──Rollout──▶ teacher pool ──TeacherTargets──┐
         ▲                              ▲      └───────────── Rollout ──────────────────────▶ trainer.accumulate ×N
         └─ item k of step s            │                                                          │ in index order
                                        └────────── WeightVersion + tree ◀── publish ◀── update ◀──┘

    handle       consumes                      waits for                    unblocked by     produces
    rollout      a request                     an idle rollout worker       a published      Rollout
                                                                            version
    targets      a Rollout                     an idle teacher worker       its rollout      TeacherTargets
    accumulated  Rollout + TeacherTargets      every lower item of the step its targets      ItemReport
    updated      N accumulated items           the trainer                  the last item    StepReport, a version
    published    the updated weights           the trainer                  the update       a tree in the store

The loop holds handles and small records, never arrays. Item k of step s is trained while item k + 1 is still being
written by the same weights: gradients are unreduced sums, so overlap inside a step costs no staleness.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from contracts.errors import CheckpointError, FreshnessError
from contracts.freshness import FreshnessPolicy
from contracts.roles import Handle, Recorder, Runtime
from contracts.weights import WeightVersion
from contracts.work import ItemReport, RolloutRequest, StepReport

STAGES = ("rollout", "teacher", "trainer")
MAX_ATTEMPTS = 3
GAP = "distill/log_prob_gap"


@dataclass(frozen=True)
class Item:
    """Work in flight: what it is, and for which micro-batch of which step."""

    what: str
    step: int
    index: int = 0
    rollout: Handle | None = None


@dataclass
class Loop:
    """On-policy distillation from the first open step to the last.

    Args:
      request: (step, item, version) → the request for that micro-batch; a pure function.
      policy: which version writes which step.
      runtime, recorder: the roles and their clock, and where numbers go.
      version: the student's version at the first open step; its tree is already published to the rollout pool.
      versions: step → version, published too, that a checkpoint brought along for steps that lag behind.
      steps: windows to close, counted from step 0 of the run.
      micro_batches: N, items per step.
      deadline: seconds without any result before the run ends.
      gap_tolerance: of ``distill/log_prob_gap`` in a step written by the trainer's own weights: what rounding explains.
        More (or a NaN) is an ``alarm``: the trainer does not see what the rollout saw.
      after_step: called with each new version once it is published.
    """

    request: Callable[[int, int, WeightVersion], RolloutRequest]
    policy: FreshnessPolicy
    runtime: Runtime
    recorder: Recorder
    version: WeightVersion
    steps: int
    micro_batches: int
    deadline: float
    gap_tolerance: float = float("inf")
    after_step: Callable[[WeightVersion], None] = lambda version: None
    versions: dict[int, WeightVersion] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def __post_init__(self):
        self.versions.setdefault(self.version.step, self.version)
        missing = self.policy.steps_kept(self.version.step) - self.versions.keys()
        if missing:
            raise CheckpointError(
                f"going on at step {self.version.step} with max_lag {self.policy.max_lag} needs the versions of steps "
                f"{sorted(missing)} as well; given are {sorted(self.versions)}. Restore them from the same checkpoint."
            )
        self.step = self.version.step
        self.next_item = 0
        self._cursor = (self.step, 0)
        self._flight: dict[Handle, Item] = {}
        self._scored: dict[tuple[int, int], tuple[Handle, Handle]] = {}
        self._reports: list[ItemReport] = []
        self._opened = self.runtime.waiter.now()
        self._attempts: dict[tuple[int, int], int] = {}

    def run(self) -> WeightVersion:
        """Close every window; returns the last version."""
        while self.step < self.steps:
            self._request_rollouts()
            stage, before = self._waiting_for(), self.runtime.waiter.now()
            done = self.runtime.waiter.wait(list(self._flight), self.deadline)
            self.waited[stage] += self.runtime.waiter.now() - before
            for handle in done:
                item = self._flight.pop(handle)
                getattr(self, f"_on_{item.what}")(handle, item)
        return self.version

    @property
    def in_flight(self) -> list[Handle]:
        """Work that was asked for and whose result was not yet taken."""
        return list(self._flight)

    def _request_rollouts(self) -> None:
        step, index = self._cursor
        while step < self.steps and step - self.step <= self.policy.max_lag:
            self._request(step, index)
            step, index = (step, index + 1) if index + 1 < self.micro_batches else (step + 1, 0)
        self._cursor = (step, index)

    def _request(self, step: int, index: int) -> None:
        version = self.versions[self.policy.writer_step(step)]
        handle = self.runtime.rollout.submit("generate", self.request(step, index, version))
        self._flight[handle] = Item("rollout", step, index)

    def _on_rollout(self, handle: Handle, item: Item) -> None:
        targets = self.runtime.teacher.submit("score", handle)
        self._flight[targets] = Item("targets", item.step, item.index, rollout=handle)

    def _on_targets(self, handle: Handle, item: Item) -> None:
        assert item.rollout is not None
        self._scored[item.step, item.index] = (item.rollout, handle)
        self._feed_trainer()

    def _feed_trainer(self) -> None:
        # One call at a time: an item is next only once the one before it has been added, or the window published.
        pair = self._scored.pop((self.step, self.next_item), None)
        if pair is not None:
            handle = self.runtime.trainer.submit("accumulate", *pair)
            self._flight[handle] = Item("accumulated", self.step, self.next_item)

    def _on_accumulated(self, handle: Handle, item: Item) -> None:
        try:
            report = handle.result()
        except FreshnessError as refusal:
            self._refused(refusal, item)
            return
        self._reports.append(report)
        self.next_item += 1
        if self.next_item < self.micro_batches:
            self._feed_trainer()
        else:
            self._flight[self.runtime.trainer.submit("update")] = Item("updated", self.step)

    def _refused(self, refusal: FreshnessError, item: Item) -> None:
        key = (item.step, item.index)
        self._attempts[key] = self._attempts.get(key, 0) + 1
        self.recorder.event(
            "refuse", reason=refusal.reason, step=item.step, item=item.index, detail=str(refusal).splitlines()[0]
        )
        if self._attempts[key] >= MAX_ATTEMPTS:
            raise refusal
        self._request(*key)

    def _on_updated(self, handle: Handle, item: Item) -> None:
        report: StepReport = handle.result()
        self.version = report.version
        self.versions[report.version.step] = report.version
        self._flight[self.runtime.trainer.submit("publish")] = Item("published", item.step)
        values = {**report.metrics, **self._statistics()}
        self.recorder.metrics(item.step, values)
        self._check_gap(item.step, values)
        self.recorder.samples(item.step, [sample for part in self._reports for sample in part.samples])
        self.recorder.event(
            "update",
            step=item.step,
            skipped=report.skipped,
            items=[
                {"item": part.item, "worker": part.worker, "written_by": str(part.version)} for part in self._reports
            ],
        )
        self._reports = []

    def _check_gap(self, step: int, values: Mapping[str, float]) -> None:
        # A lagging step was written by other weights: its gap measures the lag.
        if GAP in values and values["lag"] == 0 and not values[GAP] <= self.gap_tolerance:
            self.recorder.event(
                "alarm", step=step, metric=GAP, value=values[GAP], tolerance=self.gap_tolerance, lag=values["lag"]
            )

    def _on_published(self, handle: Handle, item: Item) -> None:
        self.runtime.rollout.publish(self.version, handle)
        self.step, self.next_item = item.step + 1, 0
        kept = self.policy.steps_kept(self.step)
        self.versions = {step: version for step, version in self.versions.items() if step in kept}
        self.runtime.rollout.forget(kept)
        self.recorder.event("publish", step=self.version.step, version=str(self.version))
        # What is done after a step, an evaluation say, is no part of the next one's seconds.
        before = self.runtime.waiter.now()
        self.after_step(self.version)
        self._opened += self.runtime.waiter.now() - before
        self._feed_trainer()

    def _waiting_for(self) -> str:
        if any(item.what not in ("rollout", "targets") for item in self._flight.values()):
            return "trainer"
        mine = [item for item in self._flight.values() if (item.step, item.index) == (self.step, self.next_item)]
        return "teacher" if any(item.what == "targets" for item in mine) else "rollout"

    def _statistics(self) -> dict[str, float]:
        """Statistics of the step's rollouts, divided once; and who waited for whom, in seconds since the start."""
        values = {f"rollout/{name}": total for name, total in reduce_statistics(self._reports).items()}
        values["rows_trained"] = float(sum(report.rows for report in self._reports))
        values["rows_weighted"] = float(sum(report.rows_weighted for report in self._reports))
        values["rollout/tokens"] = float(
            sum(report.statistics.get("completion_length", (0.0, 0.0))[0] for report in self._reports)
        )
        values["seconds"] = self.runtime.waiter.now() - self._opened
        self._opened = self.runtime.waiter.now()
        values["lag"] = float(max(self.step - report.version.step for report in self._reports))
        return values | {f"waited/{stage}": seconds for stage, seconds in self.waited.items()}


def reduce_statistics(parts: Sequence) -> dict[str, float]:
    """Add (sum, weight) pairs over parts that have ``.statistics``, then divide once; a name of weight 0 is left out."""
    totals: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (value, weight) in part.statistics.items():
            total = totals.get(name, (0.0, 0.0))
            totals[name] = (total[0] + value, total[1] + weight)
    return {name: value / weight for name, (value, weight) in totals.items() if weight}
