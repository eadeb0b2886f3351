"""Pretrained teachers and students that cannot go together, as tiny GGUF files named in a config."""

import gguf
import numpy as np
import pytest

from contracts.errors import ConfigError
from pipeline.config import parse_config
from pipeline.groundwork import lay_groundwork

WORDS = ["<|end|>", *"abc12Ġ", "ab", "12", "<|pad|>", "<|begin|>", "<|free|>", "<|stop|>"]
KINDS = [3, *[1] * 8, 3, 3, 3, 3]


def write(path, *, words=WORDS, merges=("a b", "1 2"), context=64, **tokenizer):
    """Metadata of a one-layer model; of tensors only the embedding, whose rows are counted."""
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "embedding_length": 8, "feed_forward_length": 8, "context_length": context}
    for key, value in {**sizes, "attention.head_count": 2, "attention.head_count_kv": 1}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_array("tokenizer.ggml.tokens", words)
    writer.add_array("tokenizer.ggml.token_type", [*KINDS, *[3] * (len(words) - len(KINDS))])
    writer.add_array("tokenizer.ggml.merges", list(merges))
    ids = {"eos_token_id": 0, "padding_token_id": 9, "bos_token_id": 10, **tokenizer}
    for key, value in ids.items():
        if isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
    if "chat_template" in tokenizer:
        writer.add_string("tokenizer.chat_template", tokenizer["chat_template"])
    writer.add_tensor("token_embd.weight", np.zeros((len(words), 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"source": "gguf", "path": str(path)}


@pytest.fixture
def lay(tmp_path):
    """`(student=None, task={}, **sections)`: the groundwork of a run with a tiny pretrained teacher."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ab 12"}\n')

    def ground(*, student=None, task=(), **sections):
        whole = {"name": "instructions", "prompts": str(prompts), "prompt_length": 8, "completion_length": 8}
        tree = {
            "run": {"name": "tiny"},
            "task": {**whole, **dict(task)},
            "model": write(tmp_path / "teacher.gguf"),
            "student": None if student is None else write(tmp_path / "student.gguf", **student),
            "diffusion": {"block_size": 4},
            "training": {"steps": 1},
            **sections,
        }
        return lay_groundwork(parse_config(tree))

    return ground


def test_a_teacher_and_a_student_of_one_vocabulary_agree_whatever_their_templates(lay):
    laid = lay(student={"chat_template": "{{ messages }}"})
    assert (laid.teacher.vocab_size, laid.layout.mask_id, laid.stop_ids) == (13, 13, (0,))
    assert (laid.corpus, laid.warm_corpus) == (None, None)


def test_other_ends_are_refused_unless_the_config_names_the_stops(lay):
    with pytest.raises(ConfigError, match=r"task.stop_ids: .*teacher's end tokens are \[0\], the student's \[12\]"):
        lay(student={"eos_token_id": 12})
    assert lay(student={"eos_token_id": 12}, task={"stop_ids": [0, 12]}).stop_ids == (0, 12)


@pytest.mark.parametrize("student", [{"words": [*WORDS[:1], *"bac", *WORDS[4:]]}, {"merges": ("1 2", "a b")}])
def test_other_ids_are_refused(lay, student):
    with pytest.raises(ConfigError, match="student: teacher and student read ids differently"):
        lay(student=student)


def test_a_head_of_another_size_is_refused_beside_the_other_problems(lay):
    with pytest.raises(ConfigError) as refusal:
        lay(student={"words": [*WORDS, "<|extra|>"]}, task={"stop_ids": [99]})
    stops, ids, head = str(refusal.value).splitlines()
    assert "task.stop_ids: [99]" in stops
    assert "vocabularies of 13 and 14" in ids
    assert "the teacher's head has 13 columns, the student's 15 with its appended mask: 14 are needed" in head


@pytest.mark.parametrize(("row", "role"), [(0, "eos and stop"), (9, "pad"), (10, "bos")])
def test_a_reserved_row_that_means_something_is_refused(lay, row, role):
    with pytest.raises(ConfigError, match=rf"diffusion.mask: mask id {row} is also {role} \("):
        lay(diffusion={"block_size": 4, "mask": row})
    assert lay(diffusion={"block_size": 4, "mask": 11}).layout.mask_id == 11


def test_more_tokens_than_either_model_knows_positions_for_are_refused(lay):
    assert lay(task={"completion_length": 56}).layout.length == 64
    with pytest.raises(ConfigError, match=r"8 \+ 57 tokens, .* up to 64"):
        lay(task={"completion_length": 57})
    with pytest.raises(ConfigError, match="up to 15"):
        lay(student={"context": 15})


def test_a_warm_start_without_examples_is_refused(lay):
    with pytest.raises(ConfigError, match=r"warm_start\.steps: 3, but task instructions has no examples"):
        lay(warm_start={"steps": 3})
