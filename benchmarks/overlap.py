"""How well the loop overlaps its stages: the real loop on fake workers in virtual time, against what is possible.

python benchmarks/overlap.py [--results benchmarks/results/overlap.txt]
"""

import argparse
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from yardsticks import Case, bound, critical_path, jittered, one_after_another, optimum

from contracts.freshness import FreshnessPolicy
from pipeline.loop import Loop
from pipeline.testing import RUN_ID, ListRecorder, fake_request, fake_version, fake_weights
from pipeline.virtual_time import fake_runtime

WORKERS = ((1, 1), (4, 1), (4, 2), (8, 2))
DURATIONS = {  # ticks to generate, score, accumulate
    "writing is slow": (400, 20, 40),
    "even": (160, 40, 40),
    "training is slow": (80, 20, 100),
    "scoring is slow": (80, 90, 10),
}
SMALL = ((0, 1, 4), (0, 2, 2), (1, 2, 2), (1, 4, 1), (2, 4, 1))  # lag, steps, items


def achieved(case: Case) -> list[int]:
    """Tick at which the real loop has published each version, from version 1 on."""
    policy = FreshnessPolicy(RUN_ID, case.lag)
    durations = {stage: getattr(case, stage) for stage in ("generate", "score", "accumulate", "update", "publish")}
    workers = {"rollout_workers": case.rollout_workers, "teacher_workers": case.teacher_workers}
    runtime = fake_runtime(policy, durations=durations, **workers)
    published: list[int] = []
    Loop(
        request=partial(fake_request, rows=1, items=case.items),
        policy=policy,
        runtime=runtime,
        recorder=ListRecorder(),
        version=fake_version(0, fake_weights()),
        steps=case.steps,
        micro_batches=case.items,
        deadline=math.inf,
        after_step=lambda version: published.append(runtime.waiter.ticks),
    ).run()
    return published


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
