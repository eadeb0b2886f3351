"""Checkpoints: complete, compared with the run, and verified leaf by leaf."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from contracts.errors import CheckpointError, WeightsError
from pipeline.training import checkpoint as checkpoint_module
from pipeline.training.checkpoint import CheckpointStore
from pipeline.training.config import CheckpointOptions


def trees(seed=0):
    draw = np.random.default_rng(seed)
    return {
        "parameters": {
            "layers.0.kernel": jnp.asarray(draw.normal(size=(64, 32)), jnp.float32),
            "layers.1.kernel": jnp.asarray(draw.normal(size=(32,)), jnp.bfloat16),
        },
        "optimizer": (optax.EmptyState(), {"count": jnp.int32(3), "key": jax.random.key(7), "none": jnp.zeros((0, 3))}),
        "published": {"layers.0.kernel": draw.normal(size=(4, 4)).astype(np.float16)},
        "nothing": {},
    }


def bits(tree):
    return [
        np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf).tobytes()
        for leaf in jax.tree.leaves(tree)
    ]


@pytest.fixture
def store(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", CheckpointOptions(save_interval_steps=5, keep=2))
    yield store
    store.close()


def test_what_is_saved_comes_back_with_structure_dtype_and_metadata(store):
    saved = trees()
    store.save(4, saved, {"run": {"seed": 1, "stops": (2, 3)}, "cursor": 17})
    found = store.restore(saved, expected_metadata={"run": {"seed": 1, "stops": [2, 3]}})
    assert found.step == 4
    assert found.metadata == {"run": {"seed": 1, "stops": [2, 3]}, "cursor": 17}
    assert jax.tree.structure(found.trees) == jax.tree.structure(saved)
    assert bits(found.trees) == bits(saved)
    assert jax.tree.map(lambda leaf: str(leaf.dtype), found.trees) == jax.tree.map(lambda leaf: str(leaf.dtype), saved)
    assert isinstance(found.trees["published"]["layers.0.kernel"], np.ndarray)
    assert store.metadata()["cursor"] == 17


def test_one_tree_can_be_read_alone_from_shapes(store):
    saved = trees()
    store.save(1, saved, {})
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved["parameters"])
    found = store.restore({"parameters": shapes})
    assert bits(found.trees["parameters"]) == bits(saved["parameters"])


def test_only_the_newest_are_kept_and_one_step_may_be_written_again(store):
    for step in (1, 2, 3):
        store.save(step, trees(step), {"step": step})
    assert (store.steps(), store.latest()) == ([2, 3], 3)
    store.save(2, trees(9), {"step": 9})
    assert bits(store.restore(trees(), step=2).trees) == bits(trees(9))
    assert [step for step in range(11) if store.due(step) and step] == [5, 10]


def test_a_checkpoint_that_is_not_there_is_named(store):
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        store.restore(trees())
    store.save(1, trees(), {})
    with pytest.raises(CheckpointError, match=r"no checkpoint 7 in .*: \[1\]"):
        store.restore(trees(), step=7)


def test_metadata_that_differ_are_printed_with_both_values_and_equal_ones_are_not(store):
    store.save(1, trees(), {"run": {"seed": 1, "data": "a", "lag": 0}, "cursor": 5})
    with pytest.raises(CheckpointError) as raised:
        store.restore(trees(), expected_metadata={"run": {"seed": 2, "data": "a", "new": True}})
    assert "run.seed: checkpoint 1, this run 2" in str(raised.value)
    assert "run.lag: checkpoint 0, this run absent" in str(raised.value)
    assert "run.new: checkpoint absent, this run true" in str(raised.value)
    assert "data:" not in str(raised.value)
    assert "cursor" not in str(raised.value)


def test_leaves_that_differ_are_printed_all_at_once(store):
    store.save(1, trees(), {})
    asked = trees()
    asked["parameters"] = {"layers.0.kernel": jnp.zeros((64, 16)), "other": jnp.zeros(())}
    asked["unknown"] = {}
    with pytest.raises(CheckpointError) as raised:
        store.restore(asked)
    assert "parameters/layers.0.kernel: checkpoint float32[64, 32], this run float32[64, 16]" in str(raised.value)
    assert "parameters/layers.1.kernel: checkpoint bfloat16[32], this run absent" in str(raised.value)
    assert "parameters/other: checkpoint absent, this run float32[]" in str(raised.value)
    assert "'unknown'" in str(raised.value)


def test_names_and_metadata_that_cannot_be_saved_are_refused(store):
    with pytest.raises(CheckpointError, match="'record'"):
        store.save(1, {"record": {}}, {})
    with pytest.raises(CheckpointError, match="JSON"):
        store.save(1, trees(), {"array": np.zeros(2)})
    with pytest.raises(CheckpointError, match=r"'a\.b'"):
        store.save(1, {"tree": {"a.b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}}}, {})
    assert store.steps() == []


def largest_file(store, step):
    return max(
        (path for path in Path(store.directory, str(step)).rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )


def flip(path, at, bit=0x10):
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


def test_a_bit_flipped_on_disk_is_refused(store):
    store.save(1, trees(), {})
    store.save(2, trees(), {})
    path = largest_file(store, 2)
    flip(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="checkpoint 2"):
        store.restore(trees())
    assert bits(store.restore(trees(), step=1).trees) == bits(trees())


def test_a_digit_flipped_in_the_metadata_is_refused(store):
    store.save(1, trees(), {"cursor": 1234})
    record = Path(store.directory, "1", "record", "metadata")
    flip(record, record.read_bytes().index(b"1234"), bit=2)
    with pytest.raises(CheckpointError, match="its record does not have the digest"):
        store.metadata()


def test_a_flipped_bit_that_orbax_reads_without_complaint_is_refused_by_leaf(store, monkeypatch):
    saved = trees()
    store.save(1, saved, {})
    # The same arrays but for one bit, written by Orbax as a whole and valid checkpoint, under the old record.
    flipped = np.array(saved["parameters"]["layers.0.kernel"])
    flipped.view(np.uint32)[5, 5] ^= 1
    real = checkpoint_module.digest
    monkeypatch.setattr(
        checkpoint_module,
        "digest",
        lambda leaf: real(saved["parameters"]["layers.0.kernel"] if leaf.shape == (64, 32) else leaf),
    )
    store.save(1, {**saved, "parameters": {**saved["parameters"], "layers.0.kernel": jnp.asarray(flipped)}}, {})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"damaged: parameters/layers\.0\.kernel do not have the digest"):
        store.restore(trees())


def test_a_swap_of_two_equal_shapes_is_noticed(store, monkeypatch):
    saved = {"tree": {"a": jnp.arange(4.0), "b": jnp.arange(4.0) + 1}}
    store.save(1, saved, {})
    shutil.copytree(Path(store.directory, "1"), copy := Path(store.directory).parent / "copy")
    store.save(1, {"tree": {"a": saved["tree"]["b"], "b": saved["tree"]["a"]}}, {})
    shutil.rmtree(Path(store.directory, "1", "record"))
    shutil.copytree(copy / "record", Path(store.directory, "1", "record"))
    with pytest.raises(CheckpointError, match="tree/a, tree/b"):
        store.restore(saved)


KILLED = """
import sys
import numpy as np
from pipeline.training.checkpoint import CheckpointStore
store = CheckpointStore(sys.argv[1])
for step in range(1000):
    store.save(step, {"tree": {"x": np.full((512, 512), step, np.float32)}}, {"step": step})
    print(step, flush=True)
"""


def test_a_process_killed_while_saving_leaves_a_whole_checkpoint(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while process.stdout.readline().strip() != "3":
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    store = CheckpointStore(tmp_path)
    found = store.restore({"tree": {"x": np.zeros((512, 512), np.float32)}})
    assert found.step >= 3
    assert found.metadata == {"step": found.step}
    assert np.all(found.trees["tree"]["x"] == found.step)
    store.close()


def run_window(trainer, seeds):
    for seed in seeds:
        trainer.accumulate(trainer_batch(seed))
    return trainer.update()


def trainer_batch(seed):
    draw = np.random.default_rng(seed)
    return {
        "tokens": draw.integers(0, 12, (2, 5)).astype(np.int32),
        "targets": draw.integers(0, 12, (2, 5)).astype(np.int32),
        "weights": draw.uniform(0, 1, (2, 5)).astype(np.float32),
    }


@pytest.mark.parametrize("depth", [1, 2])
def test_a_trainer_goes_on_from_a_state_as_if_nothing_had_happened(small, store, depth):
    trainer = small.trainer(optax.adam(0.05), depth=depth)
    run_window(trainer, range(depth))
    state = trainer.state()
    live = trainer.live_state()
    store.save(
        live.progress.windows, {**live.trees, "published": {"w": jnp.ones(2)}}, {"progress": live.progress.as_json()}
    )
    expected = [run_window(trainer, range(depth * k, depth * k + depth)) for k in (1, 2)]
    last = bits(trainer.state().trees)

    trainer.accumulate(trainer_batch(99))
    trainer.restore(state)
    assert (trainer.windows, trainer.train_steps, trainer.iter_steps, trainer.open_micro_batches) == (1, 1, depth, 0)
    again = [run_window(trainer, range(depth * k, depth * k + depth)) for k in (1, 2)]
    assert again == expected
    assert bits(trainer.state().trees) == last

    other = small.trainer(optax.adam(0.05), depth=depth)
    run_window(other, [5] * depth)
    found = store.restore(other.live_state().trees)
    progress = type(live.progress).from_json(found.metadata["progress"])
    other.restore(type(state)(found.trees, progress))
    assert [run_window(other, range(depth * k, depth * k + depth)) for k in (1, 2)] == expected
    assert bits(other.state().trees) == last
    assert other.compilations()["fused" if depth == 1 else "accumulate"] == 1


def test_a_state_of_another_model_is_refused_with_every_difference(small):
    trainer = small.trainer(optax.adam(0.05))
    state = small.trainer(optax.sgd(0.1), model=small.Model(param_dtype=jnp.bfloat16)).state()
    with pytest.raises(WeightsError) as raised:
        trainer.restore(state)
    assert "parameters.kernel: given bfloat16[8, 8], trainer float32[8, 8]" in str(raised.value)
    assert "optimizer.0.mu.kernel: given absent, trainer float32[8, 8]" in str(raised.value)
