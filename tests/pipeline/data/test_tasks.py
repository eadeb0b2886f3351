import numpy as np
import pytest

from contracts.errors import ConfigError
from contracts.work import Prompt
from pipeline.data.tasks import CorpusTask, Task, load_task
from pipeline.data.tasks.addition import Addition
from pipeline.data.tasks.split import Split


@pytest.mark.parametrize("task", [Split(), Addition()], ids=["split", "addition"])
def test_every_example_is_right_and_every_prompt_has_one(task):
    examples = task.examples()
    assert all(task.correct(Prompt(example.prompt), example.completion) for example in examples)
    prompts = {row["prompt"] for rows in task.prompts().values() for row in rows}
    assert prompts == {example.prompt for example in examples}


@pytest.mark.parametrize("task", [Split(), Addition()], ids=["split", "addition"])
def test_held_out_prompts_are_a_tenth_share_no_prompt_with_training_and_leave_no_digit_unseen(task):
    splits = {split: [row["prompt"] for row in rows] for split, rows in task.prompts().items()}
    assert not set(splits["train"]) & set(splits["held_out"])
    assert len(splits["held_out"]) * 10 == len(splits["train"]) + len(splits["held_out"])
    for place in range(len(splits["train"][0])):
        assert {prompt[place] for prompt in splits["held_out"]} <= {prompt[place] for prompt in splits["train"]}


def test_split_counts_every_pair_once_and_every_number_equally():
    examples = Split().examples()
    assert len({(example.prompt, example.completion) for example in examples}) == len(examples) == 5050
    weight: dict[str, float] = {}
    for example in examples:
        weight[example.prompt] = weight.get(example.prompt, 0.0) + example.weight
    np.testing.assert_allclose(list(weight.values()), 1.0)


@pytest.mark.parametrize(
    "completion", ["", "12+30", "12+3", "1 2+30", "12-31", "12+031", "-1+44", "12+31+", "１2+31", "+12+31"]
)
def test_a_wrong_or_malformed_split_of_43_is_wrong(completion):
    assert not Split().correct(Prompt("43="), completion)


def test_addition_takes_no_other_spelling():
    assert Addition().correct(Prompt("07+05="), "012")
    assert not Addition().correct(Prompt("07+05="), "12")


def test_a_task_of_ones_own_is_found_by_its_import_path(monkeypatch, tmp_path):
    (tmp_path / "my_task_module.py").write_text(
        "class Mine:\n    def prompts(self): return {}\n    def correct(self, prompt, completion): return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = load_task("my_task_module:Mine")
    assert isinstance(task, Task)
    assert not isinstance(task, CorpusTask)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("spilt", "built-in ones are split, addition, instructions"),
        ("no_such_module:Task", "cannot be imported"),
        ("math:Nothing", "cannot be imported"),
        ("collections:OrderedDict", "needs the methods prompts"),
    ],
)
def test_a_task_that_cannot_be_had_is_refused_with_what_there_is(name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_task(name)
