"""The commit rules against their sentences, written out slot by slot in numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.diffusion.commit import confidence_ranks, rule_index, slots_to_commit

ROWS, SLOTS = 4, 6
RULES = {"threshold": (0.5, 1.0), "static": (1.0, 2.0, 4.0, 6.0), "factor": (0.5, 1.0, 2.0), "prefix": (0.5, 1.0)}
COMMIT = jax.jit(slots_to_commit)


def commit(rule, value, confidences_BS, unresolved_BS, step):
    return COMMIT(jnp.int32(rule_index(rule)), jnp.float32(value), confidences_BS, unresolved_BS, jnp.int32(step))


# A coarse grid makes ties common.
GRID = st.sampled_from([0.0, 0.25, 0.5, 0.75, 0.9, 1.0])
BATCH = st.tuples(
    st.lists(st.lists(GRID, min_size=SLOTS, max_size=SLOTS), min_size=ROWS, max_size=ROWS),
    st.lists(st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS), min_size=ROWS, max_size=ROWS),
    st.integers(0, SLOTS - 1),
)


def by_sentence(rule, value, confidences, unresolved, step):
    slots = [i for i in range(SLOTS) if unresolved[i]]
    if not slots:
        return set()
    if rule == "prefix":
        run = []
        for i in slots:
            if confidences[i] < value:
                break
            run.append(i)
        return set(run) | {slots[0]}
    best_first = []
    while len(best_first) < len(slots):
        rest = [i for i in slots if i not in best_first]
        most = max(confidences[i] for i in rest)
        best_first.append(min(i for i in rest if confidences[i] == most))
    if rule == "threshold":
        return {i for i in slots if confidences[i] >= value} | {best_first[0]}
    if rule == "static":
        return set(best_first[: math.ceil(len(slots) / max(value - step, 1))])
    taken = []
    for rank, i in enumerate(best_first, start=1):
        if (rank + 1) * (1 - confidences[i]) >= value:
            break
        taken.append(i)
    return set(taken) | {best_first[0]}


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None, max_examples=60)
@given(batch=BATCH, choice=st.integers(0, 3))
def test_each_rule_commits_what_its_sentence_says(rule, batch, choice):
    confidences, unresolved, step = np.asarray(batch[0], np.float32), np.asarray(batch[1], np.bool_), batch[2]
    value = RULES[rule][choice % len(RULES[rule])]
    chosen_BS = commit(rule, value, confidences, unresolved, step)
    for row in range(ROWS):
        expected = by_sentence(rule, value, confidences[row].tolist(), unresolved[row], step)
        assert set(np.flatnonzero(chosen_BS[row]).tolist()) == expected


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_by_name_and_by_index_are_the_same(rule):
    confidences_BS = jnp.asarray(np.random.default_rng(0).random((ROWS, SLOTS)), jnp.float32)
    unresolved_BS = jnp.ones((ROWS, SLOTS), jnp.bool_)
    named = slots_to_commit(rule, 2.0, confidences_BS, unresolved_BS, 0)
    indexed = commit(rule, 2.0, confidences_BS, unresolved_BS, 0)
    np.testing.assert_array_equal(named, indexed)


def test_ties_go_to_the_smallest_position():
    confidences_BS = jnp.asarray([[0.5, 0.75, 0.75, 0.75]], jnp.float32)
    ranks_BS = confidence_ranks(confidences_BS, jnp.asarray([[True, True, False, True]]))
    assert ranks_BS.tolist()[0][:2] == [3, 1] and int(ranks_BS[0, 3]) == 2


def test_static_takes_exactly_its_number_of_steps_or_one_slot_at_a_time():
    confidences_BS = jnp.asarray(np.random.default_rng(1).random((1, 7)), jnp.float32)
    for steps, sizes in ((1, [7]), (2, [4, 3]), (3, [3, 2, 2]), (7, [1] * 7), (9, [1] * 7)):
        unresolved_BS, taken = jnp.ones((1, 7), jnp.bool_), []
        while unresolved_BS.any():
            chosen_BS = commit("static", steps, confidences_BS, unresolved_BS, len(taken))
            unresolved_BS &= ~chosen_BS
            taken.append(int(chosen_BS.sum()))
        assert taken == sizes


def test_factor_counts_ranks_from_one_as_fast_dllm_does():
    # Rank 2 passes when 3 (1 − c) < f: with f = 0.3, from c > 0.9.
    unresolved_BS = jnp.ones((1, 3), jnp.bool_)
    for second, expected in ((0.89, 1), (0.91, 2)):
        confidences_BS = jnp.asarray([[0.99, second, 0.0]], jnp.float32)
        assert int(commit("factor", 0.3, confidences_BS, unresolved_BS, 0).sum()) == expected


@pytest.mark.parametrize("rule", RULES)
def test_a_model_that_answers_nan_still_makes_progress(rule):
    confidences_BS = jnp.full((1, SLOTS), jnp.nan, jnp.float32)
    unresolved_BS = jnp.asarray([[False, True, True, False, True, True]])
    chosen_BS = commit(rule, 0.5, confidences_BS, unresolved_BS, 0)
    assert chosen_BS.any() and not (chosen_BS & ~unresolved_BS).any()
