"""How a `PeftTrainer` trains: window depth, cadence, checkpoints, mesh and what to do with non-finite numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jax.sharding import Mesh

from contracts.errors import ConfigError


def _require_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1")


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """When checkpoints are written and how many stay.

    Args:
        save_interval_steps: Save after every so many closed windows; ≥ 1. The last window is always saved.
        keep: How many checkpoints stay, the newest ones; ≥ 1, or `None` for all.
    """

    save_interval_steps: int = 1
    keep: int | None = 3

    def __post_init__(self) -> None:
        _require_positive("save_interval_steps", self.save_interval_steps)
        if self.keep is not None:
            _require_positive("keep", self.keep)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of a `PeftTrainer`.

    Args:
        eval_every_n_steps: Evaluate after every so many closed windows; needed when `train` gets an `eval_ds`.
        max_steps: Windows to close, skipped ones included (so a run over data without weight ends too); `None`: until
            the data ends. No batch is drawn that is not used.
        gradient_accumulation_steps: Micro-batches of a window; `None` and 1 take the fused step.
        checkpoint_root_directory: Where `train` saves and resumes; `None`: nowhere.
        checkpointing_options: Save interval and retention.
        checkpoint_contract: JSON values that a checkpoint must agree with when it is restored (data set, tokenizer, …).
        metrics_prefix: Put before every metric name in reports.
        max_inflight_computations: Device steps queued at most; ≥ 1.
        non_finite: A NaN or infinite loss or gradient raises, or skips its window and is counted. Either way the update
            is not applied.
        mesh: Devices to train on; `None`: one device. `pipeline.training.sharding.training_mesh` builds one.
        data_sharding_axis: Mesh axes that split the rows of a batch.
        fsdp_axis: Mesh axis that splits parameters, gradients and optimiser state; `None`: replicated.

    Raises:
        ConfigError: A value is outside its domain, or names an axis that the mesh lacks.
    """

    eval_every_n_steps: int | None = None
    max_steps: int | None = None
    gradient_accumulation_steps: int | None = 1
    checkpoint_root_directory: str | Path | None = None
    checkpointing_options: CheckpointOptions = CheckpointOptions()
    checkpoint_contract: Mapping[str, Any] = field(default_factory=dict)
    metrics_prefix: str = ""
    max_inflight_computations: int = 2
    non_finite: Literal["raise", "skip"] = "raise"
    mesh: Mesh | None = None
    data_sharding_axis: tuple[str, ...] = ("data", "fsdp")
    fsdp_axis: str | None = "fsdp"

    def __post_init__(self) -> None:
        for name in ("eval_every_n_steps", "max_steps", "gradient_accumulation_steps"):
            if getattr(self, name) is not None:
                _require_positive(name, getattr(self, name))
        _require_positive("max_inflight_computations", self.max_inflight_computations)
        if self.non_finite not in ("raise", "skip"):
            raise ConfigError(f"non_finite is {self.non_finite!r}; it must be 'raise' or 'skip'")
        if self.mesh is not None:
            self._require_axes(self.mesh)

    @property
    def depth(self) -> int:
        """Micro-batches of a full window."""
        return self.gradient_accumulation_steps or 1

    def _require_axes(self, mesh: Mesh) -> None:
        named = {*self.data_sharding_axis, *([] if self.fsdp_axis is None else [self.fsdp_axis])}
        missing = sorted(named - set(mesh.axis_names))
        if missing:
            raise ConfigError(
                f"mesh has axes {mesh.axis_names}; data_sharding_axis={self.data_sharding_axis} and"
                f" fsdp_axis={self.fsdp_axis!r} also name {missing}: add them to the mesh (size 1 will do) or drop them"
            )
