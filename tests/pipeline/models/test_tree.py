from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from contracts.errors import WeightsError
from contracts.weights import fingerprint
from pipeline.models.config import DecoderConfig
from pipeline.models.decoder import Decoder
from pipeline.models.tree import parameters, with_parameters

CONFIG = DecoderConfig(
    vocab_size=5, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_width=6, qkv_bias=True, tied_head=False
)


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


def random_model(config):
    blank = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    return with_parameters(
        blank, {name: rng.normal(size=x.shape).astype(x.dtype) for name, x in parameters(blank).items()}
    )


def test_weights_are_named_by_their_path_and_stored_input_by_output(model):
    shapes = {name: array.shape for name, array in parameters(model).items()}
    assert shapes == {
        "embedding.table": (5, 8),
        "layers.0.attention.key.bias": (4,),
        "layers.0.attention.key.kernel": (8, 4),
        "layers.0.attention.key_norm.scale": (4,),
        "layers.0.attention.output.kernel": (8, 8),
        "layers.0.attention.query.bias": (8,),
        "layers.0.attention.query.kernel": (8, 8),
        "layers.0.attention.query_norm.scale": (4,),
        "layers.0.attention.value.bias": (4,),
        "layers.0.attention.value.kernel": (8, 4),
        "layers.0.attention_norm.scale": (8,),
        "layers.0.mlp.down.kernel": (6, 8),
        "layers.0.mlp.gate.kernel": (8, 6),
        "layers.0.mlp.up.kernel": (8, 6),
        "layers.0.mlp_norm.scale": (8,),
        "lm_head.kernel": (8, 5),
        "norm.scale": (8,),
    }
    assert list(shapes) == sorted(shapes)


def test_a_tied_head_and_absent_options_leave_no_trace_in_the_tree():
    names = parameters(random_model(replace(CONFIG, tied_head=True, qkv_bias=False, qk_norm=False)))
    assert not [name for name in names if "lm_head" in name or "bias" in name or "query_norm" in name]


def test_a_model_rebuilt_from_its_weights_is_the_model(model):
    weights = {name: array + 1 for name, array in parameters(model).items()}
    for template in (model, nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(1)))):
        rebuilt = with_parameters(template, weights)
        assert rebuilt.config == CONFIG
        assert fingerprint(parameters(rebuilt)) == fingerprint(weights)
    assert fingerprint(parameters(model)) != fingerprint(weights), "the template keeps its own weights"


def test_a_model_is_rebuilt_inside_a_trace(model):
    weights = parameters(model)
    total = jax.jit(lambda weights: jnp.sum(with_parameters(model, weights).norm.scale[...]))(weights)
    np.testing.assert_allclose(total, np.sum(weights["norm.scale"]), atol=1e-5)


def test_host_arrays_are_taken_as_they_are(model):
    host = {name: np.asarray(array) for name, array in parameters(model).items()}
    assert fingerprint(parameters(with_parameters(model, host))) == fingerprint(host)


def test_every_misfit_is_listed_at_once(model):
    weights = parameters(model)
    del weights["norm.scale"]
    weights["embedding.table"] = weights["embedding.table"].T
    weights["lm_head.kernel"] = weights["lm_head.kernel"].astype(jnp.bfloat16)
    weights["lm_head.bias"] = jnp.zeros(5)
    with pytest.raises(WeightsError) as caught:
        with_parameters(model, weights)
    for part in (
        "norm.scale: missing",
        "embedding.table: model has float32[5, 8], given float32[8, 5]",
        "lm_head.kernel: model has float32[8, 5], given bfloat16[8, 5]",
        "lm_head.bias: not a weight of this model",
    ):
        assert part in str(caught.value)
