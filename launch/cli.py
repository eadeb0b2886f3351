"""`limbeck`: the command line.

Nothing heavy is imported here: `limbeck --help` answers at once, and the environment of a run is decided before JAX and
Ray are imported by what the commands call.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from launch.shadow import shadowed_here

if TYPE_CHECKING:
    import rich.console

    import launch.outcome
    import pipeline.config


Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
PIPED_WIDTH = 120
Overrides = dict[str, str]


def _text(metavar: str):
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class Run:
    """Distil a student on-policy: a recipe, or a config file of your own."""

    recipe: Annotated[tyro.conf.Positional[str | None], _text("RECIPE")] = None
    """One that ships with limbeck; see `limbeck recipes`. Change any setting of it by its dotted path, such as
    --training.steps 20; `limbeck recipes NAME` prints them all."""
    config: Annotated[str | None, _text("FILE")] = None
    """A YAML file of settings, instead of a recipe."""
    resume: Flag = False
    """Continue the run in its folder from its newest checkpoint."""
    overwrite: Flag = False
    """Begin anew in a run folder that exists."""
    runner: Annotated[Literal["inline", "ray"] | None, _text("{inline,ray}")] = None
    """inline: everything in this process. ray: actors, the default."""
    ray_address: Annotated[str | None, _text("ADDRESS")] = None
    """A running Ray cluster to use; without it one is started here for the run."""
    dry_run: Flag = False
    """Check everything, print the resolved settings and the plan, start nothing."""


@dataclass(frozen=True)
class Recipes:
    """List the recipes that ship with limbeck, or print one with every setting."""

    name: Annotated[tyro.conf.Positional[str | None], _text("NAME")] = None
    """The recipe to print."""


@dataclass(frozen=True)
class Doctor:
    """Look at this machine: Python, JAX, Ray, memory, shadowed packages; then two steps of a tiny run."""

    runner: Annotated[Literal["inline", "ray"], _text("{inline,ray}")] = "ray"
    """Where the two steps run; ray by default."""
    ray_address: Annotated[str | None, _text("ADDRESS")] = None
    """A running Ray cluster to look at."""


@dataclass(frozen=True)
class Eval:
    """Measure the student of a run again, also with other evaluation settings."""

    run: Annotated[tyro.conf.Positional[str], _text("RUN")]
    """A run's folder, or its name in runs/. Settings by dotted path, such as --evaluation.sampler.value 0.5, apply."""


@dataclass(frozen=True)
class Generate:
    """Decode with the student of a run, block by block, as it happens."""

    run: Annotated[tyro.conf.Positional[str], _text("RUN")]
    """A run's folder, or its name in runs/. Settings by dotted path, such as --evaluation.sampler.value 0.5, apply."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, _text("TEXT")]
    """What to complete; may be given several times."""
    delay: Annotated[float, _text("SECONDS")] = 0.15
    """How long each denoising step stays on the screen (0.15)."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; leaves with its exit code: 0, 1 failed, 2 input that cannot be used, 130 interrupted."""
    if foreign := shadowed_here():
        print("limbeck: " + "\n".join(foreign), file=sys.stderr)
        raise SystemExit(2)
    from rich.console import Console

    from launch.outcome import Outcome
    from launch.overrides import split_overrides

    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    with Outcome(Console(stderr=True)) as outcome:
        others, overrides = split_overrides(sys.argv[1:] if arguments is None else list(arguments))
        command = tyro.cli(
            _COMMANDS,
            prog="limbeck",
            description="On-policy distillation of a causal language model into a block-diffusion model, on Ray. "
            "Begin with `limbeck run split`.",
            args=others,
        )
        _RUN[type(command)](command, overrides, console, outcome)


def _run(
    command: Run, overrides: Overrides, console: "rich.console.Console", outcome: "launch.outcome.Outcome"
) -> None:
    from launch.run import check_address, check_input, run

    config = resolve(command, overrides)
    if command.dry_run:
        from launch.dry_run import print_plan
        from launch.folder import RunFolder

        folder = RunFolder.of(config)
        ground = check_input(config, folder, resume=command.resume, overwrite=command.overwrite)
        check_address(config)
        print_plan(console, config, ground)
        return
    run(config, outcome, console, resume=command.resume, overwrite=command.overwrite)


def resolve(command: Run, overrides: Overrides) -> "pipeline.config.RunConfig":
    """The settings a command line asks for: the recipe or file, then the flags, then the dotted overrides.

    Raises:
      ConfigError: no recipe or file, two of them, or every problem of the settings by dotted path.
    """
    from contracts.errors import ConfigError
    from launch.overrides import apply_overrides
    from launch.recipes import find, load
    from pipeline.config import parse_config

    if (command.recipe is None) == (command.config is None):
        given = "neither" if command.recipe is None else "both"
        raise ConfigError(f"limbeck run takes a recipe or --config FILE; {given} was given. See `limbeck recipes`")
    recipe = find(command.recipe) if command.recipe is not None else load(str(command.config))
    flags = {"runner.kind": command.runner, "runner.address": command.ray_address}
    given_flags = {path: value for path, value in flags.items() if value is not None}
    if twice := given_flags.keys() & overrides.keys():
        raise ConfigError(
            f"{', '.join(sorted(twice))} is given twice, by its flag and by its dotted path; give it once"
        )
    return parse_config(apply_overrides(recipe.tree, {**given_flags, **overrides}))


def _recipes(
    command: Recipes, overrides: Overrides, console: "rich.console.Console", outcome: "launch.outcome.Outcome"
) -> None:
    from launch.listing import print_recipe, print_recipes

    if command.name is None:
        _no_overrides(overrides, "recipes without a NAME")
        print_recipes(console)
    else:
        print_recipe(console, command.name, overrides)


def _doctor(
    command: Doctor, overrides: Overrides, console: "rich.console.Console", outcome: "launch.outcome.Outcome"
) -> None:
    from launch.doctor import examine

    _no_overrides(overrides, "doctor")
    raise SystemExit(examine(console, command.runner, command.ray_address))


def _eval(
    command: Eval, overrides: Overrides, console: "rich.console.Console", outcome: "launch.outcome.Outcome"
) -> None:
    from launch.evaluate import evaluate

    evaluate(console, command.run, overrides)


def _generate(
    command: Generate, overrides: Overrides, console: "rich.console.Console", outcome: "launch.outcome.Outcome"
) -> None:
    from launch.generate import generate

    generate(console, command.run, command.prompt, overrides, delay=command.delay)


def _no_overrides(overrides: Overrides, command: str) -> None:
    from contracts.errors import ConfigError

    if overrides:
        raise ConfigError(f"limbeck {command} takes no settings; got {', '.join(f'--{path}' for path in overrides)}")


_RUN: dict[type, Callable[..., None]] = {
    Run: _run,
    Recipes: _recipes,
    Doctor: _doctor,
    Eval: _eval,
    Generate: _generate,
}
_COMMANDS = (
    Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Recipes, tyro.conf.subcommand("recipes")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Eval, tyro.conf.subcommand("eval")]
    | Annotated[Generate, tyro.conf.subcommand("generate")]
)

if __name__ == "__main__":
    main()
