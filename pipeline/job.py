"""A run from prepared parts to its summary: load, measure, distil, measure again."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from contracts.roles import Handle, Recorder, Runtime
from contracts.weights import WeightVersion, fingerprint
from contracts.wire import decode_tree
from pipeline.build import Preparation
from pipeline.evaluation import Evaluator, StudentReport
from pipeline.groundwork import TRAIN
from pipeline.loop import Loop
from pipeline.waiting import results_of, wait_for_all

STUDENT_FILE = "student.safetensors"
START_FILE = "start.json"
GAP_TOLERANCE = {"float32": 1e-2, "bfloat16": 0.1}
"""By dtype of activations, how far the trainer's log-probabilities of a rollout's tokens may be, on average, from those
recorded, at temperature 1 and lag 0. Between cached decoding and the two-stream forward only the order of sums differs: in
float32 that is about 1e-5, so 1e-2 leaves room for deep models and TF32 products. A bfloat16 activation has 8 bits: logits
of size 10 are off by some hundredths. Other weights, or another canvas, were seen at 1e-2 to 1 and more.
"""


@dataclass(frozen=True)
class Outcome:
    """What a run did.

    Attributes:
      version: the final weights.
      before, warmed, after: the student right after the conversion, at step 0, and at the end. A resumed run has the first
        two from the run's beginning, None if they are not in its folder.
      rows_trained: prompts that closed windows consumed.
      seconds: by stage.
    """

    version: WeightVersion
    before: StudentReport | None
    warmed: StudentReport | None
    after: StudentReport
    rows_trained: int
    seconds: dict[str, float]


def run_job(
    preparation: Preparation, runtime: Runtime, recorder: Recorder, folder: Path, *, resume: bool = False
) -> Outcome:
    """Distil on-policy from the prepared weights to the configured number of steps.

    Args:
      preparation: from `pipeline.build.prepare`.
      runtime: started workers, in this process or on Ray.
      recorder: where events and metrics go.
      folder: the run's folder; the final weights are written there as ``student.safetensors``.
      resume: continue from the newest checkpoint in the folder.

    Raises:
      LimbeckError: whatever ends a run.
    """
    return Job(preparation, runtime, recorder).run(folder, resume=resume)


class Job:
    """The parts of a run, each to be called by itself in a study.

    Args:
      preparation, runtime, recorder: as in `run_job`.
    """

    def __init__(self, preparation: Preparation, runtime: Runtime, recorder: Recorder):
        self.preparation = preparation
        self.config = preparation.ground.config
        self.runtime = runtime
        self.recorder = recorder
        self.evaluator = Evaluator(preparation.ground, runtime)
        self.seconds = dict(preparation.weights.seconds)
        self.restored: dict[int, WeightVersion] = {}
        self._student: Handle | None = None

    def run(self, folder: Path, *, resume: bool) -> Outcome:
        clock = _Stopwatch(self.seconds)
        with clock("load"):
            version = self.load(resume=resume)
        if resume:
            before, warmed = read_start(folder)
        else:
            with clock("evaluation"):
                before, warmed = self._measure_start(version)
            write_start(folder, before, warmed)
        loop = self.loop(version, after_step=lambda version: self._after_step(version, loop.in_flight))
        with clock("on_policy"):
            final = loop.run()
            self._ask("save")
        with clock("evaluation"):
            after = self.evaluator.report(final, diversity=True)
        save_file(decode_tree(self._ask("publish")), folder / STUDENT_FILE, metadata={"version": str(final)})
        training = self.config.training
        self.seconds |= {f"waited for {stage}": seconds for stage, seconds in loop.waited.items()}
        return Outcome(final, before, warmed, after, final.step * training.micro_batches * training.rows, self.seconds)

    def load(self, *, resume: bool = False) -> WeightVersion:
        """Give every role its weights: those of step 0, or of the newest checkpoint; returns the student's version.

        Raises:
          CheckpointError: there is nothing to resume, or it is damaged or another run's.
        """
        teacher = self.runtime.put("teacher weights", self.preparation.weights.teacher)
        student = self.runtime.put("student weights", self.preparation.weights.student)
        scorers = self.runtime.teacher.prepare("load", teacher)
        trainer = self.runtime.trainer.prepare("load", student)
        version = self._results([*trainer, *scorers])[0]
        if resume:
            return self._restore()
        self._student = student
        self.runtime.rollout.publish(version, student)
        self.recorder.event("publish", step=version.step, version=str(version))
        return version

    def _measure_start(self, version: WeightVersion) -> tuple[StudentReport, StudentReport]:
        """The student right after the conversion, then at step 0: the same workers, other weights."""
        # From now on the pool decides how long the weights of step 0 are kept.
        student, self._student = self._student, None
        assert student is not None
        tree = self.preparation.weights.converted
        converted = replace(version, fingerprint=fingerprint(decode_tree(tree)))
        if converted == version:
            report = self.evaluator.report(version, diversity=True)
            return report, report
        self.runtime.rollout.publish(converted, self.runtime.put("converted weights", tree))
        before = self.evaluator.report(converted, diversity=False)
        self.runtime.rollout.publish(version, student)
        return before, self.evaluator.report(version, diversity=True)

    def _restore(self) -> WeightVersion:
        """Bring the trainer to its newest checkpoint, and publish every version that a later step may be written by."""
        versions: list[WeightVersion] = self._ask("restore")
        for version in versions:
            tree = self.runtime.trainer.submit("published", version.step)
            wait_for_all(self.runtime.waiter, [tree], self.config.runner.item_deadline)
            self.runtime.rollout.publish(version, tree)
        self.recorder.event("resume", step=versions[-1].step, version=str(versions[-1]))
        self.restored = {version.step: version for version in versions}
        return versions[-1]

    def loop(self, version: WeightVersion, after_step: Callable[[WeightVersion], None]) -> Loop:
        """The loop from this version to the last step."""
        training = self.config.training
        return Loop(
            request=self.preparation.request,
            policy=self.preparation.parts.policy,
            runtime=self.runtime,
            recorder=self.recorder,
            version=version,
            steps=training.steps,
            micro_batches=training.micro_batches,
            deadline=self.config.runner.item_deadline,
            gap_tolerance=self._gap_tolerance(),
            after_step=after_step,
            versions=self.restored,
        )

    def _gap_tolerance(self) -> float:
        # Logits are divided by the temperature, and their rounding with them; greedy confidences are at temperature 1.
        temperature = self.config.rollout.temperature or 1.0
        return GAP_TOLERANCE[self.preparation.parts.student.dtype] / min(1.0, temperature)

    def _after_step(self, version: WeightVersion, in_flight: Sequence[Handle]) -> None:
        training, evaluation = self.config.training, self.config.evaluation
        if training.save_every and version.step % training.save_every == 0 and version.step < training.steps:
            self._ask("save", beside=in_flight)
        if evaluation.every and version.step % evaluation.every == 0 and version.step < training.steps:
            values = self.evaluator.accuracy(version, self.config.deployed_sampler.settings(), in_flight)
            flat = {
                f"evaluation/{split}/{name}": value for split, part in values.items() for name, value in part.items()
            }
            self.recorder.event("evaluation", step=version.step, **flat)

    def _ask(self, method: str, beside: Sequence[Handle] = ()) -> Any:
        """What the trainer answers."""
        return self._results([self.runtime.trainer.submit(method)], beside)[0]

    def _results(self, handles: Sequence[Handle], beside: Sequence[Handle] = ()) -> list[Any]:
        return results_of(self.runtime.waiter, handles, self.config.runner.item_deadline, beside)


class _Stopwatch:
    """Adds the seconds spent inside ``with clock(stage)`` to a mapping."""

    def __init__(self, seconds: dict[str, float]):
        self._seconds = seconds
        self._stage = ""
        self._started = 0.0

    def __call__(self, stage: str) -> "_Stopwatch":
        self._stage, self._started = stage, time.perf_counter()
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        spent = time.perf_counter() - self._started
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + spent


def write_start(folder: Path, before: StudentReport, warmed: StudentReport) -> None:
    """Keep what was measured before the first step, for the summary of a run that is resumed."""
    reports = {"before": asdict(before), "warm_start": asdict(warmed)}
    (folder / START_FILE).write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")


def read_start(folder: Path) -> tuple[StudentReport | None, StudentReport | None]:
    """The inverse of `write_start`; None twice where nothing was kept."""
    path = folder / START_FILE
    if not path.is_file():
        return None, None
    reports = [
        StudentReport(**{**fields, "version": WeightVersion(**fields["version"])})
        for fields in json.loads(path.read_text(encoding="utf-8")).values()
    ]
    return reports[0], reports[1]


def summarise(preparation: Preparation, outcome: Outcome) -> dict[str, Any]:
    """The figures of ``summary.json``; the recorder adds what it counted."""
    teacher, after = preparation.weights.teacher_report, outcome.after
    sampler = preparation.ground.config.deployed_sampler
    return {
        "teacher_accuracy": teacher.accuracy,
        "student_accuracy_before": None if outcome.before is None else outcome.before.accuracy.get(TRAIN),
        "student_accuracy_warm_start": None if outcome.warmed is None else outcome.warmed.accuracy.get(TRAIN),
        "student_accuracy_after": after.accuracy.get(TRAIN),
        "student_accuracy_held_out": {split: value for split, value in after.accuracy.items() if split != TRAIN},
        "tokens_per_forward": after.tokens_per_forward,
        "tokens_per_forward_with_commit_passes": after.tokens_per_forward_with_commit_passes,
        "decoded_with": sampler.model_dump(mode="json"),
        "accuracy_one_forward_per_block": after.accuracy_one_forward_per_block.get(TRAIN),
        "distinct_right_answers": {
            "of": preparation.ground.config.evaluation.diversity_samples,
            "student": after.distinct_right_answers,
            "student_warm_start": None if outcome.warmed is None else outcome.warmed.distinct_right_answers,
            "teacher": teacher.distinct_right_answers,
        },
        "steps": outcome.version.step,
        "rows_trained": outcome.rows_trained,
        "weights_fingerprint": outcome.version.fingerprint,
        "seconds": {stage: round(spent, 3) for stage, spent in outcome.seconds.items()},
        "config_digest": preparation.ground.config.digest(preparation.ground.source.digest),
    }
