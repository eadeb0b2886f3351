"""Divergences between a teacher's and a student's distribution, exact in float32 near their minimum and at both ends.

All three are one family. With p = softmax(t), q = softmax(s), m = βp + (1 − β)q:

    D_β = [β·KL(p‖m) + (1 − β)·KL(q‖m)] / (β(1 − β)),      D_0 = KL(p‖q),      D_1 = KL(q‖p).

Written as it stands, the difference of nearly equal numbers is divided by a small one. Since Σ(m − p) = Σ(m − q) = 0,
each KL is also a sum of nonnegative terms, KL(p‖m) = Σ p·φ(m/p − 1) with φ(u) = u − log1p(u), hence

    D_β = Σ p·φ((1 − β)(q/p − 1)) / (1 − β)  +  Σ q·φ(β(p/q − 1)) / β,
    ∂D_β/∂s_i = g_i − q_i·Σ_j g_j,      g_i = −q_i·log1p(β(p_i/q_i − 1)) / β      (g_i = q_i − p_i at β = 0),

where small u go through φ's series and large u through logarithms of the ratios, so that nothing overflows or cancels.
"""

import math
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from contracts.errors import ConfigError
from contracts.tokens import DiffusionTokenBatch, check_active_logits, concrete, refuse_where

_NEAR = 0.5
"""|u| up to which φ(u) and log1p(u) are taken from u itself; above, from logarithms of the ratio."""

_SERIES = tuple(1.0 / (2 * k + 3) for k in range(8))
"""Σ z^(2k)/(2k + 3): with z = u/(2 + u) and |u| ≤ ½, z² ≤ 1/9, and eight terms leave less than float32 rounds."""


@dataclass(frozen=True)
class Divergence:
    """D_β(teacher, student) over the last axis; the teacher is a constant.

    A −inf logit is an entry without mass. Without mass on both sides it contributes 0; without the teacher's it
    contributes the limit p → 0 (0 to forward KL, +inf to reverse KL). Teacher mass where the student has none, an
    infinite result, or an input that is no distribution (NaN, +inf, a whole row of −inf) make value and gradient NaN,
    traced or not; `check` says why, on concrete arrays.

    Args:
        beta: 0 forward KL, 1 reverse KL, between them the skewed Jensen-Shannon divergence; static.
    """

    beta: float

    def __call__(self, teacher_logits: Any, student_logits: Any) -> jax.Array:
        """Returns D_β(softmax(t), softmax(s)).

        Args:
            teacher_logits: `[..., V]` floating; no gradient flows to them.
            student_logits: `[..., V]` floating, same shape.

        Returns:
            float32 `[...]`, ≥ 0.

        Source:
            Lin, "Divergence measures based on the Shannon entropy" (1991), section IV, divided by β(1 − β); in
            distillation: Agarwal et al., "On-Policy Distillation of Language Models" (2024), section 3.
        """
        return _divergence(self.beta, *_float32_pair(teacher_logits, student_logits))

    def gradient(self, teacher_logits: Any, student_logits: Any) -> jax.Array:
        """Returns ∂D_β/∂student_logits, float32 `[..., V]`; arguments as for the call."""
        return _value_and_gradient(self.beta, *_float32_pair(teacher_logits, student_logits))[1]

    def check(self, batch: DiffusionTokenBatch, teacher_logits: Any, student_logits: Any) -> None:
        """Refuses active positions whose divergence does not exist; arrays without concrete values pass.

        Args:
            batch: Whose weights say which positions are active.
            teacher_logits: `[B, L, V]` floating.
            student_logits: `[B, L, V]` floating.

        Raises:
            BatchValueError: NaN, +inf or a row without mass on either side; teacher mass where the student has none;
                for reverse KL, student mass where the teacher has none. Names the position.
        """
        check_active_logits(batch, teacher_logits, name="teacher_logits")
        check_active_logits(batch, student_logits, name="student logits")
        weights, teacher, student = map(concrete, (batch.loss_weights, teacher_logits, student_logits))
        if weights is None or teacher is None or student is None:
            return
        teacher_has, student_has = (values > -np.inf for values in (teacher, student))
        active = weights[..., None] > 0
        advice = "drop the same entries (the mask id, say) on both sides"
        refuse_where(
            active & teacher_has & ~student_has,
            teacher,
            f"active teacher mass where the student's logit is -inf makes the divergence infinite: {advice}",
        )
        if self.beta == 1:
            refuse_where(
                active & student_has & ~teacher_has,
                student,
                f"active student mass where the teacher's logit is -inf makes reverse KL infinite: {advice}",
            )


forward_kl = Divergence(0.0)
"""KL(teacher ‖ student): covers the teacher's modes."""

reverse_kl = Divergence(1.0)
"""KL(student ‖ teacher): stays within the teacher's modes."""


def jsd(beta: Any) -> Divergence:
    """Returns D_β of the module's docstring: Jensen-Shannon, divided by β(1 − β), so continuous at both ends.

    Args:
        beta: Real in [0, 1], weight of the teacher in the mixture; 0 and 1 give the exact KLs.

    Raises:
        ConfigError: Not a real in [0, 1], or above 0 by less than float32 can tell.
    """
    smallest = float(np.finfo(np.float32).tiny)
    if isinstance(beta, bool) or not isinstance(beta, Real) or not 0 <= float(beta) <= 1:
        raise ConfigError(f"jsd needs a real beta in [0, 1], got {beta!r}")
    if 0 < float(beta) < smallest:
        raise ConfigError(f"jsd beta {beta} is lost in float32 (smallest {smallest}): use 0, which is forward KL")
    return Divergence(float(beta))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _divergence(beta: float, teacher: jax.Array, student: jax.Array) -> jax.Array:
    return _value_and_gradient(beta, teacher, student)[0]


@_divergence.defjvp
def _divergence_jvp(beta: float, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # Differentiating the stable form term by term would cancel again; the closed gradient does not.
    value, gradient = _value_and_gradient(beta, *primals)
    return value, jnp.sum(gradient * tangents[1], axis=-1)


def _value_and_gradient(beta: float, teacher: jax.Array, student: jax.Array) -> tuple[jax.Array, jax.Array]:
    p, teacher_highest, teacher_log_total, teacher_has = _softmax(teacher)
    q, student_highest, student_log_total, student_has = _softmax(student)
    both = teacher_has & student_has
    # log(q/p), from the difference of the logits: that of the log-probabilities has lost its last digits already.
    offset = (student_highest - teacher_highest) + (student_log_total - teacher_log_total)
    log_ratio = jnp.where(both, (student - teacher) - offset, 0.0)

    terms = jnp.zeros_like(p)
    if beta < 1:
        terms = terms + _phi_term(p, q, log_ratio, 1.0 - beta, beta)
    if beta > 0:
        terms = terms + _phi_term(q, p, -log_ratio, beta, 1.0 - beta)
        slope = -_log_term(q, -log_ratio, beta, 1.0 - beta)
    else:
        slope = -jnp.where(log_ratio > -1.0, q * jnp.expm1(-jnp.maximum(log_ratio, -1.0)), p - q)
    # p → 0 of both, per unit of q.
    alone = 1.0 if beta == 0 else math.inf if beta == 1 else -math.log1p(-beta) / beta
    only_student = student_has & ~teacher_has
    value = jnp.sum(jnp.where(both, terms, jnp.where(only_student, q * alone, 0.0)), axis=-1)
    slope = jnp.where(both, slope, jnp.where(only_student, q * alone, 0.0))
    gradient = _centred(slope, q)

    broken = jnp.isnan(teacher) | jnp.isposinf(teacher) | jnp.isnan(student) | jnp.isposinf(student)
    broken = broken | (teacher_has & ~student_has)
    if beta == 1:
        broken = broken | only_student
    broken = jnp.any(broken, axis=-1) | ~jnp.any(both, axis=-1)
    poison = jnp.where(broken, jnp.nan, 1.0)
    return value * poison, gradient * poison[..., None]


def _softmax(logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns probabilities, the highest logit, log Σ exp(logits − highest), and where there is mass."""
    has_mass = logits > -jnp.inf
    highest = jnp.max(logits, axis=-1, keepdims=True)
    shifted = jnp.where(has_mass, logits - highest, -jnp.inf)
    log_total = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True))
    return jnp.where(has_mass, jnp.exp(shifted - log_total), 0.0), highest, log_total, has_mass


def _phi_term(w: jax.Array, other: jax.Array, log_ratio: jax.Array, share: float, rest: float) -> jax.Array:
    """Returns w·φ(share·(other/w − 1))/share, with log_ratio = log(other/w) and rest = 1 − share."""
    u, near, log_mixture = _mixture(log_ratio, share, rest)
    z = u / (2.0 + u)
    series = jnp.full_like(z, _SERIES[-1])
    for coefficient in _SERIES[-2::-1]:
        series = series * z * z + coefficient
    phi = z * u - 2.0 * z * z * z * series
    return jnp.where(near, w * (phi / share), (other - w) - (w / share) * log_mixture)


def _log_term(w: jax.Array, log_ratio: jax.Array, share: float, rest: float) -> jax.Array:
    """Returns w·log1p(share·(other/w − 1))/share."""
    u, near, log_mixture = _mixture(log_ratio, share, rest)
    return jnp.where(near, w * (jnp.log1p(u) / share), (w / share) * log_mixture)


def _mixture(log_ratio: jax.Array, share: float, rest: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns u = share·expm1(log_ratio) where small (else 0), where it is small, and log1p(u) for where it is not."""
    u = share * jnp.expm1(log_ratio)
    near = jnp.abs(u) <= _NEAR
    if rest == 0:
        return jnp.where(near, u, 0.0), near, log_ratio
    log_mixture = jnp.logaddexp(math.log(share) + log_ratio, jnp.float32(math.log(rest)))
    return jnp.where(near, u, 0.0), near, log_mixture


def _centred(slope: jax.Array, q: jax.Array) -> jax.Array:
    """Returns slope − q·Σ slope.

    Where one q is nearly 1, its own slope makes up nearly all of the sum, and the difference would cancel. Measuring
    slope/q from the likeliest entry, which then contributes exactly 0, leaves only small terms in the sum.
    """
    entries = jax.lax.broadcasted_iota(jnp.int32, q.shape, q.ndim - 1)
    likeliest = entries == jnp.argmax(q, axis=-1, keepdims=True).astype(jnp.int32)
    origin = jnp.sum(jnp.where(likeliest, slope / q, 0.0), axis=-1, keepdims=True)
    slope = jnp.where(likeliest, 0.0, slope - q * origin)
    return slope - q * jnp.sum(slope, axis=-1, keepdims=True)


def _float32_pair(teacher_logits: Any, student_logits: Any) -> tuple[jax.Array, jax.Array]:
    teacher, student = jnp.asarray(teacher_logits), jnp.asarray(student_logits)
    return jax.lax.stop_gradient(teacher.astype(jnp.float32)), student.astype(jnp.float32)
