import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import PromptError
from pipeline.data.prompts import PromptRow, PromptSource, read_prompts
from pipeline.data.tokenizers import CharacterTokenizer

TOKENIZER = CharacterTokenizer("0123456789+=")


def rows(count: int) -> list[PromptRow]:
    return [PromptRow(str(i), tuple(TOKENIZER.encode(str(i))), {}, i) for i in range(count)]


def source(count: int, seed: int = 0, **options) -> PromptSource:
    return PromptSource(rows(count), prompt_length=8, seed=seed, **options)


def write(tmp_path, *lines: str):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@settings(deadline=None, max_examples=25)
@given(count=st.integers(1, 40), seed=st.integers(0, 2**40), epoch=st.integers(0, 50))
def test_each_row_comes_up_exactly_once_in_each_epoch(count, seed, epoch):
    prompts = source(count, seed)
    drawn = [prompts[index].row_number for index in range(epoch * count, (epoch + 1) * count)]
    assert sorted(drawn) == list(range(count))


def test_the_order_is_a_function_of_the_seed_and_the_index_only():
    first, again, other = source(30, 5), source(30, 5), source(30, 6)
    order = [first[index].row_number for index in range(60)]
    # Asked backwards, after other draws, of another object: the same rows.
    assert [again[index].row_number for index in reversed(range(60))] == order[::-1]
    assert order[:30] != order[30:]
    assert order[:30] != sorted(order[:30])
    # Neighbouring seeds share no epoch either, which seed + epoch alone would give.
    others = [[other[index].row_number for index in range(30 * e, 30 * e + 30)] for e in range(2)]
    assert order[30:] not in others
    assert order[:30] not in others


def test_the_order_does_not_change_between_versions():
    prompts = source(10, seed=7)
    assert [prompts[index].row_number for index in range(20)] == GOLDEN_ORDER


def test_without_shuffle_the_rows_come_in_the_file_s_order_every_epoch():
    prompts = source(3, shuffle=False)
    assert [prompts[index].text for index in range(7)] == ["0", "1", "2", "0", "1", "2", "0"]


def test_the_source_ends_after_its_epochs():
    prompts = source(3, epochs=2)
    assert len(prompts) == 3
    assert sorted(prompts[index].row_number for index in range(6)) == [0, 0, 1, 1, 2, 2]
    for index in (6, -1):
        with pytest.raises(IndexError, match=rf"stream index {index} .*2 epochs of 3 rows, \[0, 6\)"):
            prompts[index]
    with pytest.raises(IndexError, match="stream index -1"):
        source(3)[-1]


def test_a_batch_is_right_padded_and_keeps_the_order_of_the_indices():
    prompts = source(12, seed=3)
    indices = [4, 0, 25, 4]
    prompt_ids_BP, prompt_lengths_B = prompts.batch(indices)
    assert (prompt_ids_BP.shape, prompt_ids_BP.dtype, prompt_lengths_B.dtype) == ((4, 8), np.int32, np.int32)
    for row, index in enumerate(indices):
        length = int(prompt_lengths_B[row])
        assert tuple(prompt_ids_BP[row, :length]) == prompts[index].tokens
        assert not prompt_ids_BP[row, length:].any()
    assert set(prompt_lengths_B.tolist()) == {len(prompts[index].tokens) for index in indices}


def test_further_fields_stay_with_the_row_and_the_prompt_field_is_configurable(tmp_path):
    path = write(tmp_path, '{"question": "1+2=", "answer": 3, "tags": ["easy"]}', '{"question": "4=", "answer": 4}', "")
    read = read_prompts(path, TOKENIZER.encode, prompt_length=8, field="question")
    assert read == [
        PromptRow("1+2=", (1, 10, 2, 11), {"answer": 3, "tags": ["easy"]}, 0),
        PromptRow("4=", (4, 11), {"answer": 4}, 1),
    ]


def test_a_line_separator_inside_a_string_does_not_end_the_row(tmp_path):
    path = write(tmp_path, '{"prompt": "a\u2028b\x85c"}', '{"prompt": "d"}')
    read = read_prompts(path, lambda text: [ord(c) for c in text], prompt_length=8)
    assert [row.text for row in read] == ["a\u2028b\x85c", "d"]


def test_every_unusable_row_is_reported_at_once_with_file_and_line(tmp_path):
    lines = {
        '{"prompt": "1+1="}': None,
        '{"prompt": "1+1="': r"not JSON: .* column 18",
        '["1+1="]': r"a JSON list, not an object",
        '{"text": "1", "id": 2}': r"no field 'prompt'; the fields are \['id', 'text'\]",
        '{"prompt": 7}': r"field 'prompt' is a int, not a string",
        '{"prompt": null}': r"field 'prompt' is a NoneType",
        '{"prompt": " \\n"}': r"an empty prompt",
        '{"prompt": "123456"}': r"6 tokens, but a prompt has 1 to 5: shorten it or raise prompt_length",
        '{"prompt": "1+x"}': r"character 'x' at position 2",
        "": r"not JSON",
        '{"prompt": "12345"}': None,
    }
    path = write(tmp_path, *lines)
    with pytest.raises(PromptError) as refusal:
        read_prompts(path, TOKENIZER.encode, prompt_length=5)
    message = str(refusal.value)
    assert message.startswith("9 of 11 prompts cannot be used:\n")
    for number, problem in enumerate(lines.values(), start=1):
        found = re.search(rf"^{re.escape(str(path))}:{number}: (.*)$", message, re.MULTILINE)
        assert (found is None) == (problem is None), number
        assert found is None or re.search(problem, found[1])


def test_a_long_list_of_problems_is_cut_and_counted(tmp_path):
    with pytest.raises(PromptError, match=r"^25 of 25 prompts[\s\S]*\.\.\. and 5 more rows$"):
        read_prompts(write(tmp_path, *["{}"] * 25), TOKENIZER.encode, prompt_length=5)


def test_a_file_that_is_absent_empty_or_not_text_is_refused(tmp_path):
    empty, binary = tmp_path / "empty.jsonl", tmp_path / "binary.jsonl"
    empty.write_text(" \n\n")
    binary.write_bytes(b'{"prompt": "\xff"}')
    for path, problem in [
        (tmp_path / "absent.jsonl", "absent.jsonl cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (empty, "empty.jsonl are empty"),
        (binary, "binary.jsonl are not UTF-8: .* at byte 12"),
    ]:
        with pytest.raises(PromptError, match=problem):
            read_prompts(path, TOKENIZER.encode, prompt_length=5)


def test_a_source_without_rows_or_with_rows_of_a_wrong_length_is_refused():
    with pytest.raises(PromptError, match="at least one row"):
        source(0)
    with pytest.raises(PromptError, match=r"2 of 12 prompts do not have 1 to 1 tokens.*row 10: 2; row 11: 2"):
        PromptSource(rows(12), prompt_length=1, seed=0)
    with pytest.raises(PromptError, match="row 0: 0"):
        PromptSource([PromptRow("", (), {}, 0)], prompt_length=4, seed=0)


def test_the_digest_is_of_the_data_whatever_the_order_they_are_drawn_in(tmp_path):
    lines = ['{"prompt": "1+2=", "answer": 3}', '{"prompt": "4=", "answer": 4}']

    def digest(*lines: str, seed: int = 0, encode=TOKENIZER.encode) -> str:
        read = read_prompts(write(tmp_path, *lines), encode, prompt_length=8)
        return PromptSource(read, prompt_length=8, seed=seed).digest

    same = digest(*lines)
    assert digest(*lines, seed=9) == same
    assert digest(json.dumps({"answer": 3, "prompt": "1+2="}), lines[1]) == same
    changed = [
        digest(*lines[::-1]),
        digest(lines[0]),
        digest(lines[0].replace("3", "4"), lines[1]),
        digest(*lines, encode=lambda text: TOKENIZER.encode(text)[1:]),
    ]
    assert len({same, *changed}) == 5


# Made by this code; a change breaks the promise that a run can be resumed with another version of grain.
GOLDEN_ORDER = [3, 8, 2, 1, 0, 4, 9, 5, 7, 6, 2, 0, 4, 3, 5, 8, 1, 7, 9, 6]
