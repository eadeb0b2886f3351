"""The first floor: the algorithm and the loop, in JAX, in one process. Its public names can be imported from here.

They are loaded when first used, so that reading a configuration does not import a training stack.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.objectives.opd import configure_prepared_diffusion_opd, diffusion_opd_loss_fn
    from pipeline.objectives.sft import configure_diffusion_sft, diffusion_loss_fn
    from pipeline.training.accumulator import GradientAccumulator
    from pipeline.training.config import TrainingConfig
    from pipeline.training.trainer import PeftTrainer

_ROOMS = {
    "GradientAccumulator": "training.accumulator",
    "PeftTrainer": "training.trainer",
    "TrainingConfig": "training.config",
    "configure_diffusion_sft": "objectives.sft",
    "configure_prepared_diffusion_opd": "objectives.opd",
    "diffusion_loss_fn": "objectives.sft",
    "diffusion_opd_loss_fn": "objectives.opd",
}

__all__ = [
    "GradientAccumulator",
    "PeftTrainer",
    "TrainingConfig",
    "configure_diffusion_sft",
    "configure_prepared_diffusion_opd",
    "diffusion_loss_fn",
    "diffusion_opd_loss_fn",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
    return getattr(import_module(f"pipeline.{_ROOMS[name]}"), name)
