"""Settings that cannot describe a training are refused before anything is built."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from contracts.errors import ConfigError
from pipeline.training.config import CheckpointOptions, TrainingConfig
from pipeline.training.sharding import training_mesh


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_steps": 0}, "max_steps is 0"),
        ({"eval_every_n_steps": -1}, "eval_every_n_steps is -1"),
        ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps is True"),
        ({"max_inflight_computations": 0}, "max_inflight_computations is 0"),
    ],
)
def test_counts_must_be_positive_integers(settings, words):
    with pytest.raises(ConfigError, match=words):
        TrainingConfig(**settings)
    with pytest.raises(ConfigError, match="keep is 0"):
        CheckpointOptions(keep=0)


def test_depth_one_is_the_default_and_may_be_left_out():
    assert TrainingConfig().depth == TrainingConfig(gradient_accumulation_steps=None).depth == 1
    assert TrainingConfig(gradient_accumulation_steps=4).depth == 4


def test_axes_that_the_mesh_lacks_are_named_with_those_it_has():
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",))
    with pytest.raises(ConfigError, match=r"mesh has axes \('data',\).*\['fsdp'\]"):
        TrainingConfig(mesh=mesh)
    assert TrainingConfig(mesh=mesh, data_sharding_axis=("data",), fsdp_axis=None).mesh is mesh


def test_a_mesh_must_use_every_device_given():
    assert training_mesh().shape == {"data": jax.device_count(), "fsdp": 1}
    with pytest.raises(ConfigError, match=r"data=3 × fsdp=1 needs 3 devices and there are 1"):
        training_mesh(jax.devices()[:1], data=3)
