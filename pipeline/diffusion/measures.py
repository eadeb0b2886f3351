"""What is reported about a decoder: how many tokens a forward pass yields, how rows end, and accuracy at that speed."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from contracts.errors import MetricValueError
from pipeline.diffusion.decoded import Decoded


def tokens_per_forward(decoded: Decoded, *, commit_passes: bool) -> np.ndarray:
    """Tokens per forward pass (TPF) of each row: committed tokens through the stop / model forwards for that row.

    Args:
      decoded: a rollout.
      commit_passes: count the passes that only keep keys and values, too. Each counts as one pass of a block, also
        where it shares a forward with the next block's first step.

    Returns:
      float64 ``[B]``. Prefilling the prompt is not counted, unless its last logit decides the first token (`shifted`).
    """
    forwards_B = np.asarray(decoded.forwards_B, np.float64)
    if commit_passes:
        forwards_B = forwards_B + np.asarray(decoded.commit_passes_B)
    return np.asarray(decoded.length_B) / forwards_B


def decoding_statistics(decoded: Decoded) -> dict[str, tuple[float, float]]:
    """Name → (sum, weight), additive over batches; divide once, at the end.

    * ``tokens_per_forward``, ``tokens_per_forward_with_commit_passes``: Σ tokens through the stop / Σ forwards.
    * ``completion_length`` (through the stop), ``truncated`` (no stop), ``empty`` (the first token stops): means over rows.
    * ``log_prob``: at commit, mean over the tokens through the stop.
    """
    length_B, steps_BC = np.asarray(decoded.length_B), np.asarray(decoded.commit_step_BC)
    truncated_B = np.asarray(decoded.truncated_B)
    rows, tokens = float(len(length_B)), float(length_B.sum())
    forwards, commits = float(np.sum(decoded.forwards_B)), float(np.sum(decoded.commit_passes_B))
    through_stop_BC = np.arange(steps_BC.shape[1])[None, :] < length_B[:, None]
    log_prob = float(np.sum(np.asarray(decoded.log_prob_BC, np.float64), where=through_stop_BC))
    return {
        "tokens_per_forward": (tokens, forwards),
        "tokens_per_forward_with_commit_passes": (tokens, forwards + commits),
        "completion_length": (tokens, rows),
        "truncated": (float(truncated_B.sum()), rows),
        "empty": (float(np.sum((length_B == 1) & ~truncated_B)), rows),
        "log_prob": (log_prob, tokens),
    }


def accuracy_under_parallelism(
    tokens_per_forward: Sequence[float],
    accuracies: Sequence[float],
    best_accuracy: float,
    *,
    penalty: float = 3.0,
    tolerance: float = 5.0,
) -> float:
    """Accuracy under parallelism (AUP): the area under accuracy over TPF, discounted where accuracy falls.

    With the pairs (ρ_i, y_i) sorted by ρ, and only those kept with y_i ≥ y_1 − tolerance:

        AUP = ρ_1 y_1 + ½ Σ_{i≥2} (ρ_i − ρ_{i−1}) (y_i W(y_i) + y_{i−1} W(y_{i−1}))
        W(y) = min(exp(−penalty · (1 − y / y_max)), 1)

    A decoder that loses nothing as it goes faster has AUP = ρ_m y; one token per forward at accuracy y scores y.

    Args:
      tokens_per_forward: ρ > 0, one per setting of the decoder; any order, no two equal.
      accuracies: y in percent, [0, 100], of the same settings.
      best_accuracy: y_max > 0 in percent: the highest accuracy that any compared method reaches on the task.
      penalty: α ≥ 0.
      tolerance: percentage points below the slowest setting's accuracy from which a setting is left out.

    Returns:
      The score; comparable only between scores of one y_max.

    Raises:
      MetricValueError: no pairs, unequal lengths, equal ρ, or a number outside its domain.

    Source: Qian et al. 2026, d3LLM (arXiv:2601.07568), the definition of AUP.
    """
    if not tokens_per_forward or len(tokens_per_forward) != len(accuracies):
        raise MetricValueError(
            f"AUP needs pairs: got {len(tokens_per_forward)} tokens-per-forward and {len(accuracies)} accuracies"
        )
    pairs = sorted(zip(tokens_per_forward, accuracies, strict=True))
    if pairs[0][0] <= 0 or len({rho for rho, _ in pairs}) < len(pairs):
        raise MetricValueError(f"AUP needs distinct tokens-per-forward above 0; got {list(tokens_per_forward)}")
    if best_accuracy <= 0 or not all(0 <= y <= 100 for y in (*accuracies, best_accuracy)):
        raise MetricValueError(
            f"AUP takes accuracies in percent, [0, 100], and a best one above 0; got {list(accuracies)}, best "
            f"{best_accuracy}"
        )
    slowest = pairs[0][1]
    kept = [(rho, y) for rho, y in pairs if y >= slowest - tolerance]

    def weighted(y: float) -> float:
        return y * min(math.exp(-penalty * (1.0 - y / best_accuracy)), 1.0)

    area = kept[0][0] * kept[0][1]
    for (left, y_left), (right, y_right) in itertools.pairwise(kept):
        area += 0.5 * (right - left) * (weighted(y_right) + weighted(y_left))
    return area
