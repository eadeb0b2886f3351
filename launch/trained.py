"""The student of a finished run, read back from its folder."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from contracts.errors import CheckpointError, ConfigError
from contracts.weights import WeightVersion
from launch import environment
from launch.folder import RunFolder, dump, find_run
from launch.overrides import apply_overrides
from pipeline.config import RunConfig
from pipeline.groundwork import Groundwork
from pipeline.models.config import DecoderConfig
from pipeline.models.decoder import Decoder

CHANGEABLE = ("evaluation.", "task.prompts", "task.field", "run.seed", "run.cache", "runner.visible_cores")
"""What may differ from the settings that the weights were trained with."""

HERE = {"runner.kind": "inline", "runner.rollout.count": 1, "warm_start.steps": 0}
"""What does not matter once there is a student; nothing is trained, so prompts need no known answers."""


@dataclass(frozen=True)
class Student:
    """A trained student and what it was trained for.

    Attributes:
      config: the run's settings, with what was overridden.
      ground: task, tokenizer, layout, prompts.
      shape: of the decoder.
      weights: name → array.
      version: what the weights are.
    """

    config: RunConfig
    ground: Groundwork
    shape: DecoderConfig
    weights: Mapping[str, Any]
    version: WeightVersion

    def decoder(self) -> Decoder:
        import jax.numpy as jnp

        from pipeline.models.tree import with_parameters
        from pipeline.workers.parts import abstract_decoder

        arrays = {name: jnp.array(array, copy=True) for name, array in self.weights.items()}
        return with_parameters(abstract_decoder(self.shape), arrays)


def open_run(name: str, overrides: Mapping[str, str]) -> tuple[RunFolder, RunConfig]:
    """The folder and settings of a run, with the environment set for them.

    Raises:
      ConfigError: no such run, or an override that would contradict its weights.
    """
    import yaml

    from pipeline.config import parse_config

    folder = find_run(name)
    config = folder.load_config()
    if fixed := [path for path in overrides if not path.startswith(CHANGEABLE)]:
        allowed = ", ".join(f"--{path}*" if path.endswith(".") else f"--{path}" for path in CHANGEABLE)
        raise ConfigError(
            f"{', '.join(f'--{path}' for path in fixed)}: the weights of {folder.root} were made with what its "
            f"config.yaml says; what can differ is {allowed}"
        )
    config = parse_config(apply_overrides(yaml.safe_load(dump(config)), {**overrides, **HERE}))
    environment.apply(config)
    return folder, config


def load_student(folder: RunFolder, config: RunConfig) -> Student:
    """Read the student of a run.

    Raises:
      CheckpointError: the run has no final weights yet, or they have changed since they were saved.
    """
    from safetensors import SafetensorError, safe_open

    from contracts.weights import WeightVersion, fingerprint
    from pipeline.groundwork import lay_groundwork
    from pipeline.job import STUDENT_FILE
    from pipeline.models.conversion import Append

    path = folder.root / STUDENT_FILE
    if not path.is_file():
        raise CheckpointError(
            f"the run at {folder.root} has no {path.name}: it did not reach its end. limbeck run --config "
            f"{folder.config} --resume continues it"
        )
    ground = lay_groundwork(config)
    try:
        with safe_open(path, framework="numpy") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping, it has only keys()
            stated = (file.metadata() or {}).get("version", "")
    except SafetensorError as problem:
        raise CheckpointError(f"{path} is damaged: {problem}") from problem
    found = fingerprint(weights)
    if not stated.endswith(found):
        raise CheckpointError(f"{path} was saved as {stated or 'nothing'}; its weights now have fingerprint {found}")
    extra = 1 if isinstance(ground.mask, Append) else 0
    shape = replace(ground.student_base, vocab_size=ground.student_base.vocab_size + extra)
    return Student(config, ground, shape, weights, WeightVersion(config.run.name, config.training.steps, "", found))
