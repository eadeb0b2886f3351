"""`train`: what it draws, when it evaluates, saves and stops, and where it goes on."""

import jax
import numpy as np
import optax
import pytest

from contracts.errors import BatchValueError, CheckpointError, ConfigError
from pipeline.training.config import CheckpointOptions
from pipeline.training.hooks import TrainingHooks
from pipeline.training.position import PositionedData


class Listening(TrainingHooks):
    """Writes down what it hears."""

    def __init__(self):
        self.updates, self.evaluations, self.events = [], [], []

    def on_train_start(self, trainer):
        self.events.append(("start", trainer.windows))

    def on_update(self, trainer, report):
        self.updates.append(report)
        assert trainer.train_steps == report.train_steps

    def on_evaluate(self, trainer, report):
        self.evaluations.append(report)

    def on_checkpoint(self, trainer, step):
        self.events.append(("checkpoint", step))

    def on_train_end(self, trainer):
        self.events.append(("end", trainer.windows))


class Counted:
    """An iterator that remembers how far it was drawn, with the state that a checkpoint needs."""

    def __init__(self, batches):
        self.batches, self.drawn = batches, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.drawn == len(self.batches):
            raise StopIteration
        self.drawn += 1
        return self.batches[self.drawn - 1]


class Resumable(Counted):
    def get_state(self):
        return {"next": self.drawn}

    def set_state(self, state):
        self.drawn = state["next"]


def batches(small, count):
    return [small.batch(2, seed=seed) for seed in range(count)]


def weights(trainer):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.live_state().trees)]


def assert_same_bits(left, right):
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("depth", [1, 2])
def test_max_steps_draws_no_batch_that_is_not_used(small, depth):
    trainer = small.trainer(depth=depth, max_steps=2)
    data = Counted(batches(small, 9))
    trainer.train(data)
    assert (data.drawn, trainer.iter_steps, trainer.train_steps) == (2 * depth, 2 * depth, 2)
    trainer.train(data)
    assert data.drawn == 2 * depth


def test_skipped_windows_count_towards_max_steps(small):
    trainer = small.trainer(max_steps=3)
    trainer.train([small.batch(2, seed=0, weights=0.0), *batches(small, 5)])
    assert (trainer.windows, trainer.train_steps) == (3, 2)


def test_the_data_may_end_inside_a_window(small):
    data = batches(small, 5)
    listening = Listening()
    trainer = small.trainer(small.capture(), depth=3).with_hooks(listening)
    _, gradients, weight = small.reference(small.parameters(trainer), data[3:])
    trainer.train(data)
    assert [(report.micro_batches, report.iter_steps) for report in listening.updates] == [(3, 3), (2, 5)]
    assert listening.updates[-1].denominator == pytest.approx(weight, abs=1e-5)
    assert small.distance(trainer.state().trees["optimizer"], gradients) < 1e-6


def test_train_does_what_the_step_level_api_does(small):
    data = batches(small, 4)
    by_hand = small.trainer(optax.adam(0.01), depth=2)
    for start in (0, 2):
        for batch in data[start : start + 2]:
            by_hand.accumulate(batch)
        by_hand.update()
    trained = small.trainer(optax.adam(0.01), depth=2)
    trained.train(data)
    assert_same_bits(weights(by_hand), weights(trained))


def test_hooks_hear_every_window_once_in_order_with_one_gradient_norm(small):
    listening = Listening()
    trainer = small.trainer(depth=2, max_inflight_computations=5, metrics_prefix="train/").with_hooks(listening)
    trainer.train(batches(small, 8))
    assert [report.window for report in listening.updates] == [0, 1, 2, 3]
    assert [report.train_steps for report in listening.updates] == [1, 2, 3, 4]
    assert set(listening.updates[0].metrics) == {"train/loss", "train/accuracy", "train/grad_norm"}
    assert listening.events == [("start", 0), ("end", 4)]


def test_evaluation_comes_every_n_windows_and_trains_nothing(small):
    listening = Listening()
    trainer = small.trainer(optax.sgd(0.0), eval_every_n_steps=2).with_hooks(listening)
    eval_ds = [small.batch(2, seed=50), small.batch(3, seed=51)]
    loss, _, _ = small.reference(small.parameters(trainer), eval_ds)
    trainer.train(batches(small, 5), eval_ds)
    assert [(report.window, report.batches) for report in listening.evaluations] == [(2, 2), (4, 2)]
    assert listening.evaluations[0].loss == pytest.approx(loss, abs=1e-6)
    assert (trainer.iter_steps, trainer.train_steps) == (5, 5)


def test_evaluation_data_that_is_used_up_is_an_error(small):
    trainer = small.trainer(eval_every_n_steps=1)
    with pytest.raises(BatchValueError, match="iterated each time"):
        trainer.train(batches(small, 2), iter([small.batch(2, seed=0)]))
    with pytest.raises(ConfigError, match="eval_every_n_steps"):
        small.trainer().train(batches(small, 1), batches(small, 1))


@pytest.mark.parametrize("depth", [1, 2])
def test_without_jit_the_numbers_are_the_same_to_rounding(small, depth):
    data = batches(small, 2 * depth)
    jitted, eager = (small.trainer(optax.sgd(0.1), depth=depth) for _ in range(2))
    jitted.train(data)
    eager.train(data, skip_jit=True)
    assert small.distance(small.parameters(jitted), small.parameters(eager)) < 1e-6
    assert eager.train_steps == 2


def checkpointed(small, folder, **changes):
    settings = {"depth": 2, "checkpointing_options": CheckpointOptions(save_interval_steps=2, keep=2)}
    return small.trainer(optax.adam(0.05), checkpoint_root_directory=folder, **{**settings, **changes})


def test_a_resumed_run_ends_with_the_weights_of_an_unbroken_one(small, tmp_path):
    data = batches(small, 11)
    whole = small.trainer(optax.adam(0.05), depth=2)
    whole.train(data)
    broken = checkpointed(small, tmp_path, max_steps=3).with_hooks(first := Listening())
    broken.train(Resumable(data))
    resumed = checkpointed(small, tmp_path).with_hooks(second := Listening())
    stream = Resumable(data)
    resumed.train(stream)
    assert first.events == [("start", 0), ("checkpoint", 2), ("checkpoint", 3), ("end", 3)]
    assert second.events == [("start", 3), ("checkpoint", 4), ("checkpoint", 6), ("end", 6)]
    assert [report.window for report in second.updates] == [3, 4, 5]
    assert stream.drawn == 11
    assert (resumed.iter_steps, resumed.train_steps) == (11, 6)
    assert_same_bits(weights(whole), weights(resumed))


def test_the_stored_position_is_used_even_where_step_counts_would_say_otherwise(small, tmp_path):
    data = batches(small, 6)
    # Two batches were drawn by somebody else before: the position is 4, while two windows of one batch were closed.
    stream = Resumable(data)
    next(stream), next(stream)
    checkpointed(small, tmp_path, depth=1, max_steps=2).train(stream)
    resumed = checkpointed(small, tmp_path, depth=1, max_steps=3)
    stream = Resumable(data)
    resumed.train(stream)
    assert stream.drawn == 5


def test_a_resume_under_another_contract_prints_the_fields_that_differ(small, tmp_path):
    data = batches(small, 2)
    checkpointed(small, tmp_path, checkpoint_contract={"data": "a", "seed": 1}).train(data)
    other = checkpointed(small, tmp_path, depth=1, checkpoint_contract={"data": "b", "seed": 1})
    with pytest.raises(CheckpointError) as raised:
        other.train(data)
    assert 'contract.data: checkpoint "a", this run "b"' in str(raised.value)
    assert "contract.gradient_accumulation_steps: checkpoint 2, this run 1" in str(raised.value)
    assert "seed" not in str(raised.value)


def test_a_resume_with_data_that_cannot_be_positioned_is_refused(small, tmp_path):
    data = batches(small, 4)
    checkpointed(small, tmp_path, max_steps=1).train(Counted(data))
    with pytest.raises(CheckpointError, match="get_state and set_state"):
        checkpointed(small, tmp_path).train(Counted(data))
    with pytest.raises(CheckpointError, match=r"'iterator'.*'index'"):
        checkpointed(small, tmp_path).train(data)


def test_positions_are_taken_at_once_for_sequences_states_and_grain():
    grain = pytest.importorskip("grain")
    numbers = list(range(10))
    for make in (
        lambda: numbers,
        lambda: Resumable(numbers),
        lambda: grain.MapDataset.source(numbers).to_iter_dataset(),
    ):
        first, second = PositionedData(make()), PositionedData(make())
        drawn = [first.draw() for _ in range(4)]
        second.seek(first.position())
        assert (drawn[-1], second.draw(), first.draw()) == ((3,), (4,), (4,))
        assert second.position() == first.position()
        assert sum(1 for _ in iter(second.draw, ())) == 5
    with pytest.raises(CheckpointError, match="has 10"):
        PositionedData(numbers).seek({"kind": "index", "drawn": 11})
