"""The student's side of a batch: what the model reads, what it must predict, and how much each prediction counts."""

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from contracts.errors import BatchTypeError, BatchValueError

Raw = TypeVar("Raw", contravariant=True)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class DiffusionTokenBatch:
    """Target-aligned inputs of one diffusion loss. A pytree; every leaf is batch-major, so one sharding fits them all.

    `target_ids` and `loss_weights` name *physical prediction positions*: alignment, mask ids, block sizes and the
    tokenizer are settled before the batch exists, and live in the scorer's closure. The plain constructor does not
    validate, because `jit` and `vmap` rebuild pytrees through it.

    Args:
        model_inputs: Pytree of arrays `[B, ...]`, real or bool; read by the scorer only.
        target_ids: `[B, L]` integer; nonnegative where the weight is positive, anything where it is 0.
        loss_weights: `[B, L]` bool, integer or float; finite, nonnegative.

    Arrays may be `jax.Array`, tracers, `np.ndarray` or `jax.ShapeDtypeStruct`.
    """

    model_inputs: Any
    target_ids: Any
    loss_weights: Any

    @classmethod
    def create(cls, *, model_inputs: Any, target_ids: Any, loss_weights: Any) -> "DiffusionTokenBatch":
        """Builds a batch and validates it; arguments and errors as for the class and `validate`."""
        return cls(model_inputs, target_ids, loss_weights).validate()

    def validate(self) -> "DiffusionTokenBatch":
        """Checks shapes and dtypes always, values where they are concrete and addressable.

        Returns:
            The batch itself.

        Raises:
            BatchTypeError: Something is not an array, or has the wrong dtype.
            BatchValueError: Shapes disagree, a weight is negative or not finite, or an active target is negative.
        """
        shape, dtype = array_signature("target_ids", self.target_ids)
        if len(shape) != 2:
            raise BatchValueError(f"target_ids must have shape [batch, length], got {shape}")
        if not jnp.issubdtype(dtype, jnp.integer):
            raise BatchTypeError(f"target_ids must have an integer dtype, got {dtype}: cast token ids to int32")
        weight_shape, weight_dtype = array_signature("loss_weights", self.loss_weights)
        if weight_shape != shape:
            raise BatchValueError(f"loss_weights must match target_ids shape, got {weight_shape} and {shape}")
        _require_real_or_bool("loss_weights", weight_dtype)
        self._validate_model_inputs(shape)
        self._validate_values()
        return self

    def _validate_model_inputs(self, target_shape: tuple[int, ...]) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(self.model_inputs)
        if not leaves:
            raise BatchValueError(f"model_inputs must contain at least one array, got {self.model_inputs!r}")
        for path, leaf in leaves:
            name = f"model_inputs{jax.tree_util.keystr(path)}"
            shape, dtype = array_signature(name, leaf)
            if not shape:
                raise BatchValueError(
                    f"{name} must be batch-major, got shape {shape} for target_ids {target_shape}:"
                    " close over static values in the scorer"
                )
            if shape[0] != target_shape[0]:
                raise BatchValueError(
                    f"{name} has batch size {shape[0]} (shape {shape}), expected {target_shape[0]}"
                    f" (target_ids {target_shape})"
                )
            _require_real_or_bool(name, dtype)

    def _validate_values(self) -> None:
        weights = concrete(self.loss_weights)
        if weights is None:
            return
        refuse_where(~np.isfinite(weights), weights, "loss_weights must be finite")
        refuse_where(weights < 0, weights, "loss_weights must be nonnegative")
        targets = concrete(self.target_ids)
        if targets is not None:
            refuse_where(
                (weights > 0) & (targets < 0),
                targets,
                "active target_ids must be nonnegative (a negative sentinel needs weight 0)",
            )


@runtime_checkable
class DiffusionBatchAdapter(Protocol[Raw]):
    """Turns whatever a data source yields into the student's batch."""

    def __call__(self, batch: Raw, /) -> DiffusionTokenBatch: ...


@runtime_checkable
class DiffusionLogitsFn(Protocol):
    """Scores a batch: `(model, model_inputs) -> logits [B, L, V]`, floating, aligned to `target_ids`."""

    def __call__(self, model: Any, model_inputs: Any, /) -> Any: ...


def compute_diffusion_logits(model: Any, batch: DiffusionTokenBatch, logits_fn: DiffusionLogitsFn) -> Any:
    """Validates the batch, scores it, and checks the scores against the targets.

    Args:
        model: What `logits_fn` scores with.
        batch: The student's batch.
        logits_fn: See `DiffusionLogitsFn`.

    Returns:
        Logits `[B, L, V]` in the dtype of the scorer.

    Raises:
        BatchTypeError, BatchValueError: As `DiffusionTokenBatch.validate` and `validate_diffusion_logits`.
    """
    batch.validate()
    return validate_diffusion_logits(batch, logits_fn(model, batch.model_inputs))


def validate_diffusion_logits(batch: DiffusionTokenBatch, logits: Any, name: str = "logits") -> Any:
    """Checks that logits belong to the targets of a batch.

    Args:
        batch: The batch that was scored.
        logits: `[B, L, V]`, V ≥ 1, floating.
        name: What messages call the logits.

    Returns:
        `logits`, unchanged.

    Raises:
        BatchTypeError: Not an array, or not floating.
        BatchValueError: Rank, `[B, L]` or V is wrong, or a concrete active target is not below V.
    """
    shape, dtype = array_signature(name, logits)
    target_shape = tuple(batch.target_ids.shape)
    if len(shape) != 3:
        raise BatchValueError(
            f"{name} must have shape [batch, length, vocab], got {shape} for target_ids {target_shape}"
        )
    if shape[:2] != target_shape:
        raise BatchValueError(f"{name} must align with target_ids on [batch, length], got {shape} and {target_shape}")
    if shape[2] < 1:
        raise BatchValueError(f"{name} must have a non-empty vocabulary, got {shape}")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise BatchTypeError(f"{name} must have a floating-point dtype, got {dtype}")
    weights, targets = concrete(batch.loss_weights), concrete(batch.target_ids)
    if weights is not None and targets is not None:
        refuse_where(
            (weights > 0) & (targets >= shape[2]),
            targets,
            f"active target_ids must be smaller than the vocabulary size {shape[2]} of {name}",
        )
    return logits


def check_active_logits(batch: DiffusionTokenBatch, logits: Any, name: str = "logits") -> None:
    """Checks that active logits make a distribution: finite or −inf, and not a whole row of −inf.

    Traced, abstract or remote arrays have no values to check and pass. Inactive positions may hold anything.

    Args:
        batch: Whose weights say which positions are active.
        logits: `[B, L, V]` floating, already validated.
        name: What messages call the logits.

    Raises:
        BatchValueError: NaN, +inf or a row without any mass, naming the position.
    """
    weights, values = concrete(batch.loss_weights), concrete(logits)
    if weights is None or values is None:
        return
    active = weights > 0
    # One reduction over V tells all three faults apart: the maximum is NaN, +inf, or −inf.
    highest = values.max(axis=-1)
    refuse_where(
        active & (np.isnan(highest) | np.isposinf(highest)),
        highest,
        f"active {name} must be finite, or -inf for an entry without mass",
    )
    refuse_where(
        active & np.isneginf(highest), highest, f"active {name} must leave some entry finite, but a whole row is -inf"
    )


def array_signature(name: str, value: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and dtype of an array, tracer or `ShapeDtypeStruct`; `BatchTypeError` for anything else."""
    if not isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise BatchTypeError(f"{name} must be a JAX or NumPy array, got {type(value).__name__}: convert it first")
    return tuple(value.shape), value.dtype


def concrete(value: Any) -> np.ndarray | None:
    """Returns the values on the host, or `None` where there are none to read (traced, abstract, on another host)."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_fully_addressable:
        return np.asarray(value)
    return None


def refuse_where(bad: np.ndarray, values: np.ndarray, message: str) -> None:
    """Raises `BatchValueError` with the first position of `bad` and the value there, if there is any."""
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        place = ", ".join(f"{axis} {i}" for axis, i in zip(("row", "position", "entry"), index, strict=False))
        raise BatchValueError(f"{message}; got {values[index]} at {place}")


def _require_real_or_bool(name: str, dtype: Any) -> None:
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
        raise BatchTypeError(f"{name} must have a real numeric or boolean dtype, got {dtype}")
