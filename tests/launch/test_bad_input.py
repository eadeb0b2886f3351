"""What a command line refuses: exit code 2, the sentence, and nothing started or written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import environment
from launch.cli import main

INLINE = ("run", "addition", "--runner", "inline")


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    """Commands start in an empty folder, and leave the test process's own environment alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "apply", lambda config: None)


@pytest.fixture
def refused(capsys):
    """Run a command that must end with 2 and leave the folder as it was; returns what it said."""

    def run(*arguments: str) -> str:
        before = contents()
        with pytest.raises(SystemExit) as ending:
            main(arguments)
        said = capsys.readouterr().err
        assert ending.value.code == 2, said
        assert contents() == before
        return " ".join(said.split())

    return run


def contents() -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in Path.cwd().rglob("*")}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "splitt"), "there is no recipe 'splitt'. Did you mean split?"),
        (("run",), "a recipe or --config FILE; neither was given"),
        (("run", "split", "--config", "mine.yaml"), "a recipe or --config FILE; both was given"),
        (("run", "--config", "mine.yaml"), "the config mine.yaml cannot be read: No such file or directory"),
        ((*INLINE, "--training.stepz", "3"), "training.stepz"),
        ((*INLINE, "--trainin.steps", "3"), "trainin"),
        ((*INLINE, "--training.steps", "many"), "training.steps: Input should be a valid integer"),
        ((*INLINE, "--training.steps"), "--training.steps needs a value"),
        ((*INLINE, "--run.seed", "1", "--run.seed=2"), "--run.seed is given twice, as 1 and as 2"),
        ((*INLINE, "--runner.kind", "ray"), "runner.kind is given twice, by its flag and by its dotted path"),
        ((*INLINE, "--training.steps.more", "3"), "training.steps is a setting (400), not a section"),
        ((*INLINE, "--diffusion.block_size", "0"), "diffusion.block_size: Input should be greater than or equal to 1"),
        ((*INLINE, "--rollout.value", "1.5"), "must lie in [0, 1]; got 1.5"),
        ((*INLINE, "--evaluation.sampler.value", "-0.1"), "must lie in [0, 1]; got -0.1"),
        ((*INLINE, "--run.name", "../elsewhere"), "run.name"),
        # The alphabet 0123456789+= takes the ids 0 to 11, its end token 12.
        ((*INLINE, "--diffusion.mask", "12"), "mask id 12 is also eos and stop"),
        ((*INLINE, "--diffusion.mask", "13"), "diffusion.mask: id 13 is not among the 13 rows of the embedding"),
        ((*INLINE, "--task.stop_ids", "[99]"), "task.stop_ids: [99] must be at least one id in [0, 13)"),
        ((*INLINE, "--task.name", "subtraction"), "there is no task 'subtraction'"),
        ((*INLINE, "--task.prompts", "none.jsonl"), "the prompts none.jsonl cannot be read: No such file or directory"),
        ((*INLINE, "--task.completion_length", "3"), "has 6 + 4 tokens, stop included; the task's lengths are 6 + 3"),
        ((*INLINE, "--rollout.temperature", ".inf"), "rollout.temperature: Input should be a finite number"),
        ((*INLINE, "--task.prompt_length", "5"), "6 tokens, but a prompt has 1 to 5"),
        ((*INLINE, "--resume"), "there is no run at runs/addition to continue"),
        ((*INLINE, "--resume", "--overwrite"), "give one of them"),
        ((*INLINE, "--runner.teacher.platform", "tpu"), "inline runs every role in one process"),
        (("recipes", "splitt"), "there is no recipe 'splitt'"),
        (("recipes", "--run.name", "x"), "takes no settings"),
        (("eval", "nowhere"), "there is no run at runs/nowhere"),
        (("generate", "nowhere", "--prompt", "1="), "there is no run at runs/nowhere"),
        (("generate", "nowhere"), "nothing to complete"),
    ],
    ids=lambda value: " ".join(value[:6]) if isinstance(value, tuple) else None,
)
def test_unusable_input_is_named_and_refused(refused, monkeypatch, arguments, sentence):
    if "platform" in " ".join(arguments):
        monkeypatch.setattr(environment, "apply", environment.driver_environment)
    assert sentence in refused(*arguments)


def test_every_problem_of_a_config_is_told_at_once(refused):
    said = refused(
        *INLINE, "--diffusion.block_size", "0", "--rollout.value", "7", "--trainin.steps", "1", "--run.seed", "-1"
    )
    assert [path for path in ("diffusion.block_size", "rollout", "trainin", "run.seed") if path not in said] == []


def test_an_empty_prompts_file_is_refused(refused):
    Path("empty.jsonl").touch()
    assert "the prompts empty.jsonl are empty" in refused(*INLINE, "--task.prompts", "empty.jsonl")


def test_every_bad_row_of_a_prompts_file_is_told_at_once(refused):
    Path("mine.jsonl").write_text('{"prompt": "1+1="}\nnot json\n{"prompt": ""}\n{"prompt": "17+25="}\n')
    said = refused(*INLINE, "--task.prompts", "mine.jsonl")
    assert "2 of 4 prompts cannot be used" in said
    assert "mine.jsonl:2: not JSON" in said
    assert "mine.jsonl:3" in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty; its top level must be sections"),
        ("- run\n", "is a list; its top level must be sections"),
        ("run: [1\n", "mine.yaml:2: "),
        ("run:\n  name: a\n  name: b\n", "mine.yaml:3: 'name' is given twice"),
        ("run:\n  name: mine\n", "task: Field required"),
    ],
)
def test_a_config_file_that_is_no_config_is_refused_with_its_line(refused, text, sentence):
    Path("mine.yaml").write_text(text)
    assert sentence in refused("run", "--config", "mine.yaml")


def test_an_existing_run_folder_is_refused_naming_the_ways_out(refused):
    folder = Path("runs/addition")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {name: addition}\n")
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    said = refused(*INLINE)
    assert "the run folder runs/addition exists" in said
    assert all(way in said for way in ("--resume", "--overwrite", "--run.name"))


def test_overwriting_leaves_a_folder_alone_that_is_no_run_folder(refused):
    Path("runs/addition").mkdir(parents=True)
    Path("runs/addition/thesis.tex").write_text("years of work")
    assert "is no run folder" in refused(*INLINE, "--overwrite")


def test_a_folder_that_shadows_a_package_for_rays_workers_is_refused(refused):
    Path("contracts").mkdir()
    Path("contracts/__init__.py").touch()
    Path("pipeline.py").touch()
    said = refused("run", "addition")
    assert "workers would import 'contracts' from" in said
    assert "workers would import 'pipeline' from" in said


def command_line(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess:
    """A process of its own that looks for packages in its folder first, as `python -m` does."""
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )


def test_a_package_that_shadows_contracts_in_this_process_is_refused_before_it_is_imported(tmp_path):
    (tmp_path / "contracts").mkdir()
    (tmp_path / "contracts/__init__.py").write_text("raise RuntimeError('the wrong contracts')")
    done = command_line(tmp_path, "from launch.cli import main; main()", "run", "addition")
    assert done.returncode == 2
    assert f"this process imports 'contracts' from {tmp_path}/contracts/__init__.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_config_ends_before_ray_or_a_jax_backend_starts(tmp_path):
    program = (
        "import sys\n"
        "from launch.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    assert 'ray' not in sys.modules\n"
        "    backends = sys.modules.get('jax._src.xla_bridge')\n"
        "    assert backends is None or not backends.backends_are_initialized()\n"
    )
    done = command_line(tmp_path, program, "run", "addition", "--rollout.value", "2")
    assert done.returncode == 2, done.stderr
    assert "[0, 1]; got 2" in done.stderr
