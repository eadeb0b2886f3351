"""The command line itself: quick to answer, settings by dotted path, recipes that read back."""

import subprocess
import sys
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from launch.cli import Run, main, resolve
from launch.overrides import apply_overrides, split_overrides
from launch.recipes import load, shipped
from pipeline.config import parse_config


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    program = (
        "import sys\n"
        "from launch.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    heavy = {'jax', 'ray', 'matplotlib', 'numpy', 'flax', 'orbax'} & sys.modules.keys()\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "limbeck" in done.stdout


def test_overrides_are_taken_out_wherever_they_stand():
    others, overrides = split_overrides(
        ["run", "--training.steps", "20", "split", "--run.name=a=b", "--resume", "--evaluation.sampler.value", "-1"]
    )
    assert others == ["run", "split", "--resume"]
    assert overrides == {"training.steps": "20", "run.name": "a=b", "evaluation.sampler.value": "-1"}


def test_an_override_with_dashes_names_the_same_setting():
    assert split_overrides(["--warm-start.steps", "3"])[1] == {"warm_start.steps": "3"}


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("training.steps", "20", 20),
        ("training.learning_rate", "1e-4", 1e-4),
        ("training.frozen", "true", True),
        ("training.max_grad_norm", "null", None),
        ("run.name", "17", "17"),
        ("run.name", "2024-01-01", "2024-01-01"),
        ("diffusion.mask", "7", 7),
        ("diffusion.mask", "append", "append"),
        ("task.stop_ids", "[3, 4]", (3, 4)),
        ("states.stop_token_weight", "0", 0),
        ("runner.rollout.resources", "{big: 1}", {"big": 1.0}),
    ],
)
def test_an_override_becomes_what_its_setting_holds(path, text, value):
    recipe = next(recipe for recipe in shipped() if recipe.name == "addition")
    place = parse_config(apply_overrides(recipe.tree, {path: text}))
    for name in path.split("."):
        place = getattr(place, name)
    assert place == value and type(place) is type(value)


def test_overriding_leaves_the_recipe_itself_unchanged():
    tree = {"training": {"steps": 1}}
    assert apply_overrides(tree, {"training.steps": "2"}) == {"training": {"steps": 2}}
    assert tree == {"training": {"steps": 1}}


def test_flags_and_dotted_paths_end_in_one_config():
    config = resolve(Run(recipe="addition", runner="inline"), {"run.seed": "5"})
    assert (config.runner.kind, config.run.seed) == ("inline", 5)


@pytest.mark.parametrize("recipe", shipped(), ids=lambda recipe: recipe.name)
def test_every_shipped_recipe_is_described_and_is_a_valid_config_of_its_own_name(recipe):
    assert parse_config(dict(recipe.tree)).run.name == recipe.name
    assert recipe.description.endswith(".")


def test_the_list_names_every_recipe(capsys):
    main(["recipes"])
    printed = capsys.readouterr().out
    assert all(recipe.name in printed for recipe in shipped())


def test_a_printed_recipe_reads_back_as_the_same_config(capsys, tmp_path):
    main(["recipes", "split", "--training.steps", "7"])
    path = tmp_path / "mine.yaml"
    path.write_text(capsys.readouterr().out)
    assert resolve(Run(config=str(path)), {}) == resolve(Run(recipe="split"), {"training.steps": "7"})


def test_prompts_of_a_config_file_are_looked_for_beside_it(tmp_path):
    (tmp_path / "mine.jsonl").touch()
    (tmp_path / "mine.yaml").write_text("task: {prompts: mine.jsonl}\n")
    assert load(tmp_path / "mine.yaml").tree["task"]["prompts"] == str(tmp_path / "mine.jsonl")
    (tmp_path / "mine.jsonl").unlink()
    assert load(tmp_path / "mine.yaml").tree["task"]["prompts"] == "mine.jsonl"


def test_an_unknown_option_ends_with_2():
    with pytest.raises(SystemExit) as ending:
        main(["run", "split", "--fast"])
    assert ending.value.code == 2


def test_a_section_cannot_be_set_as_a_whole():
    with pytest.raises(ConfigError, match="runner"):
        resolve(Run(recipe="addition"), {"runner.rollout": "3"})


def test_a_dry_run_prints_a_config_that_reads_back_and_writes_nothing(capsys, monkeypatch, tmp_path):
    from launch import environment

    monkeypatch.setattr(environment, "apply", lambda config: None)
    monkeypatch.chdir(tmp_path)
    main(["run", "addition", "--runner", "inline", "--dry-run", "--training.steps", "9"])
    printed = capsys.readouterr().out
    assert "9 steps of 2 × 64 rows at threshold(0.9)" in printed
    assert "Nothing was started or written" in printed
    assert list(tmp_path.iterdir()) == []
    Path("resolved.yaml").write_text(printed[: printed.index("\n\n")])
    assert resolve(Run(config="resolved.yaml"), {}).training.steps == 9


def test_a_section_that_stands_for_its_default_can_be_opened_by_an_override():
    tree = {"evaluation": {"sampler": None}, "student": None}
    changed = apply_overrides(tree, {"evaluation.sampler.value": "0.5", "student.width": "32", "run.name": "1"})
    assert changed == {"evaluation": {"sampler": {"value": 0.5}}, "student": {"width": 32}, "run": {"name": "1"}}
    assert apply_overrides(tree, {"evaluation.sampler": "null"}) == tree
