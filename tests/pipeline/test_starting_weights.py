"""The toy teacher and its cache, and what a run starts from."""

from dataclasses import replace

import numpy as np
import pytest

import pipeline.teacher
from contracts.errors import CheckpointError
from contracts.wire import decode_tree
from contracts.work import Prompt
from pipeline.build import assemble, prepare, starting_weights
from pipeline.config import parse_config
from pipeline.data.tasks import Example
from pipeline.groundwork import lay_groundwork
from pipeline.teacher import cache_key, obtain_teacher


class Letters:
    """``a`` → ``b`` or whatever else was set: a corpus that can change under the same name."""

    alphabet = "abc"
    completion = "b"

    def prompts(self):
        return {"train": [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}]}

    def correct(self, prompt: Prompt, completion: str) -> bool:
        return len(completion) == 1

    def examples(self):
        return [Example("a", self.completion)]


def ground(folder, **sections):
    tree = {
        "run": {"name": "letters", "cache": str(folder / "cache")},
        "task": {"name": f"{__name__}:Letters", "prompt_length": 1, "completion_length": 2},
        "model": {"width": 4, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 2, "mlp_width": 4},
        "teacher": {"steps": 1, "rows": 2},
        "warm_start": {"steps": 1, "rows": 2},
        "diffusion": {"block_size": 2},
        "training": {"steps": 1, "rows": 2},
        "evaluation": {"diversity_samples": 2},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return lay_groundwork(parse_config(tree))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("letters")


@pytest.fixture(scope="module")
def started(folder):
    """Weights of a run from the start, and the stages that were told of."""
    stages = []
    return starting_weights(ground(folder), lambda stage, *done, **numbers: stages.append(stage)), stages


def test_a_teacher_is_trained_once_and_its_weights_are_kept(folder, started):
    first, stages = started
    assert stages == ["teacher", "warm_start"]
    assert not first.teacher_report.cached
    _, report = obtain_teacher(ground(folder), lambda *done, **numbers: pytest.fail("trained again"))
    assert report == replace(first.teacher_report, cached=True)


def test_the_figures_of_a_cached_teacher_are_of_this_runs_task_and_samples(folder, started, monkeypatch):
    monkeypatch.setattr(Letters, "correct", lambda self, prompt, completion: True)
    other = ground(folder, evaluation={"diversity_samples": 0})
    _, report = obtain_teacher(other, lambda *done, **numbers: pytest.fail("trained again"))
    assert (report.accuracy, report.distinct_right_answers, report.cached) == (1.0, None, True)


def test_a_teacher_is_measured_in_batches_of_one_shape(folder, started, monkeypatch):
    shapes = []
    inner = pipeline.teacher.decode

    def decode(model, prompt_ids_BP, *rest):
        shapes.append(prompt_ids_BP.shape)
        return inner(model, prompt_ids_BP, *rest)

    monkeypatch.setattr(pipeline.teacher, "decode", decode)
    monkeypatch.setattr(pipeline.teacher, "ROWS_AT_ONCE", 40)
    obtain_teacher(ground(folder), lambda *done, **numbers: None)
    # Three prompts, at least 32 samples each.
    assert shapes == [(40, 1)] * 3


def test_the_cache_knows_everything_that_a_teachers_weights_depend_on(folder, monkeypatch):
    def key(**sections):
        return cache_key(ground(folder, **sections))

    plain = key()
    assert key(training={"rows": 4}, evaluation={"rows": 1}, diffusion={"block_size": 1}) == plain
    assert key(runner={"visible_cores": 3}) != plain
    assert key(teacher={"steps": 2}) != plain
    assert key(run={"seed": 1}) != plain
    for target, name, value in (
        (Letters, "completion", "c"),
        (Letters, "alphabet", "abcd"),
        (pipeline.teacher.jax, "__version__", "another"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            assert key() != plain
    monkeypatch.setenv("XLA_FLAGS", "--another")
    assert key() != plain


def test_a_damaged_teacher_is_refused(folder, started):
    (path,) = (folder / "cache" / "teachers").glob("*.safetensors")
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointError, match="saved with fingerprint"):
            obtain_teacher(ground(folder), lambda *done, **numbers: None)
        path.write_bytes(whole[:50])
        with pytest.raises(CheckpointError, match="is damaged"):
            obtain_teacher(ground(folder), lambda *done, **numbers: None)
    finally:
        path.write_bytes(whole)


def test_a_resumed_run_is_not_warmed_up_and_is_the_same_run(folder, started, tmp_path):
    first, _ = started
    stages = []
    ground(folder).write_prompts(tmp_path)
    resumed = prepare(ground(folder), tmp_path, lambda stage, *done, **numbers: stages.append(stage), resume=True)
    assert stages == []
    student, converted = decode_tree(resumed.weights.student), decode_tree(first.converted)
    assert student.keys() == converted.keys()
    for name, array in converted.items():
        np.testing.assert_array_equal(student[name], array)
    assert resumed.parts.run_id == assemble(ground(folder), first, tmp_path).parts.run_id


def test_a_run_is_named_by_its_prompts_too(folder, started, tmp_path):
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"prompt": "a"}\n')
    other = ground(folder, task={"prompts": str(mine)})
    names = {assemble(laid, started[0], tmp_path).parts.run_id for laid in (ground(folder), other)}
    assert len(names) == 2


def test_a_resumed_run_with_other_prompts_is_refused_before_a_teacher_is_made(folder, tmp_path):
    ground(folder).write_prompts(tmp_path)
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"prompt": "a"}\n')
    other = ground(folder, task={"prompts": str(mine)}, run={"cache": str(tmp_path / "cache")})
    with pytest.raises(CheckpointError, match="trained on prompts of digest"):
        prepare(other, tmp_path, lambda *done, **numbers: None, resume=True)
    assert not (tmp_path / "cache").exists()
