"""The gradient does not know how many devices or processes computed it."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("mesh_program.py")
ROOT = Path(__file__).parents[3]


def start(devices, *arguments):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    try:
        output, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-4000:]
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def meshes():
    return finish(start(4, "meshes"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    folder = str(tmp_path_factory.mktemp("shared"))
    return [finish(process) for process in [start(2, "process", str(rank), port, folder) for rank in range(2)]]


SHAPES = ["1x1 depth 1", "2x1 depth 1", "4x1 depth 2", "2x2 depth 2", "1x4 depth 1"]


@pytest.mark.parametrize("shape", SHAPES)
def test_any_mesh_gives_the_float64_gradient_loss_and_evaluation(meshes, shape):
    found = meshes[shape]
    assert found["gradient"] < 1e-6
    assert max(found["loss"], found["evaluation"]) < 1e-6
    assert found["denominator"] < 1e-5


def test_meshes_and_depths_train_the_same_weights(meshes, capsys):
    one = meshes["1x1 depth 1"]["weights"]
    gaps = {
        shape: max(np.abs(np.subtract(meshes[shape]["weights"][name], one[name])).max() for name in one)
        for shape in SHAPES
    }
    with capsys.disabled():
        print(f"\n  weights after three Adam steps, against one device: {max(gaps.values()):.1e}")
    assert max(gaps.values()) < 1e-5


def test_every_mesh_compiles_each_step_once(meshes):
    for shape in SHAPES:
        fused = int(shape.endswith("1"))
        expected = {"fused": fused, "accumulate": 1 - fused, "update": 1 - fused, "evaluate": 1}
        assert meshes[shape]["compilations"] == expected, shape


def test_parameters_and_moments_are_split_over_the_fsdp_axis_together(meshes):
    for shape, pieces in (("4x1 depth 2", 1), ("2x2 depth 2", 2), ("1x4 depth 1", 4)):
        found = meshes[shape]
        assert found["shard"] == 8 * 8 // pieces
        assert found["moments"] == found["specs"]
        assert ("fsdp" in found["specs"]["embedding"]) is (pieces > 1)
    assert meshes["indivisible parameter"] == "P()"


def test_an_indivisible_batch_is_refused_with_both_numbers_and_leaves_the_window_alone(meshes):
    assert meshes["indivisible"]["untouched"]
    assert "batch['targets'] has 6 rows" in meshes["indivisible"]["message"]
    assert "4 data shards (data=4, fsdp=1)" in meshes["indivisible"]["message"]


def test_two_processes_with_unequal_active_tokens_equal_the_one_process_reference(ranks, capsys):
    shapes = [shape for shape in ranks[0] if shape != "restored"]
    assert len(shapes) == 2
    worst = max(rank[shape][part] for rank in ranks for shape in shapes for part in ("gradient", "loss"))
    with capsys.disabled():
        print(f"\n  two processes against float64: {worst:.1e}")
    assert worst < 1e-5
    for shape in shapes:
        assert ranks[0][shape]["weights"] == ranks[1][shape]["weights"]


def test_two_processes_save_and_restore_one_checkpoint(ranks):
    assert [rank["restored"] for rank in ranks] == [True, True]
