"""What a schedule of the loop could achieve, derived without the loop; ticks as in pipeline/virtual_time.py.

* *bound*: no schedule of any kind can close its windows sooner, whatever each item takes.
* *path*: the critical path in index order, a recursion over items, exact for constant durations.
* *optimum*: the best of all orders in which rollouts and scores could be started, by trying them all (small cases).
* *one after another*: no overlap at all.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, permutations

Duration = int | Callable[[int, int], int]


@dataclass(frozen=True)
class Case:
    """A run in virtual time.

    Attributes:
      lag, steps, items: the schedule; items are micro-batches per step.
      rollout_workers, teacher_workers: how many there are; there is one trainer.
      generate, score, accumulate: ticks per item, or functions of (step, item).
      update, publish: ticks per step.
    """

    lag: int
    steps: int
    items: int
    rollout_workers: int
    teacher_workers: int
    generate: Duration
    score: Duration
    accumulate: Duration
    update: int
    publish: int

    def writer(self, step: int) -> int:
        return max(0, step - self.lag)

    def ticks(self, stage: str, step: int, item: int) -> int:
        duration = getattr(self, stage)
        return duration(step, item) if callable(duration) else duration

    @property
    def close(self) -> int:
        return self.update + self.publish


def bound(case: Case) -> list[Fraction]:
    """Lower bound on the tick at which each version can be published, from version 1 on, for any schedule.

    Of the items of steps ``first..step``, none is written before version w(first) is published, and they are added in
    index order. So the j-th addition waits until j of them are written and scored, and all later additions follow it:

        published[step + 1] ≥ published[w(first)] + least ticks to write and score j + Σ additions from the j-th + closes
    """
    published = [Fraction(0)]
    for step in range(case.steps):
        candidates = []
        for first in range(step + 1):
            places = [(each, item) for each in range(first, step + 1) for item in range(case.items)]
            generate, score = (sorted(case.ticks(stage, *place) for place in places) for stage in ("generate", "score"))
            written = _least(generate, case.rollout_workers)
            scored = _least(score, case.teacher_workers)
            rest = 0
            for number in range(len(places) - 1, -1, -1):
                place = places[number]
                rest += case.ticks("accumulate", *place) + (case.close if place[1] == case.items - 1 else 0)
                ready = max(written[number] + score[0], generate[0] + scored[number])
                candidates.append(published[case.writer(first)] + ready + rest)
                own = case.ticks("generate", *place) + case.ticks("score", *place)
                candidates.append(published[case.writer(place[0])] + own + rest)
        published.append(max(candidates))
    return published[1:]


def _least(durations: list[int], workers: int) -> list[Fraction]:
    """For each j from 1 on, ticks that any j of these (in rising order) take that many workers at least."""
    totals = accumulate(durations)
    return [
        max(Fraction(total, workers), Fraction(math.ceil(number / workers) * durations[0]))
        for number, total in enumerate(totals, 1)
    ]


def critical_path(case: Case) -> list[int]:
    """Tick at which each version is published when durations are constant and every stage goes by index."""
    published = [0]
    written: list[int] = []
    scored: list[int] = []
    added = 0
    for step in range(case.steps):
        for item in range(case.items):
            number = step * case.items + item
            free = written[number - case.rollout_workers] if number >= case.rollout_workers else 0
            written.append(max(free, published[case.writer(step)]) + case.ticks("generate", step, item))
            free = scored[number - case.teacher_workers] if number >= case.teacher_workers else 0
            scored.append(max(free, written[number]) + case.ticks("score", step, item))
            added = max(added, scored[number]) + case.ticks("accumulate", step, item)
        added += case.close
        published.append(added)
    return published[1:]


def one_after_another(case: Case) -> int:
    """Ticks of a step that writes everything, then scores everything, then trains."""
    assert isinstance(case.generate, int) and isinstance(case.score, int) and isinstance(case.accumulate, int)
    return (
        math.ceil(case.items / case.rollout_workers) * case.generate
        + math.ceil(case.items / case.teacher_workers) * case.score
        + case.items * case.accumulate
        + case.close
    )


def optimum(case: Case) -> int:
    """Earliest tick at which the last version can be published, over every order of starting rollouts and scores.

    On identical workers no schedule beats the one that starts its items in the same order, each as soon as a worker is
    free and its input is there; so trying all orders tries all schedules. Items are added in index order.
    """
    return min(every_order(case))


def every_order(case: Case) -> Iterator[int]:
    """The tick at which the last version is published, for each order of rollouts and of scores."""
    places = [(step, item) for step in range(case.steps) for item in range(case.items)]
    ends = (_end_of(case, rollouts, scores) for rollouts in permutations(places) for scores in permutations(places))
    return (end for end in ends if end is not None)


def _end_of(case: Case, rollouts: tuple, scores: tuple) -> int | None:
    """When the last version is published if workers take items in these orders; None if they wait for each other."""
    written: dict[tuple[int, int], int] = {}
    scored: dict[tuple[int, int], int] = {}
    published, added, trained = [0], 0, 0
    writers, teachers = [0] * case.rollout_workers, [0] * case.teacher_workers
    total = len(rollouts)
    while trained < total:
        before = len(written), len(scored), trained
        while len(written) < total and case.writer(rollouts[len(written)][0]) < len(published):
            place = rollouts[len(written)]
            free = writers.index(min(writers))
            writers[free] = max(writers[free], published[case.writer(place[0])]) + case.ticks("generate", *place)
            written[place] = writers[free]
        while len(scored) < total and scores[len(scored)] in written:
            place = scores[len(scored)]
            free = teachers.index(min(teachers))
            teachers[free] = max(teachers[free], written[place]) + case.ticks("score", *place)
            scored[place] = teachers[free]
        while trained < total and divmod(trained, case.items) in scored:
            place = divmod(trained, case.items)
            added = max(added, scored[place]) + case.ticks("accumulate", *place)
            trained += 1
            if trained % case.items == 0:
                added += case.close
                published.append(added)
        if before == (len(written), len(scored), trained):
            return None
    return added


def jittered(case: Case, seed: int, sigma: float = 0.3) -> Case:
    """The same case with each item's durations multiplied by log-normal noise, in whole ticks."""

    def noisy(stage: str):
        mean = getattr(case, stage)

        def ticks(step: int, item: int) -> int:
            draw = random.Random(f"{seed} {stage} {step} {item}").gauss(0.0, sigma)
            return max(1, round(mean * math.exp(draw)))

        return ticks

    return replace(case, **{stage: noisy(stage) for stage in ("generate", "score", "accumulate")})
