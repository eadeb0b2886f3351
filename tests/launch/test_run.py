"""The job around the pipeline: what happens in which order, what is left behind, and how it ends when something fails."""

import io
import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from rich.console import Console

from contracts.errors import CheckpointError, DeadlineError, NonFiniteError, PromptError
from launch import environment
from launch.folder import RunFolder
from launch.outcome import Outcome
from launch.overrides import apply_overrides
from launch.recipes import find
from launch.run import Parts, run
from pipeline.config import parse_config

RESULTS = {
    "teacher_accuracy": 1.0,
    "student_accuracy_after": 0.5,
    "steps": 2,
    "weights_fingerprint": "00" * 8,
    "config_digest": "11" * 8,
    "seconds": {"on_policy": 0.0},
}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setattr(environment, "apply", lambda config: None)


@pytest.fixture
def config(tmp_path):
    overrides = {"run.folder": str(tmp_path), "training.steps": "2", "runner.kind": "inline"}
    return parse_config(apply_overrides(find("addition").tree, overrides))


@dataclass
class FakeParts:
    """Writes down what is called, and raises where it is told to."""

    failing: dict[str, BaseException] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def __call__(self, config) -> Parts:
        return Parts(self.check, self.session, self.prepare, self.runtime, self.job)

    def check(self, config):
        self._called("check")
        return SimpleNamespace(check_same_prompts=lambda folder: self._called("same prompts"))

    def session(self, config):
        self._called("session")
        return self._closing("session")

    def prepare(self, ground, folder, progress, *, resume):
        progress("teacher", 0, 2)
        self._called("prepare for a resumed job" if resume else "prepare")
        return SimpleNamespace(specs=None)

    def runtime(self, specs, config, recorder, session):
        self._called("runtime")
        runtime = self._closing("runtime")
        runtime.rollout = runtime.teacher = runtime.trainer = runtime.waiter = runtime.put = None
        return runtime

    def job(self, preparation, runtime, recorder, folder, *, resume):
        recorder.metrics(0, {"distill/soft_loss": 0.5})
        recorder.event("refuse", reason="stale", step=1, item=0, detail="too old")
        self._called("resumed job" if resume else "job")
        return RESULTS

    def _closing(self, name):
        return SimpleNamespace(close=lambda: self.calls.append(f"{name} closed"))

    def _called(self, name):
        self.calls.append(name)
        if name in self.failing:
            raise self.failing[name]


def attempt(config, parts, **how) -> tuple[int, str]:
    """Exit code and what was said on stderr."""
    errors = Console(file=io.StringIO(), width=200)
    try:
        with Outcome(errors) as outcome:
            run(config, outcome, Console(file=io.StringIO()), parts=parts, **how)
    except SystemExit as ending:
        return int(ending.code or 0), errors.file.getvalue()
    return 0, errors.file.getvalue()


def test_a_run_goes_through_its_parts_in_order_and_closes_what_it_opened(config):
    parts = FakeParts()
    assert attempt(config, parts) == (0, "")
    assert parts.calls == ["check", "session", "prepare", "runtime", "job", "runtime closed", "session closed"]


def test_the_summary_has_what_the_job_found_and_what_the_recorder_counted(config):
    attempt(config, FakeParts())
    summary = json.loads(RunFolder.of(config).summary.read_text())
    assert summary["refused"] == {"stale": 1}
    assert summary["weights_fingerprint"] == "00" * 8
    assert set(summary["seconds"]) == {"on_policy", "total"}


def test_resuming_tells_the_job_so_and_keeps_what_was_recorded(config):
    attempt(config, FakeParts(failing={"job": KeyboardInterrupt()}))
    parts = FakeParts()
    assert attempt(config, parts, resume=True)[0] == 0
    assert parts.calls[:5] == ["check", "same prompts", "session", "prepare for a resumed job", "runtime"]
    assert "resumed job" in parts.calls
    assert json.loads(RunFolder.of(config).summary.read_text())["refused"] == {"stale": 2}


@pytest.mark.parametrize("failing", ["prepare", "runtime", "job"])
def test_a_failed_run_ends_with_1_its_own_sentence_and_the_traceback_in_the_folder(config, failing):
    parts = FakeParts(failing={failing: NonFiniteError("the loss of step 3 is nan")})
    code, said = attempt(config, parts)
    folder = RunFolder.of(config)
    assert code == 1
    assert "the run failed: the loss of step 3 is nan" in said
    assert str(folder.error) in said and "Traceback" not in said
    assert "NonFiniteError" in folder.error.read_text()
    assert "session closed" in parts.calls
    assert not folder.summary.exists()


def test_an_error_that_nobody_meant_is_told_with_its_kind(config):
    assert "the run failed: KeyError: 'x'" in attempt(config, FakeParts(failing={"job": KeyError("x")}))[1]


def test_an_interrupted_run_ends_with_130_and_says_what_is_kept(config):
    code, said = attempt(config, FakeParts(failing={"job": KeyboardInterrupt()}))
    assert (code, said) == (130, "interrupted: nothing was saved\n")


def test_an_interrupted_run_with_a_checkpoint_names_resume(config):
    parts = FakeParts(failing={"job": KeyboardInterrupt()})
    parts.prepare = lambda ground, folder, progress, resume: (
        (folder / "checkpoints/1").mkdir() or SimpleNamespace(specs=None)
    )
    code, said = attempt(config, parts)
    assert code == 130
    assert f"--resume continues {RunFolder.of(config).root}" in said.replace("\n", "")


def test_input_at_fault_starts_nothing_and_leaves_no_folder(config):
    parts = FakeParts(failing={"check": PromptError("2 of 4 prompts cannot be used")})
    assert attempt(config, parts) == (2, "limbeck: 2 of 4 prompts cannot be used\n")
    assert parts.calls == ["check"]
    assert not RunFolder.of(config).root.exists()


def test_an_address_that_does_not_answer_costs_nothing_of_an_older_run(config):
    attempt(config, FakeParts())
    parts = FakeParts(failing={"session": DeadlineError("no Ray head answered at 10.0.0.1:6379 within 5 s")})
    code, said = attempt(config, parts, overwrite=True)
    assert (code, parts.calls) == (2, ["check", "session"])
    assert "no Ray head answered" in said
    assert RunFolder.of(config).summary.exists()


def test_other_prompts_than_the_runs_are_refused_before_anything_is_started(config):
    attempt(config, FakeParts())
    parts = FakeParts(failing={"same prompts": CheckpointError("trained on other prompts")})
    assert attempt(config, parts, resume=True) == (2, "limbeck: trained on other prompts\n")
    assert parts.calls == ["check", "same prompts"]
