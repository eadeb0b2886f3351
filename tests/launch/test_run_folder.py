"""The run folder: who may write it, and what is written as the run goes."""

import json

import numpy as np
import pytest

from contracts.errors import CheckpointError, ConfigError, RunFolderError
from contracts.work import Sample
from launch.folder import RunFolder, find_run
from launch.overrides import apply_overrides
from launch.recipes import find
from launch.recording import FileRecorder, Recorders, read_lines, write_summary
from pipeline.config import parse_config
from pipeline.testing import ListRecorder


@pytest.fixture
def config(tmp_path):
    return changed(tmp_path)


@pytest.fixture
def folder(config):
    made = RunFolder.of(config)
    made.begin(config, resume=False)
    return made


def changed(tmp_path, **overrides):
    return parse_config(
        apply_overrides(
            find("addition").tree,
            {"run.folder": str(tmp_path), **{k.replace("__", "."): v for k, v in overrides.items()}},
        )
    )


def test_the_written_config_reads_back_as_the_same_config(folder, config):
    assert folder.load_config() == config


def test_a_run_is_found_by_its_folder_and_by_its_name(folder, tmp_path):
    assert find_run(str(folder.root)) == folder
    assert find_run("addition", folder=str(tmp_path)) == folder


def test_a_fresh_folder_is_admitted_and_an_existing_one_is_not(folder, config, tmp_path):
    other = changed(tmp_path, run__name="other")
    RunFolder.of(other).check(other, resume=False, overwrite=False)
    with pytest.raises(RunFolderError, match="exists"):
        folder.check(config, resume=False, overwrite=False)


def test_a_run_that_failed_before_its_first_step_may_be_begun_again(folder, config):
    folder.record_error(ValueError("no worker came"))
    folder.check(config, resume=False, overwrite=False)
    with FileRecorder(folder) as recorder:
        recorder.metrics(0, {"loss": 1.0})
    with pytest.raises(RunFolderError, match="exists"):
        folder.check(config, resume=False, overwrite=False)


def test_overwriting_begins_with_an_empty_folder(folder, config):
    with FileRecorder(folder) as recorder:
        recorder.metrics(0, {"loss": 1.0})
    folder.check(config, resume=False, overwrite=True)
    folder.begin(config, resume=False)
    assert sorted(path.name for path in folder.root.iterdir()) == ["checkpoints", "config.yaml"]


def test_resuming_with_other_settings_is_refused_showing_both_sides(folder, tmp_path):
    other = changed(tmp_path, training__learning_rate="0.5", rollout__rule="prefix")
    with pytest.raises(CheckpointError) as refusal:
        folder.check(other, resume=True, overwrite=False)
    assert "training.learning_rate: 0.001 then, 0.5 now" in str(refusal.value)
    assert "rollout.rule: 'threshold' then, 'prefix' now" in str(refusal.value)


def test_resuming_on_other_workers_is_admitted(folder, tmp_path):
    other = changed(tmp_path, runner__kind="inline", runner__rollout__count="5", run__cache="elsewhere")
    folder.check(other, resume=True, overwrite=False)
    with FileRecorder(folder) as recorder:
        recorder.metrics(0, {"loss": 1.0})
    folder.begin(other, resume=True)
    assert read_lines(folder.metrics)


def test_resume_and_overwrite_exclude_each_other(folder, config):
    with pytest.raises(ConfigError, match="give one of them"):
        folder.check(config, resume=True, overwrite=True)


def test_an_error_is_kept_with_its_traceback_and_gone_when_the_run_begins_again(folder, config):
    try:
        raise ValueError("no worker came")
    except ValueError as error:
        folder.record_error(error)
    assert "Traceback" in folder.error.read_text() and "no worker came" in folder.error.read_text()
    folder.begin(config, resume=True)
    assert not folder.error.exists()


def test_every_event_metric_and_sample_is_one_line_of_json(folder):
    with FileRecorder(folder) as recorder:
        recorder.event("publish", step=1, version="run@1:00")
        recorder.metrics(0, {"loss": 0.5, "rows_trained": 4.0})
        recorder.samples(0, (Sample(7, "1+1=", "2\u2028", True), Sample(8, "1+2=", "4", None)))
    (event,) = read_lines(folder.events)
    assert (event["kind"], event["step"], event["version"]) == ("publish", 1, "run@1:00")
    (metric,) = read_lines(folder.metrics)
    assert (metric["step"], metric["loss"]) == (0, 0.5)
    samples = read_lines(folder.rollouts)
    assert [sample["completion"] for sample in samples] == ["2\u2028", "4"]
    assert [sample["correct"] for sample in samples] == [True, None]


def test_numbers_that_json_has_no_word_for_are_written_as_texts(folder):
    with FileRecorder(folder) as recorder:
        recorder.metrics(3, {"loss": float("nan"), "grad_norm": float("inf")})
    text = folder.metrics.read_text()
    strict = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (strict["loss"], strict["grad_norm"]) == ("nan", "inf")


def test_refusals_are_counted_by_reason_over_the_whole_run(folder):
    with FileRecorder(folder) as recorder:
        recorder.event("refuse", reason="stale", step=1, item=0, detail="")
        recorder.event("refuse", reason="stale", step=1, item=1, detail="")
    with FileRecorder(folder) as resumed:
        resumed.event("refuse", reason="future", step=2, item=0, detail="")
        assert resumed.refused == {"stale": 2, "future": 1}


def test_going_back_to_a_checkpoint_drops_the_steps_that_will_be_made_again(folder):
    with FileRecorder(folder) as recorder:
        for step in range(5):
            recorder.metrics(step, {"loss": float(step)})
            recorder.samples(step, [Sample(step, "1+1=", "2", True)])
            recorder.event("publish", step=step + 1)
    with FileRecorder(folder) as resumed:
        resumed.event("resume", step=3)
        resumed.metrics(3, {"loss": 30.0})
    assert [(line["step"], line["loss"]) for line in read_lines(folder.metrics)] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]
    assert [line["step"] for line in read_lines(folder.rollouts)] == [0, 1, 2]
    assert len(read_lines(folder.events)) == 6


def test_a_line_cut_off_by_a_kill_is_left_out(folder):
    folder.metrics.write_text('{"step": 0}\n{"step": 1, "lo')
    assert read_lines(folder.metrics) == [{"step": 0}]


def test_what_one_recorder_hears_all_hear(folder):
    first, second = ListRecorder(), ListRecorder()
    both = Recorders(first, second)
    both.event("publish", step=1)
    both.metrics(0, {"loss": 1.0})
    assert first.of_kind("publish") == second.of_kind("publish") != []


def test_the_summary_is_plain_json(folder):
    write_summary(folder.summary, {"accuracy": np.float32(0.25), "seconds": {"total": 1.5}, "none": None})
    assert json.loads(folder.summary.read_text()) == {"accuracy": 0.25, "seconds": {"total": 1.5}, "none": None}
    assert not list(folder.root.glob("*.partial"))
