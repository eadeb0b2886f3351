"""The loop's schedule against bounds and optima that are derived without it (benchmarks/yardsticks.py)."""

import importlib.util
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


yardsticks = load("yardsticks")
overlap = load("overlap")


@st.composite
def cases(draw, most_items: int = 5):
    lag, steps = draw(st.integers(0, 2)), draw(st.integers(1, 4))
    workers = draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    ticks = draw(st.tuples(*[st.integers(0, 9)] * 5))
    return yardsticks.Case(lag, steps, draw(st.integers(1, most_items)), *workers, *ticks)


def by_item(case, seed: int):
    """The case with other durations for every item of every stage."""

    def noisy(stage: str):
        return lambda step, item: random.Random(f"{seed} {stage} {step} {item}").randrange(10)

    return replace(case, **{stage: noisy(stage) for stage in ("generate", "score", "accumulate")})


@settings(max_examples=40, deadline=None)
@given(cases())
def test_with_constant_durations_every_window_closes_where_the_critical_path_ends(case):
    assert overlap.achieved(case) == yardsticks.critical_path(case)


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(0, 2**16))
def test_no_window_closes_sooner_than_the_bound(case, seed):
    for each in (case, by_item(case, seed)):
        assert all(loop >= least for loop, least in zip(overlap.achieved(each), yardsticks.bound(each), strict=True))


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(overlap.SMALL), st.integers(0, 2**16), st.integers(0, 11))
def test_neither_is_the_optimum_sooner_than_the_bound_nor_the_loop_sooner_than_the_optimum(shape, seed, which):
    case = by_item(overlap.small_cases(*shape)[which], seed)
    assert yardsticks.bound(case)[-1] <= yardsticks.optimum(case) <= overlap.achieved(case)[-1]


@pytest.mark.parametrize(("lag", "steps", "items"), overlap.SMALL)
def test_no_order_of_starting_work_is_better_than_the_loops(lag, steps, items):
    small = overlap.small_cases(lag, steps, items)
    assert [overlap.achieved(case)[-1] for case in small] == [yardsticks.optimum(case) for case in small]


def test_some_order_of_starting_work_is_worse_than_the_loops():
    case = yardsticks.Case(0, 1, 4, 1, 1, 2, 3, 2, 1, 1)
    ends = set(yardsticks.every_order(case))
    assert min(ends) == overlap.achieved(case)[-1] < max(ends)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("workers", [(1, 1), (8, 2)])
@pytest.mark.parametrize("durations", [(400, 20, 40), (80, 90, 10)])
def test_with_many_items_a_step_takes_what_its_slowest_stage_must(lag, workers, durations):
    case = overlap.make(lag, 64, workers, durations, 2)
    loop, in_turn = overlap.achieved(case)[-1], yardsticks.one_after_another(case) * case.steps
    assert loop <= 1.02 * yardsticks.bound(case)[-1]
    generate, score, accumulate = durations
    slowest = 64 * max(generate / workers[0], score / workers[1], accumulate)
    assert 2 * slowest <= loop < in_turn / 1.1


def test_lag_lets_the_slowest_stage_run_without_a_pause():
    """One trainer tick more than the writers need: at lag 0 each step waits for its first item, at lag 1 only the first."""
    durations, steps = (160, 40, 41), 20
    strict, lagging = (overlap.achieved(overlap.make(lag, 8, (4, 2), durations, steps)) for lag in (0, 1))
    training = 8 * 41 + 40
    assert strict == [step * (160 + 40 + training) for step in range(1, steps + 1)]
    assert lagging == [160 + 40 + step * training for step in range(1, steps + 1)]
