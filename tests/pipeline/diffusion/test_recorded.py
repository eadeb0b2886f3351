import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from contracts.tokens import DiffusionTokenBatch
from contracts.work import SamplerSettings
from pipeline.diffusion.blocks import BlockLayout
from pipeline.diffusion.decoding import decode
from pipeline.diffusion.keys import row_keys
from pipeline.diffusion.recorded import committed_log_probs, log_prob_gap
from pipeline.diffusion.states import trajectory_states
from pipeline.diffusion.streams import student_logits_fn
from pipeline.models.config import DecoderConfig
from pipeline.models.decoder import Decoder
from pipeline.models.tree import parameters, with_parameters

CONFIG = DecoderConfig(vocab_size=9, width=8, layers=2, heads=2, kv_heads=1, head_dim=4, mlp_width=10)
ROWS, PROMPT, MASK = 6, 4, 8


def make_batch():
    inputs = {
        "committed_now": jnp.array([[True, False, True]]),
        "recorded_log_probs": jnp.array([[-0.5, jnp.nan, -2.0]]),
    }
    targets = jnp.array([[1, -1, 0]], jnp.int32)
    return DiffusionTokenBatch.create(model_inputs=inputs, target_ids=targets, loss_weights=jnp.zeros((1, 3)))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_the_log_probability_is_taken_at_the_rollouts_temperature(temperature):
    logits = np.random.default_rng(0).normal(size=(1, 3, 4))
    computed = np.asarray(committed_log_probs(jnp.asarray(logits, jnp.float32), make_batch(), temperature))
    scaled = logits / (temperature or 1.0)
    expected = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    np.testing.assert_allclose(computed[0, [0, 2]], [expected[0, 0, 1], expected[0, 2, 0]], atol=1e-6)
    assert np.isnan(computed[0, 1])

    gap = log_prob_gap(jnp.asarray(logits, jnp.float32), make_batch(), temperature)
    total = abs(expected[0, 0, 1] + 0.5) + abs(expected[0, 2, 0] + 2.0)
    np.testing.assert_allclose((gap.unreduced_sum, gap.denominator), (total, 2), rtol=1e-5)


def test_no_gradient_comes_from_the_gap():
    gradient = jax.grad(lambda logits: log_prob_gap(logits, make_batch(), 1.0).unreduced_sum)(jnp.ones((1, 3, 4)))
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize(
    ("origin", "alignment", "temperature"), [("response", "same_position", 1.0), ("sequence", "shifted", 0.7)]
)
def test_the_weights_that_wrote_a_rollout_find_what_was_recorded_and_others_do_not(origin, alignment, temperature):
    layout = BlockLayout(3, origin, "causal", alignment, "clean", PROMPT, 7, MASK, True)
    blank = nnx.eval_shape(lambda: Decoder(CONFIG, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(1)
    weights = {
        name: jnp.asarray(rng.normal(1.0 if "norm" in name else 0.0, 0.4, x.shape), jnp.float32)
        for name, x in parameters(blank).items()
    }
    lengths = jnp.asarray([1, 2, 3, 4, 2, 3], jnp.int32)
    prompts = jnp.asarray(rng.integers(0, 7, (ROWS, PROMPT)), jnp.int32)
    sampler = SamplerSettings("threshold", 0.3, temperature)
    keys = row_keys(5, 2, np.arange(ROWS))
    decoded = decode(with_parameters(blank, weights), prompts, lengths, keys, layout, sampler, (7,))

    @jax.jit
    def gap(weights, keys):
        batch = trajectory_states(decoded, lengths, keys, layout)
        logits = student_logits_fn(layout)(with_parameters(blank, weights), batch.model_inputs)
        computed = committed_log_probs(logits, batch, temperature)
        return jnp.abs(computed - batch.model_inputs["recorded_log_probs"]), log_prob_gap(logits, batch, temperature)

    for seed in range(4):
        differences, metric = gap(weights, row_keys(seed, 0, np.arange(ROWS)))
        assert np.nanmax(differences) < 1e-4
        assert float(metric.denominator) == np.isfinite(differences).sum() > ROWS
    other = {name: array * 1.05 if "mlp" in name else array for name, array in weights.items()}
    assert gap(other, keys)[1].compute() > 1e-3
