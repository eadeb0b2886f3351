import pickle
from dataclasses import replace
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import pytest

from contracts.distillation import DiffusionDistillationBatch
from contracts.errors import (
    CheckpointError,
    CorruptBatchError,
    DuplicateBatchError,
    FingerprintMismatchError,
    ForeignBatchError,
    FreshnessError,
    FutureBatchError,
    OutOfOrderBatchError,
    StaleBatchError,
    TargetsMismatchError,
    VersionNotHeldError,
    WeightsError,
)
from contracts.roles import Resumable, Trainer
from contracts.weights import fingerprint
from contracts.wire import decode, decode_tree, encode, encode_tree
from contracts.work import EvaluationRequest, SamplerSettings
from pipeline.build import assemble
from pipeline.diffusion.decoding import decode as decode_rows
from pipeline.diffusion.keys import evaluation_keys, row_keys
from pipeline.diffusion.uncached import decode_uncached
from pipeline.models.tree import parameters, with_parameters
from pipeline.training.trainer import PeftTrainer
from pipeline.workers.parts import abstract_decoder
from pipeline.workers.rollout import RolloutWorker
from pipeline.workers.teacher import TeacherWorker
from pipeline.workers.trainer import TrainerWorker


def item(prepared, workers, index=0, step=0, version=None):
    rollout = workers.rollout.generate(prepared.request(step, index, version or workers.version))
    return rollout, workers.teacher.score(rollout)


def flipped(tree):
    """The same tree with the lowest bit of one weight turned over."""
    name = sorted(tree)[0]
    bits = np.array(decode(tree[name]))
    bits.reshape(-1).view(np.uint32)[0] ^= 1
    return {**tree, name: encode(bits)}


def test_a_rollout_carries_the_fingerprint_of_the_arrays_held_not_of_the_version_claimed(prepared, workers):
    held = workers.rollout.load(workers.version, flipped(prepared.weights.student), 2)
    assert held.fingerprint == fingerprint(decode_tree(flipped(prepared.weights.student)))
    assert held.fingerprint != workers.version.fingerprint
    with pytest.raises(VersionNotHeldError, match=held.fingerprint):
        workers.rollout.generate(prepared.request(0, 0, workers.version))
    assert workers.rollout.generate(prepared.request(0, 0, held)).provenance.version == held


def test_a_bfloat16_student_is_published_and_held_bit_for_bit(prepared, tmp_path):
    parts = replace(prepared.parts, student=replace(prepared.parts.student, param_dtype="bfloat16"))
    weights = {name: array.astype(ml_dtypes.bfloat16) for name, array in decode_tree(prepared.weights.student).items()}
    trainer = TrainerWorker(parts, str(tmp_path), name="trainer-0")
    rollout = RolloutWorker(parts, name="rollout-0")
    teacher = TeacherWorker(parts, name="teacher-0")
    teacher.load(prepared.weights.teacher)
    version = trainer.load(encode_tree(weights))
    for step in range(2):
        sent = pickle.loads(pickle.dumps(trainer.publish(), protocol=5))
        assert rollout.load(version, sent, step) == version
        held = parameters(rollout._holding(version).model)
        for name, array in parameters(trainer._model).items():
            assert held[name].dtype == array.dtype == ml_dtypes.bfloat16
            assert np.asarray(held[name]).tobytes() == np.asarray(array).tobytes()
        for index in range(2):
            written = rollout.generate(prepared.request(step, index, version))
            trainer.accumulate(written, teacher.score(written))
        version = trainer.update().version


def test_the_newest_intent_wins_even_when_it_asks_for_an_older_version(prepared, workers):
    newer = replace(workers.version, step=7)
    workers.rollout.load(newer, prepared.weights.student, 5)
    assert workers.rollout.load(workers.version, prepared.weights.student, 4) == newer
    assert workers.rollout.load(workers.version, prepared.weights.student, 6) == workers.version


def test_a_slow_load_does_not_undo_a_newer_one_that_overtook_it(prepared, workers, monkeypatch):
    newer, tree = replace(workers.version, step=7), prepared.weights.student

    def overtaken(weights):
        monkeypatch.undo()
        assert workers.rollout.load(newer, tree, 9) == newer
        return fingerprint(weights)

    monkeypatch.setattr("pipeline.workers.rollout.fingerprint", overtaken)
    assert workers.rollout.load(workers.version, tree, 8) == newer
    assert workers.rollout._holding(newer).intent == 9


def test_a_batch_is_validated_once_an_item(prepared, workers, monkeypatch):
    rollout, targets = item(prepared, workers)
    validate, calls = DiffusionDistillationBatch.validate, []

    def count(batch):
        if isinstance(batch.teacher_logits, np.ndarray):
            calls.append(batch)
        return validate(batch)

    monkeypatch.setattr(DiffusionDistillationBatch, "validate", count)
    workers.trainer.accumulate(rollout, targets)
    assert len(calls) == 1


def test_saving_and_restoring_copy_no_state_on_the_device(prepared, workers, monkeypatch):
    def refuse(trainer):
        raise AssertionError("a copy of the whole state")

    for index in range(2):
        workers.trainer.accumulate(*item(prepared, workers, index))
    version = workers.trainer.update().version
    monkeypatch.setattr(PeftTrainer, "state", refuse)
    workers.trainer.save()
    assert workers.trainer.restore() == [version]


def test_a_rollout_writes_what_the_uncached_oracle_writes_for_its_rows_keys(prepared, workers):
    request = prepared.request(0, 1, workers.version)
    rollout = workers.rollout.generate(request)
    model = with_parameters(
        abstract_decoder(prepared.parts.student),
        {name: np.array(array) for name, array in decode_tree(prepared.weights.student).items()},
    )
    oracle = decode_uncached(
        model,
        request.prompt_ids_BP,
        request.prompt_lengths_B,
        row_keys(request.seed, 0, request.stream_indices_B),
        prepared.parts.layout,
        prepared.parts.config.rollout.settings(),
        prepared.parts.stop_ids,
    )
    valid = rollout.clean.valid_BL
    np.testing.assert_array_equal(valid.sum(axis=1), request.prompt_lengths_B + np.asarray(oracle.length_B))
    np.testing.assert_array_equal(rollout.clean.tokens_BL[valid], np.asarray(oracle.tokens_BL)[valid])


def test_what_is_measured_is_drawn_apart_from_what_is_trained_on(prepared, workers):
    """At temperature 1, with the prompts, seed and stream indices of the run's first rollout."""
    request = prepared.request(0, 0, workers.version)
    sampler = SamplerSettings("static", 4.0, temperature=1.0)
    measured = workers.rollout.evaluate(
        EvaluationRequest(
            name="same rows",
            version=workers.version,
            seed=request.seed,
            sampler=sampler,
            stream_indices_B=request.stream_indices_B,
            prompt_ids_BP=request.prompt_ids_BP,
            prompt_lengths_B=request.prompt_lengths_B,
            prompts=request.prompts,
        )
    )
    model = with_parameters(workers.rollout._template, decode_tree(prepared.weights.student))

    def texts(keys_B):
        decoded = decode_rows(
            model,
            request.prompt_ids_BP,
            request.prompt_lengths_B,
            keys_B,
            prepared.parts.layout,
            sampler,
            prepared.parts.stop_ids,
        )
        return [
            sample.completion
            for sample in workers.rollout._samples(
                jax.device_get(decoded), request.prompt_lengths_B, request.prompts, request.stream_indices_B
            )
        ]

    drawn = [sample.completion for sample in measured.samples]
    assert drawn == texts(evaluation_keys(request.seed, request.stream_indices_B))
    assert drawn != texts(row_keys(request.seed, 0, request.stream_indices_B))


def test_the_targets_are_the_teachers_next_token_logits_at_every_weighted_slot(prepared, workers, numpy_decoder):
    rollout, targets = item(prepared, workers)
    logits_BWV = decode(targets.arrays["logits"])
    weights = {name: np.array(array) for name, array in decode_tree(prepared.weights.teacher).items()}
    for row in range(rollout.clean.tokens_BL.shape[0]):
        length = int(rollout.clean.valid_BL[row].sum())
        tokens = rollout.clean.tokens_BL[row, :length]
        mask = np.tril(np.ones((length, length), bool))
        expected = numpy_decoder(prepared.parts.teacher, weights, tokens, np.arange(length), mask)
        start = int(rollout.clean.prompt_lengths_B[row])
        for slot in np.flatnonzero(rollout.student_batch.loss_weights[row]):
            np.testing.assert_allclose(logits_BWV[row, slot], expected[start + slot - 1], atol=1e-4)


def test_the_trainers_own_log_probabilities_are_those_of_the_rollout_at_lag_zero(prepared, workers):
    for index in range(2):
        workers.trainer.accumulate(*item(prepared, workers, index))
    gap = workers.trainer.update().metrics["distill/log_prob_gap"]
    assert gap < 1e-5


def test_other_weights_behind_the_right_step_show_as_a_gap(prepared, workers, tmp_path):
    honest = [item(prepared, workers, index) for index in range(2)]
    other = {name: encode(np.array(decode(wire)) * np.float32(1.5)) for name, wire in prepared.weights.student.items()}
    version = workers.trainer.load(other)
    for rollout, targets in honest:
        forged = replace(rollout, provenance=replace(rollout.provenance, version=version))
        workers.trainer.accumulate(forged, targets)
    assert workers.trainer.update().metrics["distill/log_prob_gap"] > 1e-2


def test_random_states_report_no_gap_since_nothing_was_recorded_about_them(make_config, prepared, tmp_path):
    config = make_config(states={"kind": "random"})
    drawn = assemble(replace(prepared.ground, config=config), prepared.weights, tmp_path)
    rollout, teacher, trainer = (
        spec.construct("worker") for spec in (drawn.specs.rollout, drawn.specs.teacher, drawn.specs.trainer)
    )
    teacher.load(drawn.weights.teacher)
    version = trainer.load(drawn.weights.student)
    rollout.load(version, drawn.weights.student, 1)
    roles = SimpleNamespace(rollout=rollout, teacher=teacher, version=version)
    for index in range(2):
        trainer.accumulate(*item(drawn, roles, index))
    assert "distill/log_prob_gap" not in trainer.update().metrics


REFUSALS = {
    "foreign": (ForeignBatchError, lambda p: replace(p, run_id="other", version=replace(p.version, run_id="other"))),
    "future": (FutureBatchError, lambda p: replace(p, version=replace(p.version, step=1))),
    "future step": (FutureBatchError, lambda p: replace(p, step=1, item=0)),
    "fingerprint": (FingerprintMismatchError, lambda p: replace(p, version=replace(p.version, fingerprint="0" * 16))),
    "base": (FingerprintMismatchError, lambda p: replace(p, version=replace(p.version, base_fingerprint="0" * 16))),
    "duplicate": (DuplicateBatchError, lambda p: replace(p, item=0)),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_rollout_leaves_the_accumulator_bit_for_bit_as_it_was(prepared, workers, name):
    workers.trainer.accumulate(*item(prepared, workers, 0))
    rollout, targets = item(prepared, workers, 1)
    before = workers.trainer.accumulator_digest()
    error, change = REFUSALS[name]
    with pytest.raises(error):
        workers.trainer.accumulate(replace(rollout, provenance=change(rollout.provenance)), targets)
    assert workers.trainer.accumulator_digest() == before
    workers.trainer.accumulate(rollout, targets)
    assert workers.trainer.accumulator_digest() != before


def test_a_batch_out_of_order_waits_for_its_turn(prepared, workers):
    before = workers.trainer.accumulator_digest()
    with pytest.raises(OutOfOrderBatchError, match="item 0 is next"):
        workers.trainer.accumulate(*item(prepared, workers, 1))
    assert workers.trainer.accumulator_digest() == before


def test_a_batch_of_the_version_before_is_stale_after_the_update(prepared, workers):
    items = [item(prepared, workers, index) for index in range(2)]
    for pair in items:
        workers.trainer.accumulate(*pair)
    workers.trainer.update()
    with pytest.raises(StaleBatchError, match="lag 1"):
        workers.trainer.accumulate(*items[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [("rollout_digest", "0" * 32), ("teacher_fingerprint", "0" * 16), ("temperature", 2.0)],
)
def test_targets_of_another_rollout_teacher_or_temperature_are_refused(prepared, workers, field, value):
    rollout, targets = item(prepared, workers)
    before = workers.trainer.accumulator_digest()
    with pytest.raises(TargetsMismatchError):
        workers.trainer.accumulate(rollout, replace(targets, **{field: value}))
    assert workers.trainer.accumulator_digest() == before


def test_content_that_changed_after_sealing_is_refused(prepared, workers):
    rollout, targets = item(prepared, workers)
    tokens = rollout.clean.tokens_BL.copy()
    tokens[0, 0] += 1
    with pytest.raises(CorruptBatchError, match="sealed"):
        workers.trainer.accumulate(replace(rollout, clean=replace(rollout.clean, tokens_BL=tokens)), targets)


def test_a_nan_from_the_teacher_is_refused_before_it_reaches_a_sum(prepared, workers):
    rollout, targets = item(prepared, workers)
    logits = np.array(decode(targets.arrays["logits"]))
    logits[rollout.student_batch.loss_weights > 0] = np.nan
    before = workers.trainer.accumulator_digest()
    with pytest.raises(ValueError, match=r"(?i)nan|finite"):
        workers.trainer.accumulate(rollout, replace(targets, arrays={"logits": encode(logits)}))
    assert workers.trainer.accumulator_digest() == before


def test_a_window_with_a_missing_item_cannot_be_closed(prepared, workers):
    workers.trainer.accumulate(*item(prepared, workers))
    with pytest.raises(OutOfOrderBatchError, match="1 of its 2 items"):
        workers.trainer.update()


def test_a_teacher_worker_refuses_weights_that_are_not_the_runs_teacher(prepared, workers):
    with pytest.raises(WeightsError, match="this run's teacher"):
        workers.teacher.load(flipped(prepared.weights.teacher))


def test_a_restored_trainer_goes_on_to_the_same_bits(prepared, workers):
    def step(number, version):
        for index in range(2):
            workers.trainer.accumulate(*item(prepared, workers, index, number, version))
        report = workers.trainer.update()
        workers.rollout.load(report.version, workers.trainer.publish(), 10 + number)
        return report.version

    assert isinstance(workers.trainer, Trainer) and isinstance(workers.trainer, Resumable)
    first = step(0, workers.version)
    workers.trainer.save()
    undisturbed = step(1, first)
    assert workers.trainer.restore() == [first]
    workers.rollout.load(first, workers.trainer.publish(), 20)
    assert step(1, first) == undisturbed


def test_every_freshness_error_counts_under_a_word_of_its_own():
    reasons = [kind.reason for kind in FreshnessError.__subclasses__()]
    assert len(set(reasons)) == len(reasons) == 8


def test_a_checkpoint_of_a_run_with_other_stop_tokens_is_refused_showing_both(prepared, workers, tmp_path):
    workers.trainer.save()
    other = TrainerWorker(replace(prepared.parts, stop_ids=(3, 12)), str(tmp_path / "checkpoints"), name="other")
    other.load(prepared.weights.student)
    with pytest.raises(CheckpointError, match=r'stop_ids: checkpoint "12", this run "3,12"'):
        other.restore()
