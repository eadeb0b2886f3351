"""Accuracy under parallelism, measured through the rollout workers."""

from dataclasses import dataclass, replace

import pytest

from contracts.work import Evaluation
from pipeline.evaluation import Evaluator
from pipeline.inline import InlineRuntime, stored_handle
from pipeline.testing import fake_version, fake_weights

VERSION = fake_version(0, fake_weights())


@dataclass
class Scripted:
    """Answers each sampler with (tokens per forward, accuracy) from a list, by τ."""

    figures: dict

    def submit(self, method, request):
        speed, accuracy = self.figures[request.sampler.value]
        statistics = {"tokens_per_forward": (speed, 1.0), "accuracy": (accuracy, 1.0 if accuracy is not None else 0.0)}
        if accuracy is None:
            statistics["accuracy"] = (0.0, 0.0)
        self.rules = {*getattr(self, "rules", ()), request.sampler.rule}
        return stored_handle(request.name, Evaluation(request.name, request.version, statistics, ()))


@pytest.fixture
def measured(prepared, monkeypatch):
    def measured(figures: dict, **sections):
        runtime = InlineRuntime(prepared.specs, prepared.ground.config)
        runtime.rollout = Scripted(figures)
        config = prepared.ground.config.model_copy(update=sections)
        return Evaluator(replace(prepared.ground, config=config), runtime).parallelism(VERSION, list(figures)), runtime

    return measured


def test_thresholds_of_one_speed_are_one_point_at_their_best_accuracy(measured):
    # By hand: 1 · 80, then half of (2 - 1) · (80 + 80): nothing is lost at twice the speed.
    area, runtime = measured({0.9: (1.0, 0.8), 0.5: (2.0, 0.8), 0.6: (2.0, 0.5)})
    assert area == pytest.approx(160.0)
    assert runtime.rollout.rules == {"threshold"}


def test_the_deployed_rule_is_kept_where_it_has_a_threshold(measured, prepared):
    prefix = prepared.ground.config.rollout.model_copy(update={"rule": "prefix"})
    evaluation = prepared.ground.config.evaluation.model_copy(update={"sampler": prefix})
    _, runtime = measured({0.9: (1.0, 0.5)}, rollout=prefix, evaluation=evaluation)
    assert runtime.rollout.rules == {"prefix"}


@pytest.mark.parametrize("accuracy", [None, 0.0])
def test_where_nothing_is_right_there_is_no_area(measured, accuracy):
    assert measured({0.9: (1.0, accuracy)})[0] is None
