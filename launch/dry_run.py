"""`limbeck run --dry-run`: everything that can be checked is checked, and what would happen is said."""

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table

from launch.folder import RunFolder, dump
from launch.report import rule_label
from pipeline.config import RoleSettings, RunConfig


def print_plan(console: Console, config: RunConfig, ground: Any) -> None:
    """Print the resolved settings and the plan of a run that has been checked.

    Args:
      config: the settings.
      ground: the `Groundwork` of the run.
    """
    if console.is_terminal:
        console.print(Syntax(dump(config), "yaml", theme="ansi_dark", background_color="default"))
    else:
        console.print(dump(config), markup=False, highlight=False, soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _plan(config, ground):
        table.add_row(name, value)
    console.print(Padding(table, (1, 0)), highlight=False)
    console.print("Every check passed. Nothing was started or written.")


def _plan(config: RunConfig, ground: Any):
    training, runner = config.training, config.runner
    rows = training.steps * training.micro_batches * training.rows
    counts = ", ".join(f"{len(prompts)} {split}" for split, prompts in ground.splits.items())
    yield "run", f"{RunFolder.of(config).root}, seed {config.run.seed}, config {config.digest(ground.source.digest)}"
    yield "prompts", f"{counts}; up to {config.task.prompt_length} tokens"
    yield "ends with", f"token {', '.join(map(str, ground.stop_ids))}, or after {config.task.completion_length} tokens"
    yield "teacher", _teacher(config, ground)
    yield (
        "student",
        f"blocks of {config.diffusion.block_size}, {config.diffusion.alignment}, mask id {ground.layout.mask_id}",
    )
    if config.warm_start.steps:
        yield "warm start", f"{config.warm_start.steps} steps of {config.warm_start.rows} rows"
    lag = "frozen rollouts" if training.frozen else f"max lag {training.max_lag}"
    steps = f"{training.steps} steps of {training.micro_batches} × {training.rows} rows"
    epochs = f"{rows:,} rows, {rows / len(ground.source):.1f} epochs"
    yield "on-policy", f"{steps} at {rule_label(config.rollout)}, {lag}; {epochs}"
    yield "evaluation", f"{config.evaluation.rows} rows a split at {rule_label(config.deployed_sampler)}"
    where = runner.address or ("a Ray of its own" if runner.kind == "ray" else "this process")
    yield "runner", f"{runner.kind}, {where}, {runner.visible_cores} visible cores a process"
    for role in ("rollout", "teacher", "trainer"):
        yield f"  {role}", _workers(getattr(runner, role), runner.kind)


def _teacher(config: RunConfig, ground: Any) -> str:
    shape = f"{ground.teacher.layers} layers of width {ground.teacher.width}, vocabulary {ground.teacher.vocab_size}"
    if config.model.source != "fresh":
        return f"{shape}, from {config.model.path}"
    return f"{shape}, trained for {config.teacher.steps} steps unless cached"


def _workers(role: RoleSettings, kind: str) -> str:
    if kind == "inline":
        return f"{role.count}"
    gpus = f", {role.num_gpus:g} GPUs" if role.num_gpus else ""
    return f"{role.count} × {role.num_cpus:g} CPUs{gpus}, {role.platform}"
