"""What the roles send each other: requests are checked before any model runs, rollouts are sealed, and all of it travels."""

import pickle
from dataclasses import replace

import jax
import numpy as np
import pytest

from contracts.errors import BatchValueError
from contracts.weights import WeightVersion
from contracts.wire import encode
from contracts.work import PreparedBatch, TeacherTargets
from pipeline.testing import FakeRolloutWorker, FakeTeacher, fake_request, fake_version, fake_weights


def request(lengths=(1, 3), width: int = 3):
    rows = len(lengths)
    return replace(
        fake_request(2, 1, WeightVersion("run", 2, "", "print"), rows=rows),
        stream_indices_B=np.arange(40, 40 + rows),
        prompt_ids_BP=np.ones((rows, width), np.int32),
        prompt_lengths_B=np.array(lengths, np.int32),
    )


def test_a_request_is_known_by_run_step_and_item():
    assert request().request_id == "run/2/1"


def test_prompts_from_one_token_to_the_full_width_are_legal():
    valid = request((1, 2, 3))
    assert valid.validate() is valid


@pytest.mark.parametrize(("lengths", "row", "index"), [((1, 0), 1, 41), ((4, 1), 0, 40), ((1, 1, -1), 2, 42)])
def test_a_row_without_a_prompt_or_with_too_long_a_one_is_named_with_its_place_in_the_stream(lengths, row, index):
    with pytest.raises(BatchValueError, match=rf"run/2/1: row {row} \(stream index {index}\).*between 1 and 3"):
        request(lengths).validate()


@pytest.mark.parametrize("field", ["prompt_lengths_B", "stream_indices_B"])
def test_rows_that_differ_between_the_fields_of_a_request_are_refused(field):
    with pytest.raises(BatchValueError, match="differ in rows"):
        replace(request(), **{field: np.ones((3,), np.int32)}).validate()


def rollout_and_targets():
    version, worker = fake_version(0, fake_weights()), FakeRolloutWorker()
    worker.load(version, {name: encode(array) for name, array in fake_weights().items()}, 0)
    rollout = worker.generate(fake_request(0, 0, version))
    return rollout, FakeTeacher().score(rollout)


def test_the_digest_of_a_rollout_covers_what_a_model_reads_and_not_who_wrote_it():
    rollout, _ = rollout_and_targets()
    assert rollout.digest == rollout.content_digest()
    elsewhere = replace(rollout, provenance=replace(rollout.provenance, worker="rollout-7"), statistics={}, samples=())
    assert elsewhere.seal().digest == rollout.digest
    batch = rollout.student_batch
    for changed in (
        replace(batch, model_inputs={"other_name": batch.target_ids}),
        replace(batch, target_ids=batch.target_ids + 1),
        replace(batch, loss_weights=batch.loss_weights.astype(np.int32)),
        replace(batch, loss_weights=batch.loss_weights * 2),
    ):
        assert replace(rollout, student_batch=changed).content_digest() != rollout.digest
    for name, array in vars(rollout.clean).items():
        clean = replace(rollout.clean, **{name: ~array if array.dtype == np.bool_ else array + 1})
        assert replace(rollout, clean=clean).content_digest() != rollout.digest


def test_everything_that_is_sent_arrives_with_its_digest_intact():
    rollout, targets = rollout_and_targets()
    arrived: PreparedBatch = pickle.loads(pickle.dumps(PreparedBatch(rollout, targets)))
    assert arrived.rollout.content_digest() == rollout.digest == arrived.targets.rollout_digest
    assert arrived.rollout.provenance == rollout.provenance
    assert pickle.loads(pickle.dumps(request())).request_id == "run/2/1"


def test_a_prepared_batch_is_the_public_contract_of_rollout_and_targets():
    rollout, targets = rollout_and_targets()
    batch = PreparedBatch(rollout, targets).distillation_batch()
    assert batch.student_batch is rollout.student_batch
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(batch))
    np.testing.assert_array_equal(batch.teacher_logits, targets.arrays["logits"].bits)


def test_targets_of_another_length_do_not_become_a_batch():
    rollout, targets = rollout_and_targets()
    short = TeacherTargets(
        targets.rollout_digest, "t", "dense", 1.0, {"logits": encode(np.zeros((2, 2, 5), np.float32))}
    )
    with pytest.raises(BatchValueError):
        PreparedBatch(rollout, short).distillation_batch()
