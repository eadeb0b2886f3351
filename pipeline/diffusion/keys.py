"""Where every random draw of a rollout comes from: never from a worker, a batch slot or the clock.

    seed ▶ training step ▶ global stream index of the row  =  the row's key   (`row_keys`)
    seed ▶ 0 ▶ index among what is measured ▶ EVALUATION   =  likewise, of a row that is measured (`evaluation_keys`)
    row key ▶ purpose ▶ block ▶ denoising step             =  one draw's key  (`fold`)

The stream index is the row's place in the run's endless stream of prompts, not its id in the data: a small data set
repeats inside one batch, and its repetitions must be drawn independently.
"""

import enum

import jax
import numpy as np
from jaxtyping import Array, Int, Key, UInt32

from contracts.errors import BatchValueError


class Purpose(enum.IntEnum):
    """What a draw is for; two purposes never share a key."""

    PROPOSAL = 0
    """The masked slots of a block, at one denoising step."""
    SEED = 1
    """The clean first token of a block, in the shifted alignment."""
    STATE = 2
    """Which canvas of a rollout is trained on."""
    EVALUATION = 3
    """Samples that are measured, not trained on."""


def row_keys(seed: int, step: int, stream_indices_B: np.ndarray) -> Key[Array, "B"]:
    """One key per row.

    Args:
      seed: the run's, 0 ≤ seed < 2^64.
      step: training step, 0 ≤ step < 2^64.
      stream_indices_B: host integers ``[B]``, each 0 ≤ index < 2^64.

    Returns:
      Typed threefry keys ``[B]``.

    Raises:
      BatchValueError: a number is negative or not an integer.
    """
    words = {}
    for name, value in (("seed", seed), ("step", step), ("stream index", stream_indices_B)):
        words[name] = _words(name, value)
    return _row_keys(words["seed"], words["step"], words["stream index"])


def evaluation_keys(seed: int, indices_B: np.ndarray) -> Key[Array, "B"]:
    """One key per row that is measured and not trained on; never one of `row_keys`.

    Args:
      seed: the run's.
      indices_B: host integers ``[B]`` ≥ 0, one for each draw that is to be independent of the others.

    Raises:
      BatchValueError: as `row_keys`.
    """
    return fold(row_keys(seed, 0, indices_B), int(Purpose.EVALUATION))


def _words(name: str, value: int | np.ndarray) -> np.ndarray:
    # `jax.random.key` and `fold_in` keep only 32 bits, silently: both halves are folded.
    numbers = np.asarray(value)
    if not np.issubdtype(numbers.dtype, np.integer) or (numbers.size and numbers.min() < 0):
        raise BatchValueError(f"{name} must be a whole number in [0, 2^64); got {value!r}")
    numbers = numbers.astype(np.uint64)
    return np.stack([numbers >> np.uint64(32), numbers & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)


@jax.jit
def _row_keys(seed_2: UInt32[Array, "2"], step_2: UInt32[Array, "2"], index_B2: UInt32[Array, "B 2"]):
    def fold_both(key, words_2):
        return jax.random.fold_in(jax.random.fold_in(key, words_2[0]), words_2[1])

    key = fold_both(fold_both(jax.random.key(0, impl="threefry2x32"), seed_2), step_2)
    return jax.vmap(lambda words_2: fold_both(key, words_2))(index_B2)


def fold(keys_B: Key[Array, "B"], *numbers: int | Int[Array, ""]) -> Key[Array, "B"]:
    """Fold the same numbers, in order, into every row's key: ``fold(keys, Purpose.PROPOSAL, block, step)``."""
    for number in numbers:
        keys_B = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, number)
    return keys_B
