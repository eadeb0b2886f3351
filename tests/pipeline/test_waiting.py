"""Waiting for some work while the same workers are busy with other work, in virtual time."""

import numpy as np
import pytest

from contracts.errors import DeadlineError
from contracts.freshness import FreshnessPolicy
from contracts.roles import Resumable, Trainer
from contracts.work import EvaluationRequest
from pipeline.testing import RUN_ID, SAMPLER, FakeTrainer, fake_request, fake_version, fake_weights
from pipeline.virtual_time import fake_runtime
from pipeline.waiting import results_of, wait_for_all
from pipeline.workers.spec import WorkerSpec

VERSION = fake_version(0, fake_weights())
MEASURE = EvaluationRequest(
    "all", VERSION, 0, SAMPLER, np.arange(1), np.ones((1, 1), np.int32), np.ones((1,), np.int32), ()
)


def busy(items: int):
    """A single rollout worker with ``items`` rollouts of ten ticks before an evaluation."""
    runtime = fake_runtime(FreshnessPolicy(RUN_ID), durations={"generate": 10, "evaluate": 10})
    before = [runtime.rollout.submit("generate", fake_request(0, item, VERSION)) for item in range(items)]
    return runtime, before, runtime.rollout.submit("evaluate", MEASURE)


def test_results_of_work_in_front_push_the_deadline_out():
    runtime, before, measure = busy(5)
    (evaluation,) = results_of(runtime.waiter, [measure], 15.0, beside=before)
    assert evaluation.version == VERSION and runtime.waiter.now() == 60.0
    runtime, before, measure = busy(5)
    with pytest.raises(DeadlineError, match="evaluate"):
        results_of(runtime.waiter, [measure], 15.0)


def test_a_result_that_never_comes_is_still_noticed():
    runtime, before, measure = busy(1)
    with pytest.raises(DeadlineError, match="evaluate"):
        results_of(runtime.waiter, [measure], 9.0, beside=before[:0])
    with pytest.raises(DeadlineError, match=r"generate\(fake/0/0\)"):
        results_of(runtime.waiter, [measure], 9.0, beside=before)


def test_results_come_in_the_order_asked_for_and_errors_as_themselves():
    runtime, before, _ = busy(2)
    asked = [before[1], before[0]]
    assert [rollout.provenance.item for rollout in results_of(runtime.waiter, asked, 99.0)] == [1, 0]
    refused = runtime.trainer.submit("update", "one argument too many")
    wait_for_all(runtime.waiter, [refused], 99.0)
    with pytest.raises(TypeError):
        results_of(runtime.waiter, [refused], 99.0)


def test_a_trainer_that_goes_back_to_its_checkpoint_goes_on_as_if_nothing_had_been():
    policy = FreshnessPolicy(RUN_ID, max_lag=1)
    trainer = WorkerSpec(FakeTrainer, (policy,)).construct("trainer-0")
    assert isinstance(trainer, Trainer) and isinstance(trainer, Resumable)
    first = trainer.update().version
    assert trainer.save() == 1
    kept = trainer.publish(), trainer.published(0)
    after = trainer.update().version
    assert trainer.restore() == [VERSION, first]
    assert (trainer.publish(), trainer.published(0)) == kept
    assert trainer.update().version == after
