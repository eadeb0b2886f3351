"""Checkpoints on disk: Orbax writes the arrays, we digest every leaf and compare every restore.

One checkpoint is some named trees and one JSON record: the caller's metadata, and name, shape, dtype and digest of
every leaf. Orbax does not notice a flipped bit and restores into the wrong run without complaint; the record is there
for both.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from contracts.errors import CheckpointError
from pipeline.training.config import CheckpointOptions
from pipeline.training.leaves import digest, is_random_key, key_bits, named_leaves, spec, spec_differences

RECORD = "record"
"""Item name of the JSON record inside a checkpoint; a tree may not be called this."""

DEFAULT_OPTIONS = CheckpointOptions()

ORBAX_ERRORS = (ValueError, OSError, LookupError, AttributeError, TypeError)
"""What Orbax was seen to raise over single flipped bits in each of its files."""


@dataclass(frozen=True)
class Checkpoint:
    """What was restored.

    Args:
        step: Its step.
        trees: Name → tree, in the structure and shardings that were asked for; every leaf verified.
        metadata: The caller's metadata, as JSON gives it back.
    """

    step: int
    trees: dict[str, Any]
    metadata: dict[str, Any]


class CheckpointStore:
    """A folder of checkpoints.

    Saving returns when the checkpoint is complete on disk; a process killed before that leaves the previous one intact.
    With several processes all of them call every method, on a shared folder.

    Args:
        directory: The folder; created if absent.
        options: Save interval and retention.
    """

    def __init__(self, directory: str | Path, options: CheckpointOptions = DEFAULT_OPTIONS) -> None:
        self.directory = str(directory) if "://" in str(directory) else str(Path(directory).absolute())
        self._options = options
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=options.keep, create=True, enable_async_checkpointing=False
            ),
        )

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """The newest of `steps`, `None` without any."""
        return max(self.steps(), default=None)

    def due(self, step: int) -> bool:
        """Whether the save interval falls on `step`."""
        return step % self._options.save_interval_steps == 0

    def save(self, step: int, trees: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        """Writes one checkpoint; one of the same step is replaced.

        Args:
            step: Its step, ≥ 0.
            trees: Name → pytree of JAX or numpy arrays; may be donated right after this returns.
            metadata: JSON values.

        Raises:
            CheckpointError: A reserved or ambiguous name, metadata that is not JSON, or Orbax refused.
        """
        if RECORD in trees:
            raise CheckpointError(f"a tree may not be called {RECORD!r}: the checkpoint's own record has that name")
        leaves = {name: named_leaves(tree) for name, tree in trees.items()}
        record = {
            "metadata": _as_json(metadata),
            "leaves": {
                name: {path: {"spec": spec(leaf), "digest": digest(leaf)} for path, leaf in named.items()}
                for name, named in leaves.items()
            },
        }
        text = json.dumps(record, sort_keys=True)
        items: dict[str, Any] = {RECORD: ocp.args.JsonSave({"text": text, "sha256": _sha256(text)})}
        for name, named in leaves.items():
            stored = _stored(named)
            if stored:
                items[name] = ocp.args.StandardSave({path: key_bits(leaf) for path, leaf in stored.items()})
        if step in self._manager.all_steps():
            self._manager.delete(step)
        if not self._manager.save(step, args=ocp.args.Composite(**items), force=True):
            raise CheckpointError(f"Orbax did not write checkpoint {step} in {self.directory}: see its log")
        self._manager.wait_until_finished()

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """The metadata saved with `step`, or with the latest checkpoint.

        Raises:
            CheckpointError: There is no such checkpoint.
        """
        return self._record(self._existing(step))["metadata"]

    def restore(
        self,
        abstract: Mapping[str, Any],
        step: int | None = None,
        expected_metadata: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Reads a checkpoint, having made sure that it is the one meant and is undamaged.

        Args:
            abstract: Name → tree of arrays or `jax.ShapeDtypeStruct`s that give structure, shape, dtype and sharding;
                trees that are not named are not read.
            step: Which checkpoint; `None`: the latest.
            expected_metadata: Fields that must be equal to those saved; fields that it lacks are not compared.

        Raises:
            CheckpointError: No such checkpoint; metadata or leaves differ (all differences, both sides); a leaf is
                damaged (named).
        """
        step = self._existing(step)
        record = self._record(step)
        self._require_metadata(step, record["metadata"], _as_json(expected_metadata or {}))
        wanted = {name: named_leaves(tree) for name, tree in abstract.items()}
        self._require_leaves(step, record["leaves"], wanted)
        restored = self._read(step, wanted)
        damaged = [
            f"{name}/{path}"
            for name, named in restored.items()
            for path, leaf in named.items()
            if digest(leaf) != record["leaves"][name][path]["digest"]
        ]
        if damaged:
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} is damaged: {', '.join(damaged)} do not have the digest they"
                f" were saved with; restore another step (there are {self.steps()})"
            )
        trees = {
            name: jax.tree.unflatten(jax.tree.structure(tree), list(restored[name].values()))
            for name, tree in abstract.items()
        }
        return Checkpoint(step, trees, record["metadata"])

    def close(self) -> None:
        """Lets go of the folder."""
        self._manager.close()

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            which = "no checkpoint" if step is None else f"no checkpoint {step}"
            raise CheckpointError(f"{which} in {self.directory}; complete ones there: {steps}")
        return steps[-1] if step is None else step

    def _record(self, step: int) -> dict[str, Any]:
        sealed = self._orbax(step, {RECORD: ocp.args.JsonRestore()})[RECORD]
        if sealed.keys() != {"text", "sha256"} or _sha256(sealed["text"]) != sealed["sha256"]:
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} is damaged: its record does not have the digest it was saved"
                f" with; restore another step (there are {self.steps()})"
            )
        return json.loads(sealed["text"])

    def _orbax(self, step: int, items: dict[str, Any]) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except ORBAX_ERRORS as error:
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} cannot be read ({type(error).__name__}: {error}); restore another"
                f" step (there are {self.steps()})"
            ) from error

    def _require_metadata(self, step: int, saved: dict[str, Any], expected: dict[str, Any]) -> None:
        theirs = _flat({name: saved[name] for name in expected if name in saved})
        mine = _flat(expected)
        differing = [
            f"  {name}: checkpoint {theirs.get(name, 'absent')}, this run {mine.get(name, 'absent')}"
            for name in sorted(theirs.keys() | mine.keys())
            if theirs.get(name) != mine.get(name)
        ]
        if differing:
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} was made by another run; fields that differ:\n"
                + "\n".join(differing)
                + "\nUse the settings it was made with, or another folder."
            )

    def _require_leaves(self, step: int, saved: dict[str, Any], wanted: dict[str, dict[str, Any]]) -> None:
        differing = []
        for name, named in wanted.items():
            if name not in saved:
                differing.append(f"tree {name!r}: checkpoint has only {sorted(saved)}")
                continue
            found = {path: leaf["spec"] for path, leaf in saved[name].items()}
            mine = {path: spec(leaf) for path, leaf in named.items()}
            differing += [f"{name}/{line}" for line in spec_differences(found, mine, sides=("checkpoint", "this run"))]
        if differing:
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} has other leaves than this run:\n  " + "\n  ".join(differing)
            )

    def _read(self, step: int, wanted: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        stored = {name: _stored(named) for name, named in wanted.items()}
        items = {
            name: ocp.args.StandardRestore({path: _abstract(leaf) for path, leaf in named.items()})
            for name, named in stored.items()
            if named
        }
        read = self._orbax(step, items) if items else {}
        return {
            name: {
                path: _returned(leaf, read[name][path] if path in stored[name] else None)
                for path, leaf in named.items()
            }
            for name, named in wanted.items()
        }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _stored(named: dict[str, Any]) -> dict[str, Any]:
    """Orbax refuses arrays without elements; their spec in the record says all there is to say about them."""
    return {path: leaf for path, leaf in named.items() if math.prod(leaf.shape)}


def _abstract(leaf: Any) -> Any:
    """What Orbax is asked for: numpy for numpy, else an array with the leaf's sharding, by default on this device."""
    if isinstance(leaf, np.ndarray):
        return leaf
    default = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    bits = jax.eval_shape(key_bits, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    sharding = default if is_random_key(leaf) else getattr(leaf, "sharding", None) or default
    return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=sharding)


def _returned(leaf: Any, bits: Any) -> Any:
    if bits is None:
        return jax.tree.map(lambda empty: jnp.zeros(empty.shape, empty.dtype), leaf)
    if is_random_key(leaf):
        return jax.random.wrap_key_data(bits, impl=str(jax.random.key_impl(leaf)))
    return bits


def _as_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(metadata)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint metadata must be JSON: {error}") from error


def _flat(metadata: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted field name → value as JSON text."""
    flat: dict[str, str] = {}
    for name, value in metadata.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = json.dumps(value, sort_keys=True)
    return flat
