"""`limbeck doctor`: is this machine fit for a run? Each finding is one line; then two steps of a tiny run prove it."""

import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from launch.outcome import FAILED, OK, Outcome
from launch.shadow import installed_twice, shadowed_in_workers

GIB = 1024**3
LEAST_SHARED = GIB
DEVICE_SECONDS = 120
TINY = {
    "teacher.steps": 2,
    "teacher.rows": 8,
    "warm_start.steps": 2,
    "warm_start.rows": 8,
    "training.steps": 2,
    "training.rows": 4,
    "evaluation.rows": 8,
    "evaluation.batch": 8,
    "evaluation.diversity_samples": 0,
}
"""The recipe `addition`, made as small as it goes."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. A ``note`` is worth knowing, a ``problem`` will end a run."""

    name: str
    state: Literal["fine", "note", "problem"]
    text: str


def examine(console: Console, runner: Literal["inline", "ray"], address: str | None) -> int:
    """Print every finding, then run two steps; returns the exit code."""
    healthy = True
    for finding in findings():
        _print(console, finding)
        healthy &= finding.state != "problem"
    if not healthy:
        console.print("\nNo run would work here yet: mend what is marked ✗, then ask again.")
        return FAILED
    _two_steps(console, runner, address)
    console.print("\nThis machine is fit: limbeck run split")
    return OK


def findings() -> Iterator[Finding]:
    """Look at one thing after another."""
    yield _python()
    yield from _packages()
    yield _devices()
    yield _ray()
    yield _memory()
    yield _cores()


def _python() -> Finding:
    state = "fine" if sys.version_info >= (3, 11) else "problem"
    return Finding("Python", state, f"{platform.python_version()}, {sys.prefix}")


def _packages() -> Iterator[Finding]:
    problems = installed_twice() + shadowed_in_workers(Path.cwd())
    for problem in problems:
        yield Finding("packages", "problem", problem)
    if not problems:
        yield Finding("packages", "fine", "contracts, pipeline, actors, launch are limbeck's own")


def _devices() -> Finding:
    """What JAX sees when nobody tells it where to look; in a process of its own, which holds nothing afterwards."""
    program = "import json, jax; print(json.dumps([jax.__version__, [d.device_kind for d in jax.devices()]]))"
    try:
        asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEVICE_SECONDS)
    except subprocess.TimeoutExpired:
        return Finding(
            "JAX",
            "problem",
            f"its devices did not answer within {DEVICE_SECONDS} s: another process may hold the accelerator, or its "
            "driver hangs; JAX_PLATFORMS=cpu does without",
        )
    if asked.returncode:
        return Finding("JAX", "problem", asked.stderr.strip().splitlines()[-1])
    number, kinds = json.loads(asked.stdout.strip().splitlines()[-1])
    counted = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
    return Finding("JAX", "fine", f"{number}, {counted}")


def _ray() -> Finding:
    found = version("ray")
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    if mode != "token":
        return Finding("Ray", "note", f"{found}, auth mode {mode}: whoever reaches its ports can run code")
    held = (
        "a token is there" if token.exists() or "RAY_AUTH_TOKEN" in os.environ else "a token is made at the first start"
    )
    stale = os.environ.get("RAY_ADDRESS")
    if stale:
        return Finding(
            "Ray", "note", f"{found}, auth mode token ({held}); RAY_ADDRESS={stale} is not used, --ray-address is"
        )
    return Finding("Ray", "fine", f"{found}, auth mode token ({held})")


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    store = f"{total / GIB:.1f} GiB, of which Ray takes up to 30 % for its object store"
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return Finding("memory", "note", f"{store}; no /dev/shm here")
    free = shutil.disk_usage(shared).free
    if free < LEAST_SHARED:
        return Finding(
            "memory",
            "note",
            f"{store}; /dev/shm has {free / GIB:.2f} GiB free: Ray will keep objects on disk, slowly. In a container, "
            "start it with --shm-size=2g",
        )
    return Finding("memory", "fine", f"{store}; /dev/shm has {free / GIB:.1f} GiB free")


def _cores() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    state = "fine" if usable >= 2 else "note"
    advice = "" if usable >= 2 else "; two are better: roles will wait for each other"
    return Finding("cores", state, f"{usable} usable{advice}")


def _two_steps(console: Console, runner: Literal["inline", "ray"], address: str | None) -> None:
    """The tiny run, in a folder that is thrown away unless it failed."""
    from launch.overrides import apply_overrides
    from launch.recipes import find
    from launch.run import run
    from pipeline.config import parse_config

    scratch = Path(tempfile.mkdtemp(prefix="limbeck-doctor-"))
    chosen = {**TINY, "runner.kind": runner, "run.name": "doctor", "run.folder": str(scratch)}
    if address is not None:
        chosen["runner.address"] = address
    config = parse_config(apply_overrides(find("addition").tree, chosen))
    with console.status(f"two steps of a tiny run, {runner}"), Outcome(Console(stderr=True)) as outcome:
        summary = run(config, outcome, Console(file=io.StringIO()))
    shutil.rmtree(scratch)
    seconds, weights = summary["seconds"]["total"], summary["weights_fingerprint"]
    _print(console, Finding("two steps", "fine", f"{runner}, {seconds:.0f} s, weights {weights}"))


def _print(console: Console, finding: Finding) -> None:
    mark = {"fine": Text("✓", "green"), "note": Text("!", "yellow"), "problem": Text("✗", "bold red")}[finding.state]
    console.print(
        mark.append(f" {finding.name:<10}", "default bold").append(finding.text, "default not bold"), soft_wrap=True
    )
