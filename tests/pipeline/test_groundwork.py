import json

import pytest

from contracts.errors import ConfigError, PromptError
from pipeline.config import parse_config
from pipeline.groundwork import lay_groundwork


def ground(folder, **sections):
    tree = {
        "run": {"name": "ground"},
        "task": {"name": "addition", "prompt_length": 6, "completion_length": 4},
        "teacher": {"steps": 1},
        "diffusion": {"block_size": 4},
        "training": {"steps": 1},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return lay_groundwork(parse_config(tree), folder)


def test_a_task_writes_its_prompts_and_reads_them_back(tmp_path):
    laid = ground(tmp_path)
    lines = (tmp_path / "prompts" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [row.text for row in laid.splits["train"]]
    assert len(laid.source) == 9000
    assert (laid.layout.mask_id, laid.stop_ids, laid.teacher.vocab_size) == (13, (12,), 13)


def test_prompts_of_ones_own_take_the_place_of_the_tasks(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "01+02=", "level": 3}\n')
    laid = ground(tmp_path, task={"prompts": str(path), "field": "question"})
    assert [(row.text, row.fields) for row in laid.source.rows] == [("01+02=", {"level": 3})]
    assert len(laid.splits["held_out"]) == 1000


@pytest.mark.parametrize(
    ("sections", "error", "sentence"),
    [
        ({"diffusion": {"mask": 12}}, ConfigError, "mask id 12 is also .*stop"),
        ({"diffusion": {"mask": 99}}, ConfigError, "id 99 is not among the 13 rows"),
        ({"diffusion": {"mask": -1}}, ConfigError, "id -1 is not among"),
        ({"task": {"stop_ids": [13]}}, ConfigError, r"\[13\] must be at least one id in \[0, 13\)"),
        ({"task": {"stop_ids": []}}, ConfigError, "at least one id"),
        ({"task": {"prompt_length": 5}}, PromptError, "6 tokens"),
        ({"task": {"chat": True}}, ConfigError, "chat template"),
        ({"task": {"name": "instructions"}}, ConfigError, "no examples to train a fresh teacher"),
        ({"task": {"prompts": "/no/such/file.jsonl"}}, PromptError, "cannot be read"),
        ({"task": {"name": "addition", "prompts": "/"}}, PromptError, "cannot be read"),
    ],
)
def test_what_cannot_go_together_is_refused_before_any_weight_exists(tmp_path, sections, error, sentence):
    with pytest.raises(error, match=sentence):
        ground(tmp_path, **sections)


def test_a_causal_student_has_no_mask_token(tmp_path):
    laid = ground(tmp_path, diffusion={"block_size": 1, "alignment": "shifted"})
    assert laid.mask is None
    assert laid.layout.mask_id is None
