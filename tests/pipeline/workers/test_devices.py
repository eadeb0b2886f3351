"""A trainer with several devices uses them all, and comes to the same weights."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from contracts.wire import decode_tree

PROGRAM = Path(__file__).with_name("devices_program.py")


@pytest.fixture(scope="module")
def items(prepared, tmp_path_factory):
    rollout, teacher = (spec.construct("worker") for spec in (prepared.specs.rollout, prepared.specs.teacher))
    trainer = prepared.specs.trainer.construct("trainer-0")
    teacher.load(prepared.weights.teacher)
    version = trainer.load(prepared.weights.student)
    rollout.load(version, prepared.weights.student, 1)
    written = [rollout.generate(prepared.request(0, index, version)) for index in range(2)]
    return trainer, [(each, teacher.score(each)) for each in written]


@pytest.fixture(scope="module")
def on_two(prepared, items, tmp_path_factory):
    """What the same items come to on two host devices, and the published tree."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "given.pickle").write_bytes(pickle.dumps((prepared.parts, prepared.weights.student, items[1])))
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), pickle.loads((folder / "tree.pickle").read_bytes())


def test_two_devices_are_both_used_and_train_to_the_weights_of_one(items, on_two):
    trainer, pairs = items
    for rollout, targets in pairs:
        trainer.accumulate(rollout, targets)
    metrics = trainer.update().metrics
    found, tree = on_two
    assert found["devices"] == [2] and found["restored"]
    # Adam divides by the size of the gradient, so a gradient near 0 may move a weight by much of the rate (1e-3).
    assert found["metrics"].keys() == metrics.keys()
    for name, value in metrics.items():
        assert found["metrics"][name] == pytest.approx(value, abs=1e-5), name
    one, two = decode_tree(trainer.publish()), decode_tree(tree)
    for name in one:
        np.testing.assert_allclose(two[name], one[name], atol=1e-5, rtol=0)


def test_rows_that_do_not_divide_over_the_devices_are_refused_at_the_start(on_two):
    assert "training.rows is 5 and the trainer has 2 devices" in on_two[0]["refusal"]
