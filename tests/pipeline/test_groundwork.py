import json

import pytest

from contracts.errors import CheckpointError, ConfigError, PromptError
from contracts.work import Prompt
from pipeline.config import parse_config
from pipeline.data.tasks import Example
from pipeline.groundwork import lay_groundwork


def ground(**sections):
    tree = {
        "run": {"name": "ground"},
        "task": {"name": "addition", "prompt_length": 6, "completion_length": 4},
        "teacher": {"steps": 1},
        "diffusion": {"block_size": 4},
        "training": {"steps": 1},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return lay_groundwork(parse_config(tree))


def prompts_file(folder, *prompts):
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps({"question": prompt, "level": 3}) + "\n" for prompt in prompts))
    return {"prompts": str(path), "field": "question"}


def test_a_tasks_own_prompts_are_written_as_they_were_read(tmp_path):
    laid = ground()
    laid.write_prompts(tmp_path)
    lines = (tmp_path / "prompts" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == [row.text for row in laid.splits["train"]]
    assert len(laid.source) == 9000
    assert (laid.layout.mask_id, laid.stop_ids, laid.teacher.vocab_size) == (13, (12,), 13)


def test_prompts_of_ones_own_take_the_place_of_the_tasks(tmp_path):
    laid = ground(task=prompts_file(tmp_path, "01+02="))
    assert [(row.text, row.fields) for row in laid.source.rows] == [("01+02=", {"level": 3})]
    assert len(laid.splits["held_out"]) == 1000
    assert set(laid.own_prompts) == {"held_out"}


def test_a_folder_is_continued_with_the_prompts_that_it_was_written_with(tmp_path):
    first, second = ground(task=prompts_file(tmp_path, "01+02=")), ground(task=prompts_file(tmp_path, "01+03="))
    first.check_same_prompts(tmp_path)
    first.write_prompts(tmp_path)
    first.check_same_prompts(tmp_path)
    with pytest.raises(CheckpointError, match=f"{first.source.digest[:16]}.*{second.source.digest[:16]}"):
        second.check_same_prompts(tmp_path)


@pytest.mark.parametrize(
    ("sections", "error", "sentence"),
    [
        ({"diffusion": {"mask": 12}}, ConfigError, "diffusion.mask: mask id 12 is also eos and stop"),
        ({"diffusion": {"mask": 99}}, ConfigError, "id 99 is not among the 13 rows"),
        ({"diffusion": {"mask": -1}}, ConfigError, "id -1 is not among"),
        ({"task": {"stop_ids": [13]}}, ConfigError, r"\[13\] must be at least one id in \[0, 13\)"),
        ({"task": {"stop_ids": []}}, ConfigError, "at least one id"),
        ({"task": {"prompt_length": 5}}, PromptError, "6 tokens"),
        ({"task": {"completion_length": 3}}, PromptError, r"6 \+ 4 tokens, stop included"),
        ({"task": {"chat": True}}, ConfigError, "task.chat: .*chat template"),
        ({"task": {"name": "instructions"}}, ConfigError, "no examples to train a fresh teacher"),
        ({"task": {"prompts": "/no/such/file.jsonl"}}, PromptError, "cannot be read"),
        ({"task": {"name": "addition", "prompts": "/"}}, PromptError, "cannot be read"),
    ],
)
def test_what_cannot_go_together_is_refused_before_any_weight_exists(sections, error, sentence):
    with pytest.raises(error, match=sentence):
        ground(**sections)


def test_problems_of_several_sections_are_told_at_once():
    with pytest.raises(ConfigError) as refusal:
        ground(task={"stop_ids": [13], "chat": True}, diffusion={"mask": 99})
    assert [line.split(":")[0] for line in str(refusal.value).splitlines()] == [
        "task.stop_ids",
        "diffusion.mask",
        "task.chat",
    ]


def test_a_warm_start_on_prompts_without_known_answers_is_refused(tmp_path):
    task = prompts_file(tmp_path, "1+2=", "9=")
    assert ground(task=task).warm_corpus is None
    with pytest.raises(PromptError, match=r"warm_start\.steps: 2, but none of the 2 training prompts"):
        ground(task=task, warm_start={"steps": 2})


def test_a_warm_start_learns_the_training_prompts_and_a_fresh_teacher_everything(tmp_path):
    laid = ground(task=prompts_file(tmp_path, "01+02=", "9=", "17+25="), warm_start={"steps": 1})
    assert laid.warm_corpus is not None and laid.corpus is not None
    written = [laid.tokenizer.decode(row.tolist()) for row in laid.warm_corpus.tokens_NL]
    assert written == ["01+02=003<end>", "17+25=042<end>"]
    assert len(laid.corpus.tokens_NL) == 10_000


def test_the_corpus_ends_with_the_stop_that_the_config_names():
    corpus = ground(task={"stop_ids": [11]}).corpus
    assert corpus is not None and set(corpus.tokens_NL[:, 9]) == {11}


class Unwritable:
    alphabet = "ab"

    def prompts(self):
        return {"train": [{"prompt": "a", "tags": {"a", "b"}}]}

    def correct(self, prompt: Prompt, completion: str) -> None:
        return None

    def examples(self):
        return [Example("a", "b")]


def test_prompts_of_a_task_that_no_jsonl_can_hold_are_refused():
    with pytest.raises(PromptError, match=r"train prompts of task .*Unwritable cannot be JSON"):
        ground(task={"name": f"{__name__}:Unwritable"})


def test_a_causal_student_has_no_mask_token():
    laid = ground(diffusion={"block_size": 1, "alignment": "shifted"})
    assert laid.mask is None
    assert laid.layout.mask_id is None
