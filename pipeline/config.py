"""What decides a run: one frozen tree of settings, validated as a whole before anything starts."""

import hashlib
import json
from typing import Any

from pydantic import model_validator

from contracts.errors import ConfigError
from pipeline.settings import (
    DiffusionSettings,
    EvaluationSettings,
    ModelSettings,
    ObjectiveSettings,
    PretrainingSettings,
    RoleSettings,
    RunnerSettings,
    RunSettings,
    SamplerConfig,
    Settings,
    StatesSettings,
    TaskSettings,
    TrainingSettings,
)

__all__ = [
    "DiffusionSettings",
    "EvaluationSettings",
    "ModelSettings",
    "ObjectiveSettings",
    "PretrainingSettings",
    "RoleSettings",
    "RunConfig",
    "RunSettings",
    "RunnerSettings",
    "SamplerConfig",
    "StatesSettings",
    "TaskSettings",
    "TrainingSettings",
    "parse_config",
]


class RunConfig(Settings):
    """A whole run. Same config, same seed, same device kind and visible cores: same final weights."""

    run: RunSettings
    task: TaskSettings
    model: ModelSettings = ModelSettings()
    """The teacher; converted, also the student."""
    student: ModelSettings | None = None
    """Where the student starts instead, if it is another model than the teacher."""
    teacher: PretrainingSettings = PretrainingSettings()
    warm_start: PretrainingSettings = PretrainingSettings()
    diffusion: DiffusionSettings
    rollout: SamplerConfig = SamplerConfig()
    states: StatesSettings = StatesSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    training: TrainingSettings
    evaluation: EvaluationSettings = EvaluationSettings()
    runner: RunnerSettings = RunnerSettings()

    @model_validator(mode="before")
    @classmethod
    def _deployed_as_rolled_out(cls, tree: Any) -> Any:
        """What `evaluation.sampler` leaves out is filled in from `rollout`."""
        match tree:
            case {"rollout": dict(rollout), "evaluation": {"sampler": dict(sampler)}}:
                filled = {**tree["evaluation"], "sampler": {**rollout, **sampler}}
                return {**tree, "evaluation": filled}
        return tree

    @model_validator(mode="after")
    def _whole(self):
        problems = []
        for path, sampler in (("rollout", self.rollout), ("evaluation.sampler", self.evaluation.sampler)):
            if sampler is not None and sampler.rule == "static" and sampler.value > self.diffusion.block_size:
                problems.append(
                    f"{path}.value: static({sampler.value:g}) asks for more denoising steps than the "
                    f"{self.diffusion.block_size} slots of a block"
                )
        if self.model.source == "fresh" and self.teacher.steps == 0:
            problems.append("teacher.steps: 0, but a fresh model must be trained to be a teacher; set it above 0")
        if self.model.source == "gguf" and self.teacher.steps > 0:
            problems.append(
                f"teacher.steps: {self.teacher.steps}, but the teacher comes trained, from {self.model.path}; leave it 0"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def deployed_sampler(self) -> SamplerConfig:
        """How the student is decoded where it is measured, and when deployed: as in rollouts, unless stated."""
        return self.evaluation.sampler or self.rollout

    def decisive(self) -> dict[str, Any]:
        """Every setting that can change the result, as nested plain data. Prompts count by content, not by path."""
        elsewhere = {"run": {"name", "folder", "cache"}, "task": {"prompts"}, "runner": True}
        tree = self.model_dump(mode="json", exclude=elsewhere)
        return {**tree, "runner": {"visible_cores": self.runner.visible_cores}}

    def digest(self, prompts: str = "") -> str:
        """16 hex digits over every setting that can change the result.

        Args:
          prompts: digest of the training prompts, to name a run; without it, of the settings alone.
        """
        return _digest({**self.decisive(), "prompts": prompts})

    def teacher_digest(self, corpus: str = "") -> str:
        """16 hex digits over every setting that the weights of a toy teacher depend on.

        Args:
          corpus: digest of what it learns.
        """
        parts = self.model_dump(
            mode="json",
            include={"task": {"name", "prompt_length", "completion_length"}, "model": True, "teacher": True},
        )
        return _digest({**parts, "seed": self.run.seed, "visible_cores": self.runner.visible_cores, "corpus": corpus})


def _digest(tree: dict) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def parse_config(tree: dict) -> RunConfig:
    """A `RunConfig` from nested plain data.

    Raises:
      ConfigError: listing every problem by dotted path.
    """
    from pydantic import ValidationError

    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"])
            message = problem["msg"].removeprefix("Value error, ")
            got = f" (got {problem['input']!r})" if problem["type"] not in ("missing", "value_error") else ""
            # What no single section is at fault for names its own paths.
            lines += [f"  {where}: {message}{got}"] if where else [f"  {line}" for line in message.splitlines()]
        raise ConfigError("the configuration cannot describe a run:\n" + "\n".join(lines)) from None
