from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from contracts.errors import ConfigError
from contracts.weights import fingerprint
from pipeline.models.attention import causal_ids
from pipeline.models.config import DecoderConfig
from pipeline.models.conversion import (
    Append,
    Reserved,
    check_head_sizes,
    check_mask_id,
    convert_to_block_diffusion,
    drop_mask_logit,
)
from pipeline.models.decoder import Decoder
from pipeline.models.tree import parameters, with_parameters

CONFIG = DecoderConfig(vocab_size=7, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_width=6, tied_head=False)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def teacher(request):
    return random_model(replace(CONFIG, tied_head=request.param))


def random_model(config):
    blank = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    return with_parameters(
        blank, {name: rng.normal(size=x.shape).astype(x.dtype) for name, x in parameters(blank).items()}
    )


def test_append_adds_a_mean_row_and_changes_no_other_logit(teacher):
    student, mask_id = convert_to_block_diffusion(teacher, Append())
    assert mask_id == 7
    assert student.config == replace(teacher.config, vocab_size=8)
    table = np.asarray(parameters(student)["embedding.table"])
    np.testing.assert_allclose(table[7], table[:7].mean(0), atol=1e-6)

    tokens = jnp.array([[1, 2, 3]], jnp.int32)
    ids = causal_ids(jnp.array([[0, 1, 2]], jnp.int32), jnp.ones((1, 3), bool))
    call = jax.jit(lambda model: model(tokens, ids))
    logits = drop_mask_logit(call(student), Append())
    assert logits.shape[-1] == teacher.config.vocab_size
    np.testing.assert_allclose(logits, call(teacher), atol=1e-5)


def test_reserved_reuses_a_row_with_the_mean_of_the_others(teacher):
    student, mask_id = convert_to_block_diffusion(teacher, Reserved(2))
    assert mask_id == 2
    assert student.config == teacher.config
    before, after = (np.asarray(parameters(model)["embedding.table"]) for model in (teacher, student))
    others = [0, 1, 3, 4, 5, 6]
    np.testing.assert_array_equal(after[others], before[others])
    np.testing.assert_allclose(after[2], before[others].mean(0), atol=1e-6)


@pytest.mark.parametrize("mask", [Append(), Reserved(2)])
def test_the_student_owns_its_weights(teacher, mask):
    before = fingerprint(parameters(teacher))
    student, _ = convert_to_block_diffusion(teacher, mask)
    for array in parameters(student).values():
        array.delete()
    assert fingerprint(parameters(teacher)) == before


@pytest.mark.parametrize("row", [-1, 7])
def test_a_reserved_row_that_does_not_exist_is_refused(row):
    with pytest.raises(ConfigError, match=f"reserved mask id {row} is not among the 7 rows"):
        convert_to_block_diffusion(random_model(CONFIG), Reserved(row))


def test_no_softmax_reaches_a_dropped_mask_and_no_gradient_either():
    logits = jnp.arange(10.0).reshape(2, 5)

    def entropy(logits):
        return jnp.sum(jax.nn.logsumexp(drop_mask_logit(logits, Reserved(4)), axis=-1))

    dropped = drop_mask_logit(logits, Reserved(4))
    assert dropped.shape == logits.shape
    np.testing.assert_array_equal(dropped[:, 4], -np.inf)
    np.testing.assert_array_equal(dropped[:, :4], logits[:, :4])
    gradient = np.asarray(jax.jit(jax.grad(entropy))(logits))
    np.testing.assert_array_equal(gradient[:, 4], 0)
    np.testing.assert_allclose(gradient.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("role", "taken"),
    [("pad", {"pad_id": 9}), ("bos", {"bos_id": 9}), ("eos", {"eos_id": 9}), ("stop", {"stop_ids": (3, 9)})],
)
def test_a_mask_id_with_another_meaning_is_refused_by_role(role, taken):
    free = {"pad_id": 0, "bos_id": None, "eos_id": 2, "stop_ids": (2, 3)}
    check_mask_id(9, **free)
    with pytest.raises(ConfigError, match=f"mask id 9 is also {role} "):
        check_mask_id(9, **{**free, **taken})


def test_heads_are_compared_by_size():
    student, teacher = replace(CONFIG, vocab_size=8), CONFIG
    check_head_sizes(student, teacher, Append())
    check_head_sizes(student, student, Append(), teacher_has_mask=True)
    check_head_sizes(teacher, teacher, Reserved(3))
    check_head_sizes(teacher, teacher, None)
    for mask, sizes in ((Append(), (8, 8)), (Reserved(1), (8, 7)), (None, (7, 8))):
        pair = [replace(CONFIG, vocab_size=size) for size in sizes]
        with pytest.raises(ConfigError, match=rf"teacher's head has {sizes[1]} columns, the student's {sizes[0]}"):
            check_head_sizes(*pair, mask)
