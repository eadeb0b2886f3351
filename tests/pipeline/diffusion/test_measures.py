"""Measures against hand-counted rollouts and a numerically integrated area."""

import numpy as np
import pytest

from contracts.errors import MetricValueError
from pipeline.diffusion.decoded import Decoded
from pipeline.diffusion.measures import accuracy_under_parallelism, decoding_statistics, tokens_per_forward

# Two blocks of two; a row through both, a row that stops at once, and a row that stops in its second block.
DECODED = Decoded(
    tokens_BL=np.asarray([[7, 1, 2, 3, 4], [7, 9, 0, 0, 0], [7, 1, 2, 9, 0]], np.int32),
    commit_step_BC=np.asarray([[0, 1, 0, 0], [0, -1, -1, -1], [0, 0, 0, -1]], np.int32),
    log_prob_BC=np.asarray([[-1, -2, -3, -4], [-0.5, 0, 0, 0], [-1, -1, -1, 0]], np.float32),
    length_B=np.asarray([4, 1, 3], np.int32),
    truncated_B=np.asarray([True, False, False]),
    forwards_B=np.asarray([3, 1, 2], np.int32),
    commit_passes_B=np.asarray([1, 0, 1], np.int32),
)


def test_tokens_per_forward_counts_through_the_stop():
    np.testing.assert_allclose(tokens_per_forward(DECODED, commit_passes=False), [4 / 3, 1, 3 / 2])
    np.testing.assert_allclose(tokens_per_forward(DECODED, commit_passes=True), [1, 1, 1])


def test_statistics_are_sums_and_weights_that_add_over_batches():
    assert decoding_statistics(DECODED) == {
        "tokens_per_forward": (8.0, 6.0),
        "tokens_per_forward_with_commit_passes": (8.0, 8.0),
        "completion_length": (8.0, 3.0),
        "truncated": (1.0, 3.0),
        "empty": (1.0, 3.0),
        "log_prob": (-13.5, 8.0),
    }


def test_a_token_after_the_stop_does_not_count():
    late = DECODED._replace(
        commit_step_BC=np.where(np.arange(4) == 1, 0, DECODED.commit_step_BC), log_prob_BC=DECODED.log_prob_BC - 1.0
    )
    assert decoding_statistics(late)["log_prob"] == (-21.5, 8.0)


def test_aup_is_the_area_under_the_discounted_accuracy():
    rho, y, best = [1.0, 2.0, 3.5], [80.0, 79.0, 76.0], 82.0
    discounted = [a * np.exp(-3 * (1 - a / best)) for a in y]
    area = np.trapezoid(discounted, rho) + rho[0] * y[0]
    assert accuracy_under_parallelism(rho, y, best) == pytest.approx(area, rel=1e-12)
    assert accuracy_under_parallelism(rho[::-1], y[::-1], best) == pytest.approx(area, rel=1e-12)


def test_aup_without_any_loss_is_parallelism_times_accuracy():
    assert accuracy_under_parallelism([1.0, 2.0, 4.0], [70.0, 70.0, 70.0], 70.0) == pytest.approx(280.0)
    assert accuracy_under_parallelism([1.0], [70.0], 90.0) == pytest.approx(70.0)


def test_aup_leaves_out_settings_more_than_five_points_below_the_slowest():
    kept = accuracy_under_parallelism([1.0, 2.0], [80.0, 75.0], 80.0)
    assert accuracy_under_parallelism([1.0, 2.0, 9.0], [80.0, 75.0, 74.9], 80.0) == kept


def test_aup_never_rewards_accuracy_above_the_best():
    assert accuracy_under_parallelism([1.0, 2.0], [80.0, 80.0], 70.0) == pytest.approx(160.0)


@pytest.mark.parametrize(
    ("rho", "y", "best", "says"),
    [
        ([], [], 80.0, "needs pairs"),
        ([1.0, 2.0], [80.0], 80.0, "needs pairs"),
        ([1.0, 1.0], [80.0, 70.0], 80.0, "distinct"),
        ([0.0, 1.0], [80.0, 70.0], 80.0, "above 0"),
        ([1.0], [101.0], 80.0, "percent"),
        ([1.0], [80.0], 0.0, "percent"),
    ],
)
def test_aup_refuses_what_it_cannot_score(rho, y, best, says):
    with pytest.raises(MetricValueError, match=says):
        accuracy_under_parallelism(rho, y, best)
