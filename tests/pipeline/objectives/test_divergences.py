"""Divergences against 60-digit arithmetic, against finite differences, and at the edges of their domain."""

import math
from decimal import Decimal, localcontext
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import BatchValueError, ConfigError
from contracts.tokens import DiffusionTokenBatch
from pipeline.objectives.divergences import Divergence, forward_kl, jsd, reverse_kl

BETAS = (0.0, 1e-6, 1e-3, 0.1, 0.5, 0.9, 1 - 1e-3, 1 - 1e-6, 1.0)
GAPS = (1e-3, 1e-1, 1.0, 30.0)
INF = np.inf


@cache
def compiled(divergence):
    """Value and gradient by the student's logits, for rows [N, V]."""

    def value_and_gradient(t, s):
        value, pull_back = jax.vjp(lambda x: divergence(t, x), s)
        return value, pull_back(jnp.ones_like(value))[0]

    return jax.jit(value_and_gradient)


def exact(beta, t, s):
    """D_β and its gradient from the textbook formula in 60 digits: float32 and float64 both cancel, these don't."""
    with localcontext() as context:
        context.prec = 60

        def softmax(logits):
            exps = [Decimal(float(x)).exp() for x in logits]
            return [e / sum(exps) for e in exps]

        def kl(p, q):
            return sum((a * (a / b).ln() for a, b in zip(p, q, strict=True) if a), Decimal(0))

        p, q, beta = softmax(t), softmax(s), Decimal(beta)
        m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
        if beta == 0:
            value, by_q = kl(p, q), [-a / b for a, b in zip(p, q, strict=True)]
        elif beta == 1:
            value, by_q = kl(q, p), [(b / a).ln() for a, b in zip(p, q, strict=True)]
        else:
            value = (beta * kl(p, m) + (1 - beta) * kl(q, m)) / (beta * (1 - beta))
            by_q = [(b / c).ln() / beta for b, c in zip(q, m, strict=True)]
        mean = sum(b * d for b, d in zip(q, by_q, strict=True))
        return float(value), np.array([float(b * (d - mean)) for b, d in zip(q, by_q, strict=True)])


def float64_value(beta, t, s):
    """The same in plain numpy float64, by the other textbook form: KL as cross entropy minus entropy."""
    log_p, log_q = (x - np.log(np.sum(np.exp(x - x.max()))) - x.max() for x in (t, s))
    p, q = np.exp(log_p), np.exp(log_q)
    if beta == 0:
        return np.sum(p * log_p) - np.sum(p * log_q)
    if beta == 1:
        return np.sum(q * log_q) - np.sum(q * log_p)
    m = beta * p + (1 - beta) * q
    entropy = [np.sum(x * np.log(x)) for x in (p, q, m)]
    return (beta * entropy[0] + (1 - beta) * entropy[1] - entropy[2]) / (beta * (1 - beta))


def rows(gap, seed=0, n=4, v=12):
    rng = np.random.default_rng(seed)
    t = (rng.normal(size=(n, v)) * max(3.0, gap)).astype(np.float32)
    return t, (t + rng.normal(size=(n, v)) * gap).astype(np.float32)


@pytest.mark.parametrize("beta", BETAS)
def test_value_and_gradient_equal_sixty_digit_arithmetic(beta):
    t, s = (np.concatenate(side) for side in zip(*(rows(gap, n=1) for gap in GAPS), strict=True))
    values, gradients = compiled(jsd(beta))(t, s)
    for row, (value, gradient) in enumerate(zip(values, np.asarray(gradients, np.float64), strict=True)):
        expected, expected_gradient = exact(beta, t[row], s[row])
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient, expected_gradient, atol=2e-4 * np.abs(expected_gradient).max())


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_the_gradient_of_a_student_that_is_almost_sure_does_not_cancel(beta):
    t, s = rows(1.0)
    s[:, 3] = t.max() + 18  # its probability is 1 to seven digits: its slope and the mean slope are equal to as many
    gradients = np.asarray(compiled(jsd(beta))(t, s)[1], np.float64)
    for row, gradient in enumerate(gradients):
        expected = exact(beta, t[row], s[row])[1]
        np.testing.assert_allclose(gradient, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_gradient_equals_finite_differences_of_a_float64_oracle(beta):
    t, s = (side.astype(np.float64) for side in rows(1.0, seed=1))
    values, gradients = compiled(jsd(beta))(t.astype(np.float32), s.astype(np.float32))
    np.testing.assert_allclose(values[0], float64_value(beta, t[0], s[0]), rtol=1e-5)
    for v in range(s.shape[1]):
        step = 1e-5 * np.eye(s.shape[1])[v]
        slope = (float64_value(beta, t[0], s[0] + step) - float64_value(beta, t[0], s[0] - step)) / 2e-5
        np.testing.assert_allclose(gradients[0, v], slope, rtol=1e-4, atol=1e-6)


def test_the_teacher_comes_first_and_the_direction_is_the_named_one():
    teacher, student = np.log([0.9, 0.1]).astype(np.float32), np.zeros(2, np.float32)
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    reverse = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    np.testing.assert_allclose(jax.jit(forward_kl)(teacher, student), forward, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(reverse_kl)(teacher, student), reverse, rtol=1e-6)


def test_jsd_at_one_half_is_four_times_the_symmetric_textbook_value():
    t, s = rows(1.0, seed=2)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (t[0].astype(np.float64), s[0].astype(np.float64)))
    textbook = 0.5 * np.sum(p * np.log(2 * p / (p + q))) + 0.5 * np.sum(q * np.log(2 * q / (p + q)))
    np.testing.assert_allclose(compiled(jsd(0.5))(t, s)[0][0], 4 * textbook, rtol=1e-5)


def test_jsd_is_continuous_at_both_ends_and_dispatches_there_to_the_exact_divergences():
    t, s = rows(1.0)
    assert jsd(0) == forward_kl
    assert jsd(1.0) == reverse_kl
    for near, end in ((1e-6, forward_kl), (1 - 1e-6, reverse_kl)):
        for close, limit in zip(compiled(jsd(near))(t, s), compiled(end)(t, s), strict=True):
            np.testing.assert_allclose(close, limit, rtol=1e-4, atol=1e-5)


@given(
    st.sampled_from(BETAS),
    st.lists(st.floats(-40, 40, width=32), min_size=12, max_size=12),
    st.lists(st.floats(-40, 40, width=32), min_size=12, max_size=12),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_minimum_is_zero_and_lies_at_student_equals_teacher(beta, teacher, student):
    t, s = np.float32([teacher] * 4), np.float32([student] * 4)
    value, gradient = compiled(jsd(beta))(t, t)
    np.testing.assert_array_equal(value, 0.0)
    np.testing.assert_array_equal(gradient, 0.0)
    # A constant added to every logit changes no distribution.
    np.testing.assert_allclose(compiled(jsd(beta))(t, t + np.float32(8.0))[0], 0.0, atol=1e-10)
    values, gradients = compiled(jsd(beta))(t, s)
    assert np.all(np.asarray(values) >= 0)
    assert np.all(np.isfinite(gradients))


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_descending_the_divergence_moves_the_student_onto_the_teacher(beta):
    t, s = rows(1.0, seed=3, n=2, v=6)
    t, s = t / 3, s / 3
    divergence = jsd(beta)
    assert np.all(np.asarray(compiled(divergence)(t, s)[0]) > 1e-3)
    descend = jax.jit(lambda s: jax.lax.fori_loop(0, 2000, lambda _, s: s - divergence.gradient(t, s), s))
    np.testing.assert_allclose(jax.nn.softmax(descend(s)), jax.nn.softmax(t), atol=1e-4)


@pytest.mark.parametrize("beta", [0.0, 1e-6, 0.5, 1.0])
def test_an_entry_without_mass_on_both_sides_is_an_entry_that_is_not_there(beta):
    t, s = rows(1.0, v=11)
    without = compiled(jsd(beta))(t, s)
    bar = np.full((4, 1), -INF, np.float32)
    value, gradient = compiled(jsd(beta))(np.concatenate([t, bar], 1), np.concatenate([s, bar], 1))
    np.testing.assert_allclose(value, without[0], rtol=1e-6)
    np.testing.assert_allclose(gradient[:, :-1], without[1], rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal(gradient[:, -1], 0.0)


@pytest.mark.parametrize("beta", [0.0, 1e-6, 0.5, 1 - 1e-6])
def test_an_entry_without_teacher_mass_is_the_limit_of_vanishing_mass(beta):
    t, s = rows(1.0)
    masked, vanishing = t.copy(), t.copy()
    masked[0, 2], vanishing[0, 2] = -INF, -300.0
    value, gradient = compiled(jsd(beta))(masked, s)
    expected, expected_gradient = exact(beta, vanishing[0], s[0])
    np.testing.assert_allclose(value[0], expected, rtol=1e-5)
    np.testing.assert_allclose(gradient[0], expected_gradient, rtol=1e-4, atol=1e-6)


def test_forward_kl_adds_nothing_for_an_entry_without_teacher_mass():
    t, s = np.float32([[0.0, 0.0, -INF]]), np.float32([[0.0, 1.0, 2.0]])
    q = np.exp(s[0]) / np.exp(s[0]).sum()
    value, gradient = compiled(forward_kl)(t, s)
    np.testing.assert_allclose(value[0], 0.5 * np.log(0.5 / q[0]) + 0.5 * np.log(0.5 / q[1]), rtol=1e-6)
    np.testing.assert_allclose(gradient[0], q - np.float32([0.5, 0.5, 0.0]), rtol=1e-5)


BROKEN = {
    "a NaN teacher": ([np.nan, 0, 0], [0, 0, 0], "teacher_logits must be finite", BETAS),
    "an infinite teacher": ([INF, 0, 0], [0, 0, 0], "teacher_logits must be finite", BETAS),
    "a teacher without mass": ([-INF] * 3, [0, 0, 0], "teacher_logits must leave some entry finite", BETAS),
    "a NaN student": ([0, 0, 0], [np.nan, 0, 0], "student logits must be finite", BETAS),
    "an infinite student": ([0, 0, 0], [0, INF, 0], "student logits must be finite", BETAS),
    "a student without mass": ([0, 0, 0], [-INF] * 3, "student logits must leave some entry finite", BETAS),
    "no shared mass": ([0, -INF, -INF], [-INF, 0, 0], "teacher mass where the student's logit is -inf", BETAS),
    "teacher mass under no student mass": ([0, 0, 0], [0, 0, -INF], "makes the divergence infinite: drop", BETAS),
    "student mass under no teacher mass": ([0, 0, -INF], [0, 0, 0], "makes reverse KL infinite: drop", (1.0,)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_divergence_that_does_not_exist_is_an_error_when_concrete_and_nan_when_traced(case):
    teacher, student, message, betas = BROKEN[case]
    t, s = (np.zeros((1, 4, 3), np.float32) for _ in range(2))
    t[0, 1], s[0, 1] = teacher, student
    t[0, 3], s[0, 3] = teacher, student
    batch = DiffusionTokenBatch(np.zeros((1, 1)), np.zeros((1, 4), int), np.array([[0, 0.5, 1, 0]]))
    for beta in {betas[0], betas[-1]} | {0.5} & set(betas):
        divergence = jsd(beta)
        with pytest.raises(BatchValueError, match=rf"{message}.* at row 0, position 1"):
            divergence.check(batch, t, s)
        value, gradient = compiled(divergence)(t[0], s[0])
        np.testing.assert_array_equal(np.isnan(value), [False, True, False, True])
        np.testing.assert_array_equal(np.isnan(gradient).any(-1), [False, True, False, True])
        jax.eval_shape(lambda t, s, d=divergence: d.check(batch, t, s), t, s)


def test_only_active_positions_are_checked():
    t = np.full((1, 2, 3), np.nan, np.float32)
    batch = DiffusionTokenBatch(np.zeros((1, 1)), np.zeros((1, 2), int), np.zeros((1, 2)))
    forward_kl.check(batch, t, t)


@pytest.mark.parametrize("beta", [0.0, 1e-6, 0.5, 1.0])
def test_logits_of_any_size_give_a_finite_value_and_gradient(beta):
    t = np.float32([[0, 1e4, -1e4], [1e30, 0, 0], [0, 0, 200], [-1e30, 0, 0]])
    s = np.float32([[1e4, 0, -1e4], [0, 1e30, 0], [200, 0, 0], [0, 0, -1e30]])
    value, gradient = compiled(jsd(beta))(t, s)
    assert np.all(np.isfinite(value))
    assert np.all(np.isfinite(gradient))


def test_low_precision_logits_are_compared_in_float32():
    t, s = (jnp.asarray(x, jnp.bfloat16) for x in rows(1.0))
    value, gradient = compiled(forward_kl)(t, s)
    assert value.dtype == jnp.float32
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(value, compiled(forward_kl)(t.astype(jnp.float32), s.astype(jnp.float32))[0])


def test_no_gradient_reaches_the_teacher():
    t, s = rows(1.0)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: forward_kl(x, s).sum()))(t), 0.0)


def test_eager_jit_vmap_forward_mode_and_the_stated_gradient_agree():
    t, s = rows(1.0)
    divergence = jsd(0.3)
    value, gradient = compiled(divergence)(t, s)
    np.testing.assert_allclose(divergence(t, s), value, rtol=1e-6)  # eager
    np.testing.assert_allclose(jax.jit(jax.vmap(divergence))(t, s), value, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(divergence.gradient)(t, s), gradient, rtol=1e-6, atol=1e-9)
    direction = np.ones_like(s) * np.arange(s.shape[1], dtype=np.float32)
    tangent = jax.jit(lambda s: jax.jvp(lambda x: divergence(t, x), (s,), (direction,))[1])(s)
    np.testing.assert_allclose(tangent, np.sum(gradient * direction, axis=-1), rtol=1e-5)


@pytest.mark.parametrize("beta", [-0.1, 1.1, float("nan"), True, "0.5", None, 1e-40])
def test_a_beta_outside_its_domain_is_refused(beta):
    with pytest.raises(ConfigError, match="beta"):
        jsd(beta)


def test_a_divergence_can_be_a_static_argument():
    assert hash(jsd(0.5)) == hash(Divergence(0.5))
