import numpy as np
import pytest

from contracts.errors import PromptError
from pipeline.corpus import Corpus
from pipeline.data.prompts import PromptRow
from pipeline.data.tasks import Example
from pipeline.data.tokenizers import CharacterTokenizer
from pipeline.diffusion.blocks import BlockLayout
from pipeline.measures import distinct_right_answers, evenly_spaced, right_answers
from pipeline.pretraining import causal_layout


@pytest.fixture
def layout():
    return BlockLayout(
        block_size=2,
        origin="response",
        prompt_attention="causal",
        alignment="same_position",
        context="clean",
        prompt_length=2,
        completion_length=3,
        mask_id=4,
        mask_appended=True,
    )


TOKENIZER = CharacterTokenizer("abc", ["<end>"])


def corpus_of(examples, layout, encode_prompt=TOKENIZER.encode, stop=3):
    return Corpus(examples, encode_prompt, TOKENIZER.encode, stop, layout)


def test_a_corpus_ends_every_completion_with_the_stop_token_and_draws_by_weight(layout):
    corpus = corpus_of([Example("a", "bc", 3.0), Example("ab", "c", 1.0), Example("b", "a", 0.0)], layout)
    batch = next(corpus.batches(causal_layout(layout), 400, 1, seed=0, min_noise=0.0))
    tokens = np.asarray(batch.model_inputs["clean_tokens"])
    valid = np.asarray(batch.model_inputs["clean_valid"])
    rows = [tuple(row[keep].tolist()) for row, keep in zip(tokens, valid, strict=True)]
    assert set(rows) == {(0, 1, 2, 3)}
    assert abs(int((np.asarray(batch.model_inputs["prompt_lengths"]) == 1).sum()) - 300) < 40


def test_a_causal_batch_weights_every_completion_token_and_the_stop(layout):
    corpus = corpus_of([Example("a", "bc")], layout)
    batch = next(corpus.batches(causal_layout(layout), 2, 1, seed=0, min_noise=0.0))
    np.testing.assert_array_equal(np.asarray(batch.target_ids), [[1, 2, 3]] * 2)
    np.testing.assert_array_equal(np.asarray(batch.loss_weights), [[1, 1, 1]] * 2)


def test_a_masked_batch_weights_exactly_the_masked_slots_through_the_stop(layout):
    corpus = corpus_of([Example("a", "b")], layout)
    for batch in corpus.batches(layout, 16, 3, seed=0, min_noise=0.05):
        noisy, weights = np.asarray(batch.model_inputs["noisy_tokens"]), np.asarray(batch.loss_weights)
        np.testing.assert_array_equal(weights[:, :2] > 0, noisy[:, :2] == 4)
        assert (weights[:, :2].sum(axis=1) >= 1).all()
        assert (weights[:, 2] == 0).all()


def test_batches_are_a_function_of_the_seed(layout):
    corpus = corpus_of([Example("a", "bc"), Example("b", "ca")], layout)

    def first(seed):
        return np.asarray(next(corpus.batches(layout, 16, 1, seed=seed, min_noise=0.05)).model_inputs["noisy_tokens"])

    np.testing.assert_array_equal(first(1), first(1))
    assert (first(1) != first(2)).any()


def test_an_example_that_does_not_fit_is_named(layout):
    with pytest.raises(PromptError, match=r"'a' \+ 'abc' has 1 \+ 4 tokens"):
        corpus_of([Example("a", "abc")], layout)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_examples_without_any_weight_to_draw_by_are_refused(layout, weight):
    with pytest.raises(PromptError, match="weights must be finite"):
        corpus_of([Example("a", "b", weight)], layout)


def test_a_corpus_puts_the_template_around_prompts_only_and_ends_with_the_runs_stop(layout):
    corpus = corpus_of([Example("a", "b")], layout, encode_prompt=lambda text: [2, *TOKENIZER.encode(text)], stop=2)
    np.testing.assert_array_equal(corpus.tokens_NL, [[2, 0, 1, 2, 0]])


def test_the_digest_of_a_corpus_knows_its_texts_weights_and_stop(layout):
    examples = [Example("a", "b"), Example("b", "a")]
    plain = corpus_of(examples, layout).digest
    assert corpus_of(list(examples), layout).digest == plain
    others = [
        corpus_of([Example("a", "b"), Example("b", "b")], layout),
        corpus_of([Example("a", "b"), Example("b", "a", 2.0)], layout),
        corpus_of(examples, layout, stop=2),
    ]
    assert plain not in [other.digest for other in others]


class Even:
    def prompts(self):
        return {}

    def correct(self, prompt, completion):
        return None if completion == "?" else int(completion) % 2 == 0


ROW = PromptRow("p", (0,), {}, 0)


def test_right_answers_leave_out_what_nobody_can_judge():
    assert right_answers(Even(), [(ROW, ["2", "3", "?"])]) == 0.5
    assert right_answers(Even(), [(ROW, ["?"])]) is None


def test_distinct_right_answers_count_each_answer_once_per_prompt():
    judged = [(ROW, ["2", "2", "4", "3"]), (ROW, ["1", "3", "5", "2"])]
    assert distinct_right_answers(Even(), judged, 4) == 1.5
    assert distinct_right_answers(Even(), judged, 2) == 0.5


def test_evenly_spaced_rows_reach_from_the_first_to_the_last():
    assert evenly_spaced(range(10), 4) == [0, 3, 6, 9]
    assert evenly_spaced(range(3), 4) == [0, 1, 2]
