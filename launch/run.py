"""The job: a validated config becomes a run folder, a runtime, a trained student and a summary.

config ──▶ environment ──▶ groundwork ──▶ Ray started ──▶ prepare ──▶ workers ──▶ run_job ──▶ summary.json
           before JAX      all checks,    or joined       teacher,    in here,    measure,    and the table
                           none written                   warm start  or on Ray   loop, measure
"""

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rich.console import Console

from contracts.errors import ConfigError
from contracts.roles import Recorder, Runtime
from launch import environment
from launch.display import display
from launch.folder import RunFolder
from launch.outcome import Outcome
from launch.readings import Readings
from launch.recording import FileRecorder, Recorders, write_summary
from launch.report import print_report
from launch.shadow import installed_twice, shadowed_in_workers
from pipeline.config import RunConfig


@dataclass(frozen=True)
class Parts:
    """What a run is made of; fakes take their places in tests.

    Attributes:
      check: (config) → groundwork; raises on input that cannot be used; computes and writes nothing.
      session: (config) → what the runtime needs running; started first, since it is what may not be there.
      prepare: (groundwork, run folder, progress, resume=) → teacher, student and worker specs.
      runtime: (specs, config, recorder, session) → where the workers live.
      job: (preparation, runtime, recorder, run folder, resume=) → summary.
    """

    check: Callable[..., Any]
    session: Callable[..., "Session"]
    prepare: Callable[..., Any]
    runtime: Callable[..., Runtime]
    job: Callable[..., Mapping[str, Any]]


@runtime_checkable
class Session(Protocol):
    """Something that was started, or found running, and is let go of at the end."""

    def close(self) -> None: ...


def real_parts(config: RunConfig) -> Parts:
    """The pipeline itself, and the runtime that the config names."""
    from pipeline.build import prepare
    from pipeline.groundwork import lay_groundwork

    if config.runner.kind == "ray":
        return Parts(lay_groundwork, _ray_session, prepare, _ray, _job)
    return Parts(lay_groundwork, _no_session, prepare, _inline, _job)


def run(
    config: RunConfig,
    outcome: Outcome,
    console: Console,
    *,
    resume: bool = False,
    overwrite: bool = False,
    parts: Callable[[RunConfig], Parts] = real_parts,
) -> Mapping[str, Any]:
    """Run a config to its end; returns the summary, which is also in the run folder.

    Args:
      config: the settings.
      outcome: told of the run folder as soon as it is there, so that a failure leaves its traceback in it.
      console: where people look.
      resume, overwrite: what to do with a folder that exists.
      parts: what the run is made of.

    Raises:
      LimbeckError: whatever makes the run impossible; before anything is written if the input is at fault.
    """
    started = time.monotonic()
    folder = RunFolder.of(config)
    ground = check_input(config, folder, parts, resume=resume, overwrite=overwrite)
    made = parts(config)
    readings = Readings(config.training.steps)
    with display(console, readings) as screen:
        screen.progress("starting", 0, 0)
        with closing(made.session(config)) as session:
            # From here on a folder of before may be gone; whatever could be refused has been.
            folder.begin(config, resume=resume)
            outcome.folder = folder
            with FileRecorder(folder) as recorder:
                screen.progress("getting_ready", 0, 0)
                preparation = made.prepare(ground, folder.root, screen.progress, resume=resume)
                screen.progress("loading", 0, 0)
                both: Recorder = Recorders(recorder, screen)
                with closing(made.runtime(preparation.specs, config, both, session)) as runtime:
                    results = made.job(preparation, runtime, both, folder.root, resume=resume)
                refused = dict(recorder.refused)
    seconds = {**results["seconds"], "total": round(time.monotonic() - started, 3)}
    summary = {**results, "refused": refused, "seconds": seconds}
    write_summary(folder.summary, summary)
    print_report(console, config, folder, summary)
    return summary


def check_address(config: RunConfig) -> None:
    """Ask the Ray cluster of a config whether it is there, without joining it.

    Raises:
      DeadlineError: nothing answers at the address.
    """
    if config.runner.kind == "ray" and config.runner.address not in (None, "auto"):
        from actors.session import check_answers

        check_answers(str(config.runner.address))


def check_input(
    config: RunConfig,
    folder: RunFolder,
    parts: Callable[[RunConfig], Parts] = real_parts,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> Any:
    """Refuse, before anything is written or started, what cannot become a run; returns the groundwork.

    Raises:
      ConfigError, PromptError, RunFolderError, CheckpointError: the input at fault.
    """
    environment.apply(config)
    foreign = installed_twice() + (shadowed_in_workers(Path.cwd()) if config.runner.kind == "ray" else [])
    if foreign:
        raise ConfigError("\n".join(foreign))
    folder.check(config, resume=resume, overwrite=overwrite)
    ground = parts(config).check(config)
    if resume:
        ground.check_same_prompts(folder.root)
    return ground


def _job(preparation: Any, runtime: Any, recorder: Any, folder: Path, *, resume: bool) -> Mapping[str, Any]:
    from pipeline.job import run_job, summarise

    return summarise(preparation, run_job(preparation, runtime, recorder, folder, resume=resume))


class _NoSession:
    def close(self) -> None:
        pass


def _no_session(config: RunConfig) -> Session:
    return _NoSession()


def _inline(specs: Any, config: RunConfig, recorder: Recorder, session: Session) -> Runtime:
    from pipeline.inline import InlineRuntime

    return InlineRuntime(specs, config)


def _ray_session(config: RunConfig) -> Session:
    import warnings

    from actors.session import start_ray

    # Where JAX's threads are up already, Ray's fork is announced as a danger; the child only executes another program.
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
    return start_ray(config.runner)


def _ray(specs: Any, config: RunConfig, recorder: Recorder, session: Any) -> Any:
    from actors.runner import RayRuntime

    return RayRuntime(specs, config, recorder, session)
