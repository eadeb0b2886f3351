"""Faults that other systems shipped, as the properties that rule them out here."""

from functools import partial

import jax
import numpy as np
import pytest

from contracts.distillation import DiffusionDistillationBatch
from contracts.losses import LossOutput, close_window, merge_windows, open_window, reduce_losses
from contracts.tokens import DiffusionTokenBatch
from pipeline.objectives.divergences import forward_kl, jsd, reverse_kl
from pipeline.objectives.opd import diffusion_opd_loss_fn
from pipeline.objectives.sft import diffusion_loss_fn

B, L, V = 3, 4, 5


def itself(model, model_inputs):
    return model


@partial(jax.jit, static_argnames=("divergence", "hard"))
def opd(logits, joined, divergence=forward_kl, hard=0.0):
    return diffusion_opd_loss_fn(logits, joined, itself, divergence=divergence, hard_loss_weight=hard).primary_loss


@jax.jit
def sft(logits, own):
    return diffusion_loss_fn(logits, own, itself).primary_loss


def batch(weights, targets=None, teacher=None, seed=0):
    rng = np.random.default_rng(seed)
    own = DiffusionTokenBatch(
        {"rows": np.zeros(len(weights))},
        rng.integers(0, V, size=np.shape(weights)) if targets is None else targets,
        np.asarray(weights, np.float32),
    )
    noise = rng.normal(size=(*np.shape(weights), V)).astype(np.float32)
    return DiffusionDistillationBatch(own, noise if teacher is None else teacher)


def certain(targets, off):
    return np.where(np.eye(V)[targets] > 0, np.float32(0), np.float32(off))


@pytest.mark.parametrize("divergence", [forward_kl, jsd(0.5), reverse_kl])
def test_a_certain_teacher_costs_nothing_at_any_slot_to_a_student_that_knows_the_string(divergence):
    # verl and others: teacher scores off by one; the last token without signal.
    string = np.array([[3, 1, 4, 0]])
    for slot in range(L):
        weights = np.eye(L, dtype=np.float32)[[slot]]
        joined = batch(weights, string, certain(string, -200.0))
        knows = opd(certain(string, -200.0), joined, divergence)
        shifted = opd(np.roll(certain(string, -20.0), 1, axis=1), joined, divergence)
        assert float(knows.compute()) == 0.0
        assert float(shifted.compute()) > 1.0


def test_ranks_with_one_and_five_active_tokens_equal_the_one_process_loss():
    # ms-swift: local means averaged over ranks.
    joined = batch([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 0]])
    logits = np.random.default_rng(1).normal(size=(B, L, V)).astype(np.float32)
    parts = [slice(0, 1), slice(1, 3)]
    ranks = [opd(logits[part], jax.tree.map(lambda x, p=part: x[p], joined)) for part in parts]
    whole = float(opd(logits, joined).compute())
    pooled = close_window(merge_windows(*(open_window(LossOutput(rank, {})) for rank in ranks)))["loss"]
    np.testing.assert_allclose(pooled, whole, rtol=1e-6)
    assert abs(np.mean([float(rank.compute()) for rank in ranks]) - whole) > 1e-2


@pytest.mark.parametrize("total", [1e-3, 0.3, 1.0, 40.0])
def test_totals_below_one_are_not_clamped(total):
    # tunix, miles: the denominator clamped at 1 per row or window.
    weights = np.full((B, L), total / (B * L))
    logits = np.random.default_rng(1).normal(size=(B, L, V)).astype(np.float32)
    of_total = sft(logits, batch(weights).student_batch)
    of_ones = sft(logits, batch(np.ones((B, L))).student_batch)
    np.testing.assert_allclose(of_total.compute(), of_ones.compute(), rtol=1e-5)


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 1 - 1e-3, 1 - 1e-6])
def test_jsd_near_its_ends_still_teaches(beta):
    # ms-swift, trl: no signal near β = 0 or 1.
    t, s = np.random.default_rng(2).normal(size=(2, 16)).astype(np.float32)
    end = forward_kl if beta < 0.5 else reverse_kl
    near, at = jax.jit(jsd(beta).gradient)(t, s), jax.jit(end.gradient)(t, s)
    assert np.linalg.norm(near) > 0.9 * np.linalg.norm(at) > 0.05


@pytest.mark.parametrize("divergence", [forward_kl, jsd(0.5), reverse_kl])
def test_a_masked_lane_of_minus_infinity_leaves_the_gradient_finite(divergence):
    # trl: a finite loss with a NaN gradient.
    joined = batch([[1, 0, 1, 0]], targets=np.array([[0, 1, 2, 3]]))
    logits = np.random.default_rng(3).normal(size=(1, L, V)).astype(np.float32)
    logits[0, 1], joined.teacher_logits[0, 3] = -np.inf, -np.inf
    logits[..., -1], joined.teacher_logits[..., -1] = -np.inf, -np.inf

    value, gradient = jax.value_and_grad(lambda x: opd(x, joined, divergence, 0.5).unreduced_sum)(logits)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))
    assert np.all(np.asarray(gradient)[0, [1, 3]] == 0)
    assert np.all(np.asarray(gradient)[..., -1] == 0)


def test_the_students_own_samples_are_labels_only_when_asked_for():
    # ms-swift: expert cross entropy applied to the student's own samples.
    joined = batch(np.ones((B, L)))
    logits = np.random.default_rng(4).normal(size=(B, L, V)).astype(np.float32)
    other = DiffusionTokenBatch(joined.student_batch.model_inputs, np.zeros((B, L), int), np.ones((B, L)))
    relabelled = DiffusionDistillationBatch(other, joined.teacher_logits)
    for hard, same in ((0.0, True), (0.1, False)):
        losses = [float(opd(logits, b, hard=hard).compute()) for b in (joined, relabelled)]
        assert (losses[0] == losses[1]) is same


def test_reverse_kl_cannot_fall_by_moving_mass_to_where_the_teacher_has_none():
    # verl: a partial sum over the teacher's support fell below its value at student = teacher.
    t = np.float32([0.0, 0.0, -np.inf])
    fled = np.float32([-1.0, -1.0, 0.0])
    assert np.isnan(jax.jit(reverse_kl)(t, fled))
    for divergence in (forward_kl, jsd(0.3), jsd(0.9)):
        assert float(jax.jit(divergence)(t, fled)) > 0.5
        assert jax.jit(divergence.gradient)(t, fled)[2] > 0


def test_the_gradient_does_not_change_with_the_accumulation_split():
    # trl, verl, Soup: rows of very different lengths, every way to cut them in two.
    joined = batch([[1, 0, 0, 0], [1, 1, 1, 1], [0.1, 0, 0, 0]])
    logits = np.random.default_rng(5).normal(size=(B, L, V)).astype(np.float32)

    @jax.jit
    def window(logits, masks):
        def undivided(logits, mask):
            own = joined.student_batch
            kept = DiffusionTokenBatch(own.model_inputs, own.target_ids, own.loss_weights * mask)
            output = diffusion_opd_loss_fn(logits, DiffusionDistillationBatch(kept, joined.teacher_logits), itself)
            return output.primary_loss.unreduced_sum, output

        pieces = [jax.value_and_grad(undivided, has_aux=True)(logits, masks[i]) for i in range(2)]
        total = pieces[0][0][1].primary_loss.denominator + pieces[1][0][1].primary_loss.denominator
        return reduce_losses([p[0][1] for p in pieces])["loss"], (pieces[0][1] + pieces[1][1]) / total

    everything = np.stack([np.ones((B, 1)), np.zeros((B, 1))]).astype(np.float32)
    loss, gradient = window(logits, everything)
    for cut in range(1, 2 ** (B - 1)):
        first = np.float32([[cut >> row & 1] for row in range(B)])
        other_loss, other_gradient = window(logits, np.stack([first, 1 - first]))
        np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
        np.testing.assert_allclose(other_gradient, gradient, atol=1e-7)
