"""The real thing, as small as it goes: run, look, measure, write, continue; all in this process."""

import json

import pytest

from launch import environment
from launch.cli import main
from launch.folder import RunFolder
from launch.recording import read_lines

TINY = {
    "model.width": 8,
    "model.layers": 1,
    "model.heads": 1,
    "model.kv_heads": 1,
    "model.head_dim": 4,
    "model.mlp_width": 8,
    "teacher.steps": 2,
    "teacher.rows": 4,
    "training.steps": 2,
    "training.rows": 4,
    "training.save_every": 1,
    "evaluation.rows": 4,
    "evaluation.batch": 4,
    "evaluation.diversity_samples": 0,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("whole_run")


def command(place, *extra: str) -> None:
    settings = {**TINY, "run.folder": place, "run.cache": place / "cache"}
    flat = [word for path, value in settings.items() for word in (f"--{path}", str(value))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "apply", lambda config: None)
        main(["run", "addition", "--runner", "inline", *flat, *extra])


@pytest.fixture(scope="module")
def folder(place):
    command(place)
    return RunFolder(place / "addition")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setattr(environment, "apply", lambda config: None)


def test_the_summary_holds_every_promised_figure(folder):
    summary = json.loads(folder.summary.read_text())
    promised = {
        "teacher_accuracy",
        "student_accuracy_before",
        "student_accuracy_after",
        "tokens_per_forward",
        "accuracy_one_forward_per_block",
        "distinct_right_answers",
        "steps",
        "rows_trained",
        "refused",
        "weights_fingerprint",
        "seconds",
        "config_digest",
    }
    assert promised <= summary.keys()
    assert (summary["steps"], summary["rows_trained"], summary["refused"]) == (2, 16, {})
    prompts = (folder.root / "prompts" / "sha256").read_text().strip()
    assert summary["config_digest"] == folder.load_config().digest(prompts)
    assert {"student", "teacher"} <= summary["distinct_right_answers"].keys()


def test_every_step_is_recorded_with_its_divergence_and_its_waiting(folder):
    lines = read_lines(folder.metrics)
    assert [line["step"] for line in lines] == [0, 1]
    expected = {"distill/soft_loss", "rollout/tokens_per_forward", "rollout/tokens", "lag", "waited/rollout"}
    assert all(expected <= line.keys() for line in lines)


def test_every_published_version_is_an_event_and_the_last_is_the_summarys(folder):
    published = [event["version"] for event in read_lines(folder.events) if event["kind"] == "publish"]
    assert [version.split("@")[1].split(":")[0] for version in published] == ["0", "1", "2"]
    assert published[-1].endswith(json.loads(folder.summary.read_text())["weights_fingerprint"])


def test_a_few_rollouts_are_kept_to_be_read(folder):
    rollouts = read_lines(folder.rollouts)
    assert rollouts and all({"step", "prompt", "completion", "correct"} <= line.keys() for line in rollouts)


def test_the_student_writes_what_it_is_asked_and_is_told_whether_it_is_right(folder, capsys):
    main(["generate", str(folder.root), "--prompt", "17+25=", "--prompt", "1"])
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("17+25=") and ("✓" in out[0] or "✗" in out[0])
    assert out[1].startswith("1") and "✓" not in out[1] and "✗" not in out[1]
    assert "forward passes" in out[-1]


@pytest.mark.parametrize(
    ("prompt", "sentence"), [("17+25=17", "has 8 tokens; this student reads 1 to 6"), ("a", "not in the alphabet")]
)
def test_a_prompt_that_the_student_cannot_read_ends_with_2(folder, capsys, prompt, sentence):
    with pytest.raises(SystemExit) as ending:
        main(["generate", str(folder.root), "--prompt", prompt])
    assert ending.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_measuring_again_finds_what_the_run_found(folder, capsys):
    main(["eval", str(folder.root)])
    out = capsys.readouterr().out
    summary = json.loads(folder.summary.read_text())
    assert summary["weights_fingerprint"] in out
    row = next(line for line in out.splitlines() if line.strip().startswith("tokens per forward"))
    assert row.split()[-1] == f"{summary['tokens_per_forward']:.2f}"
    assert "accuracy under parallelism, τ 0.5 to 0.95" in out


def test_measuring_with_settings_that_contradict_the_weights_is_refused(folder, capsys):
    with pytest.raises(SystemExit) as ending:
        main(["eval", str(folder.root), "--diffusion.block_size", "2"])
    assert ending.value.code == 2
    assert "--diffusion.block_size: the weights of" in capsys.readouterr().err


def test_weights_that_changed_on_disk_are_refused(folder, capsys):
    path = folder.root / "student.safetensors"
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(SystemExit) as ending:
            main(["eval", str(folder.root)])
    finally:
        path.write_bytes(whole)
    assert ending.value.code == 2
    assert "its weights now have fingerprint" in " ".join(capsys.readouterr().err.split())


def test_resuming_a_finished_run_changes_nothing(folder, place):
    before, metrics = json.loads(folder.summary.read_text()), folder.metrics.read_text()
    command(place, "--resume")
    after = json.loads(folder.summary.read_text())
    assert after["weights_fingerprint"] == before["weights_fingerprint"]
    assert folder.metrics.read_text() == metrics


def test_a_run_is_not_continued_with_other_prompts(folder, place, capsys):
    other = place / "other.jsonl"
    other.write_text('{"prompt": "01+02="}\n')
    with pytest.raises(SystemExit) as ending:
        command(place, "--resume", "--task.prompts", str(other))
    assert ending.value.code == 2
    assert "was trained on prompts of digest" in " ".join(capsys.readouterr().err.split())
