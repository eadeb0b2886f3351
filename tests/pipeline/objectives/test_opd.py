"""The distillation loss against float64 oracles, and what must not change it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.distillation import DiffusionDistillationBatch
from contracts.errors import BatchValueError, ConfigError
from contracts.losses import reduce_losses
from contracts.tokens import DiffusionTokenBatch
from pipeline.objectives.divergences import forward_kl, jsd, reverse_kl
from pipeline.objectives.opd import check_prepared_batch, configure_prepared_diffusion_opd, diffusion_opd_loss_fn

B, L, V = 4, 3, 6


def table_logits(table_NLV, model_inputs):
    """A student that is a table of logits, one row for each example."""
    return table_NLV[model_inputs["example"]]


def example(seed=0, **changes):
    rng = np.random.default_rng(seed)
    own = DiffusionTokenBatch(
        {"example": np.arange(B, dtype=np.int32)},
        rng.integers(0, V, size=(B, L)).astype(np.int32),
        np.array([[1, 0.5, 0], [2, 1, 1], [0, 0, 1], [0.25, 1, 0]], np.float32),
    )
    table, teacher = (rng.normal(size=(B, L, V)).astype(np.float32) * 2 for _ in range(2))
    return table, DiffusionDistillationBatch(**{"student_batch": own, "teacher_logits": teacher, **changes})


def step(**loss_settings):
    """Jitted (table, batch) -> (LossOutput, gradient of the undivided loss)."""

    def value_and_gradient(table, batch):
        def loss(table):
            output = diffusion_opd_loss_fn(table, batch, table_logits, **loss_settings)
            return output.primary_loss.unreduced_sum, output

        (_, output), gradient = jax.value_and_grad(loss, has_aux=True)(table)
        return output, gradient

    return jax.jit(value_and_gradient)


both_parts = step(temperature=2.0, soft_loss_weight=0.7, hard_loss_weight=0.3)


def softmax(x):
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def oracle(table, batch, temperature, a, b, targets=None):
    """Forward KL and cross entropy in float64, with the closed gradient w·(a·T·(q_T − p_T) + b·(q − onehot))."""
    own = batch.student_batch
    w = own.loss_weights.astype(np.float64)[..., None]
    onehot = np.eye(V)[own.target_ids if targets is None else targets]
    p, q, q1 = softmax(batch.teacher_logits / temperature), softmax(table / temperature), softmax(table)
    soft = (w * temperature**2 * p * np.log(p / q)).sum()
    hard = -(w * onehot * np.log(q1)).sum()
    return soft, hard, w.sum(), w * (a * temperature * (q - p) + b * (q1 - onehot))


def test_loss_metrics_and_gradient_equal_a_float64_oracle():
    table, batch = example()
    output, gradient = both_parts(table, batch)
    soft, hard, weight, expected = oracle(table, batch, 2.0, 0.7, 0.3)
    np.testing.assert_allclose(output.primary_loss.unreduced_sum, 0.7 * soft + 0.3 * hard, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected, atol=2e-6)
    assert set(output.aux_metrics) == {"distill/soft_loss", "distill/hard_loss"}
    np.testing.assert_allclose(output.aux_metrics["distill/soft_loss"].compute(), soft / weight, rtol=1e-6)
    np.testing.assert_allclose(output.aux_metrics["distill/hard_loss"].compute(), hard / weight, rtol=1e-6)
    assert {float(m.denominator) for m in (output.primary_loss, *output.aux_metrics.values())} == {weight}
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(output))


def test_the_gradient_equals_finite_differences_of_the_oracle():
    table, batch = example(seed=1)
    _, gradient = both_parts(table, batch)
    for place in np.ndindex(2, 2, V):
        nudge = np.zeros((B, L, V))
        nudge[place] = 1e-5
        ends = [oracle(table + sign * nudge, batch, 2.0, 0.7, 0.3) for sign in (1, -1)]
        slope = sum((0.7 * end[0] + 0.3 * end[1]) * sign for end, sign in zip(ends, (1, -1), strict=True)) / 2e-5
        np.testing.assert_allclose(gradient[place], slope, rtol=1e-4, atol=1e-5)


def test_the_default_is_forward_kl_at_temperature_one_alone():
    table, batch = example()
    output, gradient = step()(table, batch)
    soft, _, _, expected = oracle(table, batch, 1.0, 1.0, 0.0)
    np.testing.assert_allclose(output.primary_loss.unreduced_sum, soft, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected, atol=2e-6)


@pytest.mark.parametrize("divergence", [reverse_kl, jsd(0.3)])
def test_temperature_squared_multiplies_every_divergence(divergence):
    table, batch = example()
    output, _ = step(temperature=3.0, divergence=divergence)(table, batch)
    p, q = softmax(batch.teacher_logits / 3), softmax(table / 3)
    beta = divergence.beta
    m = beta * p + (1 - beta) * q
    if beta == 1:
        each = (q * np.log(q / p)).sum(-1)
    else:
        each = ((beta * p * np.log(p / m) + (1 - beta) * q * np.log(q / m)) / (beta * (1 - beta))).sum(-1)
    expected = (batch.student_batch.loss_weights * 9.0 * each).sum()
    np.testing.assert_allclose(output.primary_loss.unreduced_sum, expected, rtol=1e-5)


def test_at_high_temperature_the_gradient_matches_centred_logits_at_a_size_that_does_not_vanish():
    table, batch = example()
    _, gradient = step(temperature=300.0)(table, batch)
    s, t = (x - x.mean(-1, keepdims=True) for x in (table.astype(np.float64), batch.teacher_logits))
    expected = batch.student_batch.loss_weights[..., None] * (s - t) / V
    np.testing.assert_allclose(gradient, expected, atol=0.02)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e38])
def test_inactive_positions_are_inert_in_value_and_gradient(garbage):
    table, batch = example()
    own = batch.student_batch
    inactive = own.loss_weights == 0
    clean, clean_gradient = both_parts(table, batch)
    spoilt = inactive[..., None]
    output, gradient = both_parts(
        np.where(spoilt, np.float32(garbage), table),
        DiffusionDistillationBatch(
            DiffusionTokenBatch(own.model_inputs, np.where(inactive, -100, own.target_ids), own.loss_weights),
            np.where(spoilt, np.float32(garbage), batch.teacher_logits),
        ),
    )
    jax.tree.map(np.testing.assert_array_equal, output, clean)
    np.testing.assert_array_equal(gradient, clean_gradient)
    np.testing.assert_array_equal(np.asarray(gradient)[inactive], 0.0)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_micro_batches_add_up_to_the_full_batch_in_loss_metrics_and_gradient(parts):
    table, batch = example()
    full, full_gradient = both_parts(table, batch)
    pieces = [both_parts(table, jax.tree.map(lambda x, i=i: np.array_split(x, parts)[i], batch)) for i in range(parts)]
    reduced, expected = reduce_losses([p[0] for p in pieces]), reduce_losses([full])
    for name in expected:
        np.testing.assert_allclose(reduced[name], expected[name], rtol=1e-6)
    np.testing.assert_allclose(sum(p[1] for p in pieces), full_gradient, atol=2e-6)


def test_masking_a_row_is_removing_it():
    table, batch = example()
    own = batch.student_batch
    masked = DiffusionDistillationBatch(
        DiffusionTokenBatch(own.model_inputs, own.target_ids, own.loss_weights * np.float32([[1], [0], [1], [1]])),
        batch.teacher_logits,
    )
    removed = jax.tree.map(lambda x: np.delete(x, 1, axis=0), batch)
    (one, gradient), (other, other_gradient) = both_parts(table, masked), both_parts(table, removed)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), one, other)
    np.testing.assert_allclose(gradient, other_gradient, atol=1e-7)


@given(st.permutations(range(B)))
@settings(max_examples=8, deadline=None, derandomize=True)
def test_the_order_of_rows_does_not_matter(order):
    table, batch = example()
    full, full_gradient = both_parts(table, batch)
    shuffled, gradient = both_parts(table, jax.tree.map(lambda x: x[np.array(order)], batch))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), shuffled, full)
    np.testing.assert_allclose(gradient, full_gradient, atol=1e-7)


@pytest.mark.parametrize("divergence", [forward_kl, reverse_kl, jsd(0.5)])
def test_the_soft_loss_is_least_where_the_student_is_the_teacher(divergence):
    _, batch = example()
    at = step(divergence=divergence)
    output, gradient = at(batch.teacher_logits, batch)
    assert float(output.primary_loss.unreduced_sum) == 0.0
    np.testing.assert_array_equal(gradient, 0.0)
    for seed in range(5):
        noise = np.random.default_rng(seed).normal(size=(B, L, V)).astype(np.float32)
        assert float(at(batch.teacher_logits + noise, batch)[0].primary_loss.unreduced_sum) > 1e-2


def test_a_teacher_is_a_constant():
    table, batch = example()
    own = batch.student_batch

    def loss(teacher):
        joined = DiffusionDistillationBatch(own, teacher)
        return diffusion_opd_loss_fn(table, joined, lambda model, inputs: jnp.asarray(model)).primary_loss.unreduced_sum

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(batch.teacher_logits), 0.0)


def test_a_component_of_weight_zero_is_not_computed_so_nan_teachers_are_harmless():
    table, batch = example(teacher_logits=np.full((B, L, V), np.nan, np.float32))
    output, gradient = step(soft_loss_weight=0.0, hard_loss_weight=2.0)(table, batch)
    _, hard, weight, expected = oracle(table, batch, 1.0, 0.0, 2.0)
    np.testing.assert_allclose(output.primary_loss.compute(), 2 * hard / weight, rtol=1e-6)
    assert float(output.aux_metrics["distill/soft_loss"].unreduced_sum) == 0.0
    clean = np.nan_to_num(batch.teacher_logits)
    _, _, _, expected = oracle(table, DiffusionDistillationBatch(batch.student_batch, clean), 1.0, 0.0, 2.0)
    np.testing.assert_allclose(gradient, expected, atol=2e-6)
    eager = diffusion_opd_loss_fn(jnp.asarray(table), batch, table_logits, soft_loss_weight=0.0, hard_loss_weight=2.0)
    np.testing.assert_allclose(eager.primary_loss.compute(), 2 * hard / weight, rtol=1e-6)


def test_expert_labels_replace_the_own_tokens_in_the_hard_loss_only():
    labels = np.random.default_rng(9).integers(0, V, size=(B, L)).astype(np.int32)
    table, batch = example(hard_target_ids=labels)
    output, gradient = both_parts(table, batch)
    soft, hard, weight, expected = oracle(table, batch, 2.0, 0.7, 0.3, targets=labels)
    np.testing.assert_allclose(output.aux_metrics["distill/soft_loss"].compute(), soft / weight, rtol=1e-6)
    np.testing.assert_allclose(output.aux_metrics["distill/hard_loss"].compute(), hard / weight, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected, atol=2e-6)


def anchor():
    weights = np.array([[1, 0, 0], [0, 0, 3], [0, 0.5, 0], [0, 0, 0]], np.float32)
    targets = np.random.default_rng(5).integers(0, V, size=(B, L)).astype(np.int32)
    return DiffusionTokenBatch({"example": np.arange(B, dtype=np.int32)[::-1].copy()}, targets, weights)


def test_an_anchor_is_scored_on_its_own_inputs_with_its_own_weights():
    table, batch = example(hard_target_batch=anchor())
    output, _ = both_parts(table, batch)
    soft, _, weight, _ = oracle(table, batch, 2.0, 1.0, 0.0)
    picked = np.take_along_axis(softmax(table[::-1]), anchor().target_ids[..., None], -1)[..., 0]
    hard = -(anchor().loss_weights * np.log(picked)).sum()
    np.testing.assert_allclose(output.primary_loss.unreduced_sum, 0.7 * soft + 0.3 * hard, rtol=1e-6)
    assert float(output.primary_loss.denominator) == weight
    np.testing.assert_allclose(output.aux_metrics["distill/hard_loss"].compute(), hard / 4.5, rtol=1e-6)


@pytest.mark.parametrize(
    ("a", "b", "scored"), [(1.0, 0.0, ["own"]), (0.0, 1.0, ["anchor"]), (1.0, 1.0, ["own", "anchor"])]
)
def test_only_what_has_weight_is_scored(a, b, scored):
    table, batch = example(hard_target_batch=anchor())
    seen = []

    def spying_logits(model, inputs):
        seen.append("own" if inputs is batch.student_batch.model_inputs else "anchor")
        return model[inputs["example"]]

    diffusion_opd_loss_fn(table, batch, spying_logits, soft_loss_weight=a, hard_loss_weight=b)
    assert seen == scored


def test_own_labels_cost_one_scoring():
    table, batch = example()
    calls = []
    diffusion_opd_loss_fn(
        table, batch, lambda model, inputs: calls.append(1) or model, soft_loss_weight=0.5, hard_loss_weight=0.5
    )
    assert len(calls) == 1


def test_groups_of_positions_are_reported_apart_and_change_nothing_else():
    table, batch = example()
    left = np.zeros((B, L), bool)
    left[:, 0] = True
    grouped = step(
        temperature=2.0,
        soft_loss_weight=0.7,
        hard_loss_weight=0.3,
        soft_loss_groups=lambda batch: {"left": left, "rest": ~left},
    )
    output, gradient = grouped(table, batch)
    plain, plain_gradient = both_parts(table, batch)
    np.testing.assert_allclose(gradient, plain_gradient, atol=1e-7)
    parts = [output.aux_metrics[f"distill/soft_loss/{name}"] for name in ("left", "rest")]
    whole = plain.aux_metrics["distill/soft_loss"]
    np.testing.assert_allclose(sum(p.unreduced_sum for p in parts), whole.unreduced_sum, rtol=1e-6)
    assert [float(p.denominator) for p in parts] == [3.25, 4.5]
    p, q = softmax(batch.teacher_logits / 2), softmax(table / 2)
    soft = batch.student_batch.loss_weights * 4.0 * (p * np.log(p / q)).sum(-1)
    np.testing.assert_allclose(parts[0].unreduced_sum, soft[:, 0].sum(), rtol=1e-6)


def test_an_empty_batch_has_loss_and_gradient_exactly_zero():
    table, batch = example()
    own = batch.student_batch
    empty = DiffusionDistillationBatch(
        DiffusionTokenBatch(own.model_inputs, own.target_ids, np.zeros((B, L), np.float32)), batch.teacher_logits
    )
    output, gradient = both_parts(table, empty)
    assert float(output.primary_loss.compute()) == 0.0
    np.testing.assert_array_equal(gradient, 0.0)


def test_low_precision_logits_on_either_side_are_compared_in_float32():
    table, batch = example()
    low_table, low_teacher = jnp.asarray(table, jnp.bfloat16), jnp.asarray(batch.teacher_logits, jnp.float16)
    own = batch.student_batch
    output, _ = both_parts(low_table, DiffusionDistillationBatch(own, low_teacher))
    exact, _ = both_parts(
        low_table.astype(jnp.float32), DiffusionDistillationBatch(own, low_teacher.astype(jnp.float32))
    )
    jax.tree.map(np.testing.assert_array_equal, output, exact)


SETTINGS = {
    "temperature must be a finite real scalar, got nan": {"temperature": float("nan")},
    "temperature must be a finite real scalar, got inf": {"temperature": float("inf")},
    "temperature must be a finite real scalar, got True": {"temperature": True},
    "temperature must be a finite real scalar, got '1'": {"temperature": "1"},
    "temperature must be a finite real scalar, got 1j": {"temperature": 1j},
    "temperature must be positive, got 0": {"temperature": 0},
    "temperature must be positive, got -1.0": {"temperature": -1.0},
    "soft_loss_weight must be a finite real scalar": {"soft_loss_weight": None},
    "hard_loss_weight must be a finite real scalar, got False": {"hard_loss_weight": False},
    "nonnegative, got -1 and 0.0": {"soft_loss_weight": -1},
    "nonnegative, got 1.0 and -0.5": {"hard_loss_weight": -0.5},
    "at least one loss weight must be positive": {"soft_loss_weight": 0.0, "hard_loss_weight": 0},
}


@pytest.mark.parametrize("message", SETTINGS)
def test_a_setting_out_of_its_domain_is_refused_before_anything_is_scored(message):
    table, batch = example()
    for call in (
        lambda **kw: diffusion_opd_loss_fn(table, batch, lambda *_: pytest.fail("scored"), **kw),
        lambda **kw: configure_prepared_diffusion_opd(Recording(), lambda raw: raw, table_logits, **kw),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            call(**SETTINGS[message])
        assert isinstance(caught.value, ValueError)


def test_numpy_scalars_and_integers_are_real_settings():
    table, batch = example()
    one = step(temperature=np.float32(2), soft_loss_weight=1, hard_loss_weight=np.int64(1))(table, batch)[0]
    two = step(temperature=2.0, soft_loss_weight=1.0, hard_loss_weight=1.0)(table, batch)[0]
    jax.tree.map(np.testing.assert_array_equal, one, two)


@pytest.mark.parametrize("width", [V - 1, V + 1])
def test_student_and_teacher_of_different_width_are_refused_with_both_shapes(width):
    table, batch = example()
    own = DiffusionTokenBatch(batch.student_batch.model_inputs, np.zeros((B, L), int), np.ones((B, L)))
    batch = DiffusionDistillationBatch(own, np.zeros((B, L, width), np.float32))
    message = rf"must have one shape, got \(4, 3, 6\) and \(4, 3, {width}\)"
    with pytest.raises(BatchValueError, match=message):
        diffusion_opd_loss_fn(table, batch, table_logits)
    with pytest.raises(BatchValueError, match=message):
        jax.eval_shape(lambda t, b: diffusion_opd_loss_fn(t, b, table_logits), table, batch)


def spoilt_teacher(row):
    table, batch = example()
    teacher = batch.teacher_logits.copy()
    teacher[1, 1] = row
    return table, DiffusionDistillationBatch(batch.student_batch, teacher)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([np.nan] + [0] * 5, "active teacher_logits must be finite, .* got nan at row 1, position 1"),
        ([np.inf] + [0] * 5, "active teacher_logits must be finite, .* got inf at row 1, position 1"),
        ([-np.inf] * 6, "a whole row is -inf; got -inf at row 1, position 1"),
    ],
)
def test_a_teacher_without_a_distribution_is_refused_on_the_host_and_gives_nan_under_a_trace(row, message):
    table, batch = spoilt_teacher(row)
    with pytest.raises(BatchValueError, match=message):
        check_prepared_batch(batch)
    with pytest.raises(BatchValueError, match=message):
        diffusion_opd_loss_fn(table, batch, table_logits)
    output, gradient = both_parts(table, batch)
    assert np.isnan(output.primary_loss.unreduced_sum)
    assert np.isnan(np.asarray(gradient)[1, 1]).all()
    assert check_prepared_batch(batch, soft_loss_weight=0.0) is batch


def test_a_masked_out_teacher_entry_is_legal_and_gives_one_answer_eager_and_jitted():
    table, batch = spoilt_teacher([-np.inf, 0, 1, -np.inf, 2, 0])
    eager = diffusion_opd_loss_fn(table, check_prepared_batch(batch), table_logits, temperature=2.0)
    jitted, gradient = step(temperature=2.0)(table, batch)
    np.testing.assert_allclose(eager.primary_loss.unreduced_sum, jitted.primary_loss.unreduced_sum, rtol=1e-6)
    p, q = softmax(batch.teacher_logits / 2), softmax(table / 2)
    terms = np.where(p > 0, p * (np.log(np.where(p > 0, p, 1)) - np.log(q)), 0.0)
    expected = (batch.student_batch.loss_weights[..., None] * 4 * terms).sum()
    np.testing.assert_allclose(jitted.primary_loss.unreduced_sum, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, batch.student_batch.loss_weights[..., None] * 2 * (q - p), atol=2e-6)


def test_teacher_mass_where_the_student_has_none_is_an_error_and_never_an_infinity():
    table, batch = example()
    table[1, 1, 3] = -np.inf
    with pytest.raises(
        BatchValueError, match=r"teacher mass where the student's logit is -inf .* row 1, position 1, entry 3"
    ):
        diffusion_opd_loss_fn(table, batch, table_logits)
    assert np.isnan(both_parts(table, batch)[0].primary_loss.unreduced_sum)


def test_the_host_check_covers_everything_else_that_needs_values():
    _, batch = example()
    own = batch.student_batch
    with pytest.raises(BatchValueError, match="loss_weights must be finite"):
        check_prepared_batch(
            DiffusionDistillationBatch(
                DiffusionTokenBatch(own.model_inputs, own.target_ids, np.full((B, L), np.nan)), batch.teacher_logits
            )
        )
    with pytest.raises(BatchValueError, match="active target_ids must be nonnegative"):
        check_prepared_batch(DiffusionDistillationBatch(own, batch.teacher_logits, -np.ones((B, L), int)))


class Recording:
    """The two extension points of a trainer."""

    def with_loss_fn(self, fn, has_aux=False):
        self.loss_fn, self.has_aux = fn, has_aux
        return self

    def with_gen_model_input_fn(self, fn):
        self.inputs_fn = fn
        return self


def test_a_trainer_is_handed_inputs_and_loss_through_its_two_extension_points():
    table, batch = example()
    trainer = Recording()
    configured = configure_prepared_diffusion_opd(
        trainer,
        lambda raw: DiffusionDistillationBatch.create(student_batch=raw["rollout"], teacher_logits=raw["teacher"]),
        table_logits,
        temperature=2.0,
        soft_loss_weight=0.7,
        hard_loss_weight=0.3,
        divergence=reverse_kl,
    )
    assert configured is trainer
    assert not trainer.has_aux
    raw = {"rollout": batch.student_batch, "teacher": batch.teacher_logits}
    output = jax.jit(lambda table, raw: trainer.loss_fn(table, **trainer.inputs_fn(raw)))(table, raw)
    expected, _ = step(temperature=2.0, soft_loss_weight=0.7, hard_loss_weight=0.3, divergence=reverse_kl)(table, batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), output, expected)


def test_the_loss_maps_over_a_leading_axis():
    table, batch = example()
    stacked = jax.tree.map(lambda x: np.stack([x, x]), batch)
    losses = jax.jit(jax.vmap(lambda b: diffusion_opd_loss_fn(table, b, lambda m, i: jnp.asarray(m)[i["example"]])))(
        stacked
    )
    expected, _ = step()(table, batch)
    np.testing.assert_allclose(losses.primary_loss.unreduced_sum[1], expected.primary_loss.unreduced_sum, rtol=1e-6)
