"""One small run, prepared once: a toy teacher after a few steps, its conversion, and workers that hold them."""

from types import SimpleNamespace

import pytest

from pipeline.build import prepare
from pipeline.config import parse_config
from pipeline.groundwork import lay_groundwork
from pipeline.workers.rollout import RolloutWorker
from pipeline.workers.teacher import TeacherWorker
from pipeline.workers.trainer import TrainerWorker


def small_config(cache, **sections):
    tree = {
        "run": {"name": "small", "cache": str(cache)},
        "task": {"name": "addition", "prompt_length": 6, "completion_length": 4},
        "model": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 32},
        "teacher": {"steps": 3, "rows": 8},
        "diffusion": {"block_size": 4},
        "training": {"steps": 3, "rows": 4, "micro_batches": 2},
        "evaluation": {"rows": 4, "batch": 8, "diversity_samples": 2, "diversity_prompts": 2},
        "runner": {"kind": "inline"},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return parse_config(tree)


@pytest.fixture(scope="session")
def make_config(tmp_path_factory):
    """`(**sections) -> RunConfig` of a small addition run whose toy teacher is trained once for all tests."""
    cache = tmp_path_factory.mktemp("cache")
    return lambda **sections: small_config(cache, **sections)


@pytest.fixture(scope="session")
def prepared(make_config, tmp_path_factory):
    return prepare(lay_groundwork(make_config()), tmp_path_factory.mktemp("run"), lambda *_, **__: None)


@pytest.fixture
def workers(prepared, tmp_path):
    """Three workers with their weights, and the version that the student and the trainer hold."""
    rollout = RolloutWorker(prepared.parts, name="rollout-0")
    teacher = TeacherWorker(prepared.parts, name="teacher-0")
    trainer = TrainerWorker(prepared.parts, str(tmp_path / "checkpoints"), name="trainer-0")
    teacher.load(prepared.weights.teacher)
    version = trainer.load(prepared.weights.student)
    rollout.load(version, prepared.weights.student, 1)
    return SimpleNamespace(rollout=rollout, teacher=teacher, trainer=trainer, version=version)
