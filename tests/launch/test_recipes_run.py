"""Every shipped toy recipe starts and closes two steps, from its own file (smollm2: in test_smollm2_on_ray.py)."""

import json

import pytest

from launch import environment
from launch.cli import main
from launch.recipes import shipped

TOY = [recipe.name for recipe in shipped() if recipe.name != "smollm2"]


@pytest.mark.parametrize("name", TOY)
def test_a_shipped_recipe_closes_two_steps(name, tmp_path, monkeypatch):
    few = ["--teacher.steps", "2", "--warm_start.steps", "2", "--training.steps", "2", "--evaluation.rows", "4"]
    small = ["--evaluation.diversity_samples", "2", "--evaluation.diversity_prompts", "2", "--evaluation.batch", "8"]
    where = ["--run.folder", str(tmp_path), "--run.cache", str(tmp_path / "cache"), "--runner", "inline"]
    monkeypatch.setattr(environment, "apply", lambda config: None)
    main(["run", name, *few, *small, *where])
    summary = json.loads((tmp_path / name / "summary.json").read_text())
    assert (summary["steps"], summary["refused"]) == (2, {})
    assert summary["rows_trained"] == 2 * 128
