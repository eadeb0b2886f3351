"""The demo on several seeds, each as `make demo` runs it, and once more with what the first run left in its cache.

    python benchmarks/demo.py [--recipe split] [--seeds 0 1 2]

Starts from an empty cache: nothing compiled, no teacher. Prints and writes results/demo-RECIPE.txt.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
FIGURES = {
    "teacher": "teacher_accuracy",
    "before": "student_accuracy_before",
    "warm": "student_accuracy_warm_start",
    "after": "student_accuracy_after",
    "tok/fwd": "tokens_per_forward",
    "1 fwd": "accuracy_one_forward_per_block",
}


def run(recipe: str, seed: int, place: Path, name: str) -> tuple[dict, float]:
    limbeck = Path(sys.executable).with_name("limbeck")
    command = [limbeck, "run", recipe, "--run.seed", str(seed), "--run.name", name]
    started = time.perf_counter()
    subprocess.run(
        [*command, "--run.folder", str(place), "--run.cache", str(place / "cache")],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - started
    return json.loads((place / name / "summary.json").read_text()), seconds


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--recipe", default="split")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    chosen = options.parse_args()
    lines = [
        f"$ python {' '.join(sys.argv)}",
        f"recipe {chosen.recipe} on a one-node Ray; accuracies over all training prompts; seconds with everything",
        "",
        f"{'seed':>4}" + "".join(f"{name:>9}" for name in FIGURES) + f"{'held out':>10}{'distinct':>10}{'seconds':>9}",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as place:
        for seed, again in [*((seed, False) for seed in chosen.seeds), (chosen.seeds[0], True)]:
            summary, seconds = run(chosen.recipe, seed, Path(place), f"seed-{seed}{'-again' if again else ''}")
            cells = "".join(f"{summary[key]:>9.3f}" for key in FIGURES.values())
            held_out = summary["student_accuracy_held_out"]["held_out"]
            distinct = summary["distinct_right_answers"]["student"]
            note = "  the same again: teacher and compiled programs from the cache" if again else ""
            lines.append(f"{seed:>4}{cells}{held_out:>10.2f}{distinct:>10.1f}{seconds:>9.0f}{note}")
            print(lines[-1], flush=True)
            (RESULTS / f"demo-{chosen.recipe}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
