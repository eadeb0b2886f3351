"""The ground floor: what crosses a boundary. The names of the public batch contract can be imported from here.

They are loaded when first used, so that a command line that only needs an error class does not import JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contracts.distillation import DiffusionDistillationBatch, PreparedDiffusionDistillationBatchAdapter
    from contracts.losses import LossOutput, WeightedMetric
    from contracts.tokens import (
        DiffusionBatchAdapter,
        DiffusionLogitsFn,
        DiffusionTokenBatch,
        compute_diffusion_logits,
        validate_diffusion_logits,
    )

_ROOMS = {
    "DiffusionBatchAdapter": "tokens",
    "DiffusionDistillationBatch": "distillation",
    "DiffusionLogitsFn": "tokens",
    "DiffusionTokenBatch": "tokens",
    "LossOutput": "losses",
    "PreparedDiffusionDistillationBatchAdapter": "distillation",
    "WeightedMetric": "losses",
    "compute_diffusion_logits": "tokens",
    "validate_diffusion_logits": "tokens",
}

__all__ = [
    "DiffusionBatchAdapter",
    "DiffusionDistillationBatch",
    "DiffusionLogitsFn",
    "DiffusionTokenBatch",
    "LossOutput",
    "PreparedDiffusionDistillationBatchAdapter",
    "WeightedMetric",
    "compute_diffusion_logits",
    "validate_diffusion_logits",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'contracts' has no attribute {name!r}")
    return getattr(import_module(f"contracts.{_ROOMS[name]}"), name)
