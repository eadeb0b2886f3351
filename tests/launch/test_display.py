"""What people see: figures from recorded numbers, lines when piped, a panel on a terminal, a table at the end."""

import io
from functools import partial

import pytest
from rich.console import Console

from contracts.freshness import FreshnessPolicy
from contracts.work import Sample
from launch.display import LineDisplay, LiveDisplay, display
from launch.folder import RunFolder
from launch.overrides import apply_overrides
from launch.readings import Readings, clock, sparkline
from launch.recipes import find
from launch.report import print_report
from pipeline.config import parse_config
from pipeline.loop import Loop
from pipeline.testing import RUN_ID, fake_request, fake_version, fake_weights
from pipeline.virtual_time import fake_runtime

VALUES = {
    "distill/soft_loss": 0.25,
    "rollout/accuracy": 0.5,
    "rollout/tokens_per_forward": 2.0,
    "rollout/tokens": 100.0,
    "lag": 1.0,
    "waited/rollout": 6.0,
    "waited/teacher": 1.0,
    "waited/trainer": 3.0,
}

SUMMARY = {
    "teacher_accuracy": 0.995,
    "student_accuracy_before": 0.0,
    "student_accuracy_warm_start": 0.2,
    "student_accuracy_after": 0.99,
    "student_accuracy_held_out": {"held_out": 0.9},
    "tokens_per_forward": 2.05,
    "accuracy_one_forward_per_block": 0.97,
    "distinct_right_answers": {"of": 32, "student": 1.5, "student_warm_start": 18.0, "teacher": 22.0},
    "steps": 500,
    "weights_fingerprint": "0123456789abcdef",
    "config_digest": "fedcba9876543210",
    "seconds": {"teacher": 60.0, "on_policy": 30.0, "waited for rollout": 18.0, "total": 100.0},
}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time():
    return Clock()


@pytest.fixture
def readings(time):
    return Readings(steps=10, now=time)


def piped() -> Console:
    return Console(file=io.StringIO(), width=120)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("items", [1, 3])
def test_tokens_per_second_are_those_of_a_real_loops_step_over_its_own_seconds(readings, items):
    policy = FreshnessPolicy(RUN_ID)
    runtime = fake_runtime(policy, durations={"generate": 4, "update": 2})
    Loop(
        request=partial(fake_request, items=items),
        policy=policy,
        runtime=runtime,
        recorder=readings,
        version=fake_version(0, fake_weights()),
        steps=3,
        micro_batches=items,
        deadline=100.0,
        after_step=lambda version: setattr(runtime.waiter, "ticks", runtime.waiter.ticks + 1000),
    ).run()
    # Two rows of three tokens an item; four ticks to write each, two to update, and none of those after the step.
    assert readings.history["tokens/s"] == [pytest.approx(items * 2 * 3 / (items * 4 + 2))] * 3


def test_who_waits_for_whom_is_told_in_shares(readings):
    readings.metrics(0, VALUES)
    figures = readings.figures()
    assert figures["waits for"] == "rollout 60%  teacher 10%  trainer 30%"
    assert (figures["lag"], figures["refused"], figures["accuracy"]) == ("1", "0", "0.500")


def test_refused_batches_are_counted(readings):
    readings.metrics(0, VALUES)
    readings.event("refuse", reason="stale", step=0, item=0, detail="")
    assert readings.figures()["refused"] == "1"


def test_the_latest_evaluation_and_lost_workers_are_told(readings):
    readings.metrics(0, VALUES)
    assert not {"evaluated", "replaced"} & readings.figures().keys()
    readings.event("evaluation", step=5, **{"evaluation/train/accuracy": 0.5, "evaluation/held_out/accuracy": 0.25})
    readings.event("replace", role="rollout", worker="rollout-0")
    figures = readings.figures()
    assert figures["evaluated"] == "train 0.500  held out 0.250  after step 5"
    assert figures["replaced"] == "1"


def test_an_alarm_is_shown_with_both_of_its_sides(readings, time):
    console = piped()
    with LineDisplay(console, readings) as lines:
        lines.event("alarm", step=3, metric="distill/log_prob_gap", value=0.25, tolerance=0.01, lag=0.0)
    assert "distill/log_prob_gap" in printed(console) and "0.250" in printed(console)
    assert readings.figures()["alarms"] == "1, last log_prob_gap 0.250 > 0.0100 at step 3"


def test_the_stage_that_ended_the_run_is_marked(readings):
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with pytest.raises(ValueError), display(console, readings) as panel:
        panel.progress("teacher", 2, 2)
        panel.progress("loading", 0, 0)
        raise ValueError("no worker came")
    assert [stage.failed for stage in readings.stages.values()] == [False, True]
    assert "✗" in printed(console)


def test_time_left_is_reckoned_from_what_this_process_has_done(readings, time):
    readings.metrics(6, VALUES)
    time.now += 2.0
    readings.metrics(7, VALUES)
    assert readings.stages["on_policy"].left == pytest.approx(2.0)


def test_a_stage_begins_where_the_one_before_it_ended(readings, time):
    readings.progress("getting_ready", 0, 0)
    time.now += 3.0
    readings.progress("teacher", 0, 100)
    time.now += 5.0
    readings.progress("teacher", 100, 100, loss=0.5)
    assert readings.stages["getting_ready"].seconds == 3.0
    assert readings.stages["teacher"].seconds == 5.0


def test_what_is_measured_before_and_after_is_a_stage_of_its_own(readings):
    readings.event("publish", step=0, version="run@0:00")
    readings.metrics(9, VALUES)
    readings.event("publish", step=10, version="run@10:00")
    assert list(readings.stages) == ["measuring", "on_policy", "measuring_again"]
    assert readings.stages["measuring"].ended is not None
    assert readings.stages["measuring_again"].ended is None


def test_a_resumed_run_does_not_claim_to_measure_the_start(readings):
    readings.event("resume", step=4, version="run@4:00")
    assert list(readings.stages) == []
    readings.event("resume", step=readings.steps, version="run@10:00")
    assert list(readings.stages) == ["measuring_again"]


def test_a_sparkline_goes_from_lowest_to_highest_in_equal_stretches():
    assert sparkline([float(value) for value in range(8)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0, 7.0, 7.0], 2) == "▁█"
    assert sparkline([3.0] * 3, 8) == "▁▁▁"
    assert sparkline([1.0], 8) == ""


@pytest.mark.parametrize(("seconds", "text"), [(5.2, "0:05"), (65.0, "1:05"), (3723.0, "1:02:03")])
def test_a_clock_reads_as_people_read_it(seconds, text):
    assert clock(seconds) == text


def test_piped_output_is_plain_lines_of_everything_worth_knowing(readings):
    console = piped()
    with display(console, readings) as lines:
        assert isinstance(lines, LineDisplay)
        lines.progress("teacher", 100, 100, loss=0.5)
        lines.metrics(0, VALUES)
        lines.event("refuse", reason="stale", step=0, item=1, detail="too old")
    out = printed(console)
    assert "teacher           100/100  loss 0.500" in out
    assert "on-policy         1/10  divergence 0.250  accuracy 0.500  tokens/forward 2.00" in out
    assert "refuse  reason stale  step 0  item 1  detail too old" in out
    assert "\x1b" not in out


def test_piped_output_is_not_a_line_a_step(time):
    console = piped()
    with LineDisplay(console, Readings(steps=1000, now=time)) as lines:
        for step in range(1000):
            lines.metrics(step, VALUES)
    assert 2 <= len(printed(console).splitlines()) < 20


def test_a_terminal_gets_one_panel_with_figures_and_the_latest_sample(readings):
    console = Console(file=io.StringIO(), width=120, force_terminal=True, legacy_windows=False)
    with display(console, readings) as panel:
        assert isinstance(panel, LiveDisplay)
        panel.progress("teacher", 5, 10, loss=0.5)
        panel.metrics(0, VALUES)
        panel.metrics(1, VALUES)
        panel.samples(1, [Sample(0, "42=", "17+25", True)])
    out = printed(console)
    assert all(
        word in out for word in ("teacher", "on-policy", "divergence", "tokens/forward", "waits for", "17+25", "✓")
    )


def report(summary, **overrides) -> str:
    config = parse_config(
        apply_overrides(find("split").tree, {key.replace("__", "."): value for key, value in overrides.items()})
    )
    console = piped()
    print_report(console, config, RunFolder.of(config), summary)
    return printed(console)


def line(text: str, start: str) -> list[str]:
    return next(row for row in text.splitlines() if row.strip().startswith(start)).split()


def test_the_table_holds_before_warm_start_after_and_teacher():
    text = report(SUMMARY)
    assert line(text, "accuracy at")[-4:] == ["0.000", "0.200", "0.990", "0.995"]
    assert line(text, "on held out prompts")[-4:] == ["·", "·", "0.900", "·"]
    assert line(text, "tokens per forward")[-2:] == ["2.05", "1.00"]
    assert line(text, "accuracy, one forward")[-4:] == ["·", "·", "0.970", "·"]
    assert line(text, "distinct right")[-4:] == ["·", "18.0", "1.5", "22.0"]


def test_waiting_is_part_of_the_on_policy_time_and_not_added_to_it():
    text = report(SUMMARY)
    assert line(text, "on-policy")[1] == "0:30"
    assert line(text, "waiting for rollout")[3] == "0:18"
    assert line(text, "starting, stopping")[2] == "0:10"
    assert line(text, "total")[1] == "1:40"


def test_a_good_student_is_suggested_for_one_pass_per_block_and_its_lost_diversity_is_told():
    text = report(SUMMARY)
    assert "limbeck eval runs/split --evaluation.sampler.rule static --evaluation.sampler.value 1" in text
    assert "of the teacher's 22.0 right answers it keeps 1.5" in text
    assert 'limbeck generate runs/split --prompt "42="' in text


def test_a_poor_student_of_a_weak_teacher_gets_the_teacher_first():
    text = report({**SUMMARY, "teacher_accuracy": 0.5, "student_accuracy_after": 0.1})
    config = parse_config(find("split").tree)
    more_teacher, more_training = 2 * config.teacher.steps, 2 * config.training.steps
    assert text.index(f"--teacher.steps {more_teacher}") < text.index(f"--training.steps {more_training}")
    assert "it can be deployed that way" not in text


def test_a_task_without_right_answers_has_a_report_too():
    nothing = dict.fromkeys([key for key in SUMMARY if "accuracy" in key])
    distinct = {"of": 32, "student": None, "student_warm_start": None, "teacher": None}
    text = report({**SUMMARY, **nothing, "distinct_right_answers": distinct})
    assert line(text, "accuracy at")[-4:] == ["·"] * 4
