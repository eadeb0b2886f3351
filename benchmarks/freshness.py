"""What freshness is worth: the same run with rollouts of ever older weights.

    python benchmarks/freshness.py [--steps 400] [--seeds 0 1 2]

Recipe `split`, same steps and seeds, lag 0, 1, 2, 4, 16 and frozen rollouts, from the raw conversion and from a warm start.
Accuracy over all training prompts, decoded greedily at the recipe's τ and with one forward per block, at 1/4, 1/2 and all of
the steps. Everything runs in this process (the runner can't change the result). Prints and writes results/freshness.txt.
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("NPROC", "2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import yaml

from pipeline.build import StartingWeights, assemble, starting_weights
from pipeline.config import RunConfig, parse_config
from pipeline.evaluation import ONE_FORWARD_PER_BLOCK
from pipeline.groundwork import TRAIN, lay_groundwork
from pipeline.inline import InlineRuntime
from pipeline.job import Job
from pipeline.testing import ListRecorder

RECIPE = Path(__file__).parent.parent / "launch" / "recipes" / "split.yaml"
RESULT = Path(__file__).parent / "results" / "freshness.txt"
LAGS: tuple[int | str, ...] = (0, 1, 2, 4, 16, "frozen")


def configuration(seed: int, lag: int | str, steps: int) -> RunConfig:
    tree = yaml.safe_load(RECIPE.read_text())
    tree["run"] = {"name": "freshness", "seed": seed}
    tree["training"] |= {"steps": steps, "max_lag": 0 if lag == "frozen" else lag, "frozen": lag == "frozen"}
    tree["evaluation"] |= {"diversity_samples": 0}
    tree["runner"] = {"kind": "inline"}
    return parse_config(tree)


def study(config: RunConfig, weights: StartingWeights, folder: Path) -> list[tuple[float, float]]:
    """(accuracy at τ, accuracy with one forward per block) at 1/4, 1/2 and all of the steps."""
    preparation = assemble(lay_groundwork(config), weights, folder)
    runtime = InlineRuntime(preparation.specs, config)
    job = Job(preparation, runtime, ListRecorder())
    steps = config.training.steps
    figures: list[tuple[float, float]] = []

    def measure(version) -> None:
        if version.step in (steps // 4, steps // 2, steps):
            deployed = job.evaluator.accuracy(version, config.deployed_sampler.settings())
            single = job.evaluator.accuracy(version, ONE_FORWARD_PER_BLOCK)
            figures.append((deployed[TRAIN]["accuracy"], single[TRAIN]["accuracy"]))

    loop = job.loop(job.load(), after_step=measure)
    loop.run()
    runtime.close()
    return figures


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    chosen = options.parse_args()
    started = time.perf_counter()
    lines = [
        f"$ python {' '.join(sys.argv)}",
        f"recipe split, {chosen.steps} steps; per cell: accuracy at the recipe's τ / with one forward per block",
        "",
        f"{'start':<12}{'seed':>5}{'lag':>8}   {'1/4':>13}{'1/2':>15}{'all':>15}",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as place:
        for seed in chosen.seeds:
            ground = lay_groundwork(configuration(seed, 0, chosen.steps))
            warm = starting_weights(ground, lambda *_, **__: None)
            for start, weights in (("warm start", warm), ("conversion", replace(warm, student=warm.converted))):
                for lag in LAGS:
                    config = configuration(seed, lag, chosen.steps)
                    figures = study(config, weights, Path(place) / f"{seed}-{start}-{lag}")
                    cells = "".join(f"{deployed:>8.2f} /{single:>5.2f}" for deployed, single in figures)
                    lines.append(f"{start:<12}{seed:>5}{lag:>8}   {cells}")
                    print(lines[-1], flush=True)
                    RESULT.write_text("\n".join(lines) + "\n")
    lines.append(f"\n{time.perf_counter() - started:.0f} s")
    RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
