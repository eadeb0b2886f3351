"""A run's folder: who may write it, what lies in it, and the settings it was made with."""

import shutil
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.errors import CheckpointError, ConfigError, RunFolderError
from pipeline.config import RunConfig


@dataclass(frozen=True)
class RunFolder:
    """`runs/NAME/`: config.yaml, metrics.jsonl, events.jsonl, rollouts.jsonl, checkpoints/, summary.json.

    After a failure also error.txt, with the traceback.
    """

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def error(self) -> Path:
        return self.root / "error.txt"

    @classmethod
    def of(cls, config: RunConfig) -> "RunFolder":
        """The folder that a config names; nothing is made."""
        return cls(Path(config.run.folder).expanduser() / config.run.name)

    @property
    def has_checkpoint(self) -> bool:
        return self.checkpoints.is_dir() and not _is_empty(self.checkpoints)

    def check(self, config: RunConfig, *, resume: bool, overwrite: bool) -> None:
        """Refuse a folder that may not be written; changes nothing.

        Raises:
          ConfigError: both ``resume`` and ``overwrite``.
          RunFolderError: it exists and neither was asked for (unless its run failed before the first step), or it is no
            run folder and would be overwritten.
          CheckpointError: there is nothing to resume, or it was made with other settings.
        """
        if resume and overwrite:
            raise ConfigError("--resume continues a run and --overwrite begins it anew: give one of them")
        if resume:
            self._check_resumable(config)
        elif self.root.exists() and not overwrite and not self._never_began():
            raise RunFolderError(
                f"the run folder {self.root} exists. --resume continues it, --overwrite begins it anew, "
                "--run.name NAME leaves it alone"
            )
        elif self.root.exists() and not self.config.is_file() and not _is_empty(self.root):
            raise RunFolderError(
                f"{self.root} is no run folder (it has no config.yaml), so --overwrite leaves it alone: choose another "
                "--run.name, or remove it yourself"
            )

    def begin(self, config: RunConfig, *, resume: bool) -> None:
        """Make the folder, emptied unless it is resumed, and write the resolved settings into it."""
        if self.root.exists() and not resume:
            shutil.rmtree(self.root)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.error.unlink(missing_ok=True)
        header = (
            f"# Every setting of run {config.run.name}, {config.digest()}.\n"
            f"# The same run again: limbeck run --config {self.config} --run.name NAME\n"
        )
        self.config.write_text(header + dump(config), encoding="utf-8")

    def load_config(self) -> RunConfig:
        """The settings that the run was made with.

        Raises:
          ConfigError: there is no such run, or its config.yaml has been damaged.
        """
        from launch.recipes import load
        from pipeline.config import parse_config

        if not self.config.is_file():
            there = sorted(path.parent.name for path in self.root.parent.glob("*/config.yaml"))
            known = f"; the runs in {self.root.parent} are {', '.join(there)}" if there else ""
            raise ConfigError(f"there is no run at {self.root}: it has no config.yaml{known}")
        return parse_config(dict(load(self.config).tree))

    def record_error(self, error: BaseException) -> None:
        """Keep the whole traceback where the screen has only the sentence."""
        self.error.write_text("".join(traceback.format_exception(error)), encoding="utf-8")

    def _never_began(self) -> bool:
        """It holds a run that failed before its first step: there is nothing in it to lose."""
        return self.config.is_file() and self.error.is_file() and not self.metrics.exists() and not self.has_checkpoint

    def _check_resumable(self, config: RunConfig) -> None:
        if not self.config.is_file():
            raise CheckpointError(
                f"--resume: there is no run at {self.root} to continue; leave --resume out to begin it"
            )
        before = self.load_config()
        if before.digest() != config.digest():
            rows = [f"  {path}: {old!r} then, {new!r} now" for path, old, new in differences(before, config)]
            raise CheckpointError(
                f"--resume: the run at {self.root} was made with other settings; continue it with its own "
                f"(limbeck run --config {self.config} --resume), or choose another --run.name:\n" + "\n".join(rows)
            )


def find_run(name: str, folder: str = "runs") -> RunFolder:
    """The folder of a run, given by its path or by its name."""
    direct = RunFolder(Path(name).expanduser())
    return direct if direct.config.is_file() else RunFolder(Path(folder).expanduser() / name)


def dump(config: RunConfig) -> str:
    """Settings as YAML, in the order they are declared."""
    import yaml

    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def differences(before: RunConfig, after: RunConfig) -> list[tuple[str, Any, Any]]:
    """Dotted path, old and new value of each setting that differs and can change the result."""
    old, new = _flat(before.decisive()), _flat(after.decisive())
    return [(path, old.get(path), new.get(path)) for path in {**old, **new} if old.get(path) != new.get(path)]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())
