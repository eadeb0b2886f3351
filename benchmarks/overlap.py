"""How well the loop overlaps its stages: the real loop on fake workers in virtual time, against what is possible.

    python benchmarks/overlap.py [--results benchmarks/results/overlap.txt]

Three yardsticks, each derived without the loop:

* *bound*: no schedule of any kind can close its windows sooner, whatever each item takes.
* *path*: the critical path in index order, a recursion over items, exact for constant durations.
* *optimum*: the best of all orders in which rollouts and scores could be started, by trying them all (small cases).
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, permutations
from math import ceil
from pathlib import Path
from statistics import median

from contracts.freshness import FreshnessPolicy
from pipeline.loop import Loop
from pipeline.testing import RUN_ID, ListRecorder, fake_request, fake_version, fake_weights
from pipeline.virtual_time import fake_runtime

Duration = int | Callable[[int, int], int]
NEVER = 1e18


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

    def of_step(self, stage: str, step: int) -> list[int]:
        return [self.ticks(stage, step, item) for item in range(self.items)]

    @property
    def close(self) -> int:
        return self.update + self.publish


def achieved(case: Case) -> list[int]:
    """Tick at which the real loop has published each version, from version 1 on."""
    policy = FreshnessPolicy(RUN_ID, case.lag)
    stages = ("generate", "score", "accumulate", "update", "publish")
    runtime = fake_runtime(
        policy,
        rollout_workers=case.rollout_workers,
        teacher_workers=case.teacher_workers,
        durations={stage: getattr(case, stage) for stage in stages},
    )
    published: list[int] = []
    Loop(
        request=partial(fake_request, rows=1, items=case.items),
        policy=policy,
        runtime=runtime,
        recorder=ListRecorder(),
        version=fake_version(0, fake_weights()),
        steps=case.steps,
        micro_batches=case.items,
        deadline=NEVER,
        after_step=lambda version: published.append(runtime.waiter.ticks),
    ).run()
    return published


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
        max(Fraction(total, workers), Fraction(ceil(number / workers) * durations[0]))
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
        ceil(case.items / case.rollout_workers) * case.generate
        + ceil(case.items / case.teacher_workers) * case.score
        + case.items * case.accumulate
        + case.close
    )


def optimum(case: Case) -> int:
    """Earliest tick at which the last version can be published, over every order of starting rollouts and scores.

    On identical workers no schedule beats the one that starts its items in the same order, each as soon as a worker is
    free and its input is there; so trying all orders tries all schedules. Items are added in index order.
    """
    places = [(step, item) for step in range(case.steps) for item in range(case.items)]
    ends = (end for end in _every_order(case, places) if end is not None)
    return min(ends)


def _every_order(case: Case, places: list[tuple[int, int]]) -> Iterator[int | None]:
    for rollouts in permutations(places):
        for scores in permutations(places):
            yield _end_of(case, rollouts, scores)


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
            return max(1, round(mean * 2.718281828459045**draw))

        return ticks

    return replace(case, **{stage: noisy(stage) for stage in ("generate", "score", "accumulate")})


WORKERS = ((1, 1), (4, 1), (4, 2), (8, 2))
DURATIONS = {  # ticks to generate, score, accumulate
    "writing is slow": (400, 20, 40),
    "even": (160, 40, 40),
    "training is slow": (80, 20, 100),
    "scoring is slow": (80, 90, 10),
}
SMALL = ((0, 1, 4), (0, 2, 2), (1, 2, 2), (1, 4, 1), (2, 4, 1))  # lag, steps, items


def make(lag: int, items: int, workers: tuple[int, int], durations: tuple[int, int, int], steps: int) -> Case:
    return Case(lag, steps, items, *workers, *durations, update=20, publish=20)


def small_cases(lag: int, steps: int, items: int) -> list[Case]:
    """Cases of one shape whose orders can all be tried."""
    return [
        Case(lag, steps, items, *workers, *durations, update=1, publish=1)
        for workers in ((1, 1), (2, 1), (2, 2))
        for durations in ((4, 1, 2), (2, 2, 2), (1, 3, 1), (1, 1, 5))
    ]


def overlap_table(items: int, steps: int) -> list[str]:
    side = f"{'loop':>8}{'path':>9}{'bound':>9}{'loop/bound':>11}{'gain':>7} "
    lines = [
        "",
        f"{items} items a step, {steps} steps, update 20, publish 20; ticks a step",
        f"{'':<34}|{'':>9}|{'lag 0':^45}|{'lag 1':^45}|",
        f"{'':<17}{'g / s / a':<11}{'workers':<6}|{'in turn':>8} |{side}|{side}|",
    ]
    for name, durations in DURATIONS.items():
        for workers in WORKERS:
            in_turn = one_after_another(make(0, items, workers, durations, steps))
            line = f"{name:<17}{'/'.join(map(str, durations)):<11}{workers[0]} + {workers[1]} |{in_turn:>8} |"
            for lag in (0, 1):
                case = make(lag, items, workers, durations, steps)
                loop, path, least = achieved(case)[-1], critical_path(case)[-1], bound(case)[-1]
                line += f"{loop / steps:8.1f}{path / steps:9.1f}{float(least) / steps:9.1f}{float(loop / least):11.4f}"
                line += f"{in_turn * steps / loop:6.2f}x |"
            lines.append(line)
    return lines


def optimum_table() -> list[str]:
    lines = [
        "",
        "Small runs against the best of all orders of starting rollouts and scores, which knows all durations beforehand",
    ]
    lines.append(
        f"{'lag':>3}{'steps':>7}{'items':>7} | constant durations: loop = best | noisy: loop / best, median and most"
    )
    for shape in SMALL:
        cases = small_cases(*shape)
        equal = sum(achieved(case)[-1] == optimum(case) for case in cases)
        noisy = [jittered(replace(case, generate=40, score=20, accumulate=20), seed) for seed, case in enumerate(cases)]
        ratios = [achieved(case)[-1] / optimum(case) for case in noisy]
        lag, steps, items = shape
        lines.append(
            f"{lag:>3}{steps:>7}{items:>7} |{equal:>21} of {len(cases)}    |{median(ratios):>22.4f}{max(ratios):>9.4f}"
        )
    return lines


def jitter_table() -> list[str]:
    lines = ["", "Durations with log-normal noise, sigma 0.3: loop / bound over 8 seeds (8 items a step, 8 steps)"]
    lines.append(f"{'':<28}workers| lag 0: median   most | lag 1: median   most |")
    for name, durations in DURATIONS.items():
        for workers in WORKERS:
            line = f"{name:<17}{'/'.join(map(str, durations)):<11}{workers[0]} + {workers[1]}  |"
            for lag in (0, 1):
                cases = [jittered(make(lag, 8, workers, durations, 8), seed) for seed in range(8)]
                ratios = [float(achieved(case)[-1] / bound(case)[-1]) for case in cases]
                line += f"{median(ratios):>14.3f}{max(ratios):>7.3f} |"
            lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "overlap.txt")
    results = parser.parse_args().results
    lines = ["$ python " + " ".join(["benchmarks/overlap.py", *sys.argv[1:]])]
    lines += [
        "The loop of pipeline/loop.py in virtual time. g / s / a: ticks to generate, score and accumulate one item.",
        "workers: rollout + teacher. in turn: all rollouts, then all scores, then training. path: critical path in index",
        "order. bound: no schedule of any kind is faster. gain: in turn / loop.",
    ]
    for table in (partial(overlap_table, 8, 24), partial(overlap_table, 64, 6), optimum_table, jitter_table):
        lines += table()
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    print(text, end="")
    results.parent.mkdir(exist_ok=True)
    results.write_text(text)


if __name__ == "__main__":
    main()
