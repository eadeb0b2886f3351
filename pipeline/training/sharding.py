"""Where arrays live: one mesh, rows split over the data axes, parameters over the fsdp axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from contracts.errors import BatchTypeError, BatchValueError, ConfigError
from pipeline.training.config import TrainingConfig


def training_mesh(devices: Sequence[Any] | None = None, *, data: int | None = None, fsdp: int = 1) -> Mesh:
    """A mesh with the axes `data` and `fsdp`.

    Args:
        devices: Devices to use; `None`: all of them, of every process.
        data: Copies of the parameters; `None`: as many as the devices allow.
        fsdp: Pieces that each copy is split into.

    Raises:
        ConfigError: `data · fsdp` is not the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    data = len(devices) // fsdp if data is None else data
    if data * fsdp != len(devices) or data < 1:
        raise ConfigError(
            f"a mesh of data={data} × fsdp={fsdp} needs {data * fsdp} devices and there are {len(devices)}: choose"
            " factors of the device count"
        )
    return Mesh(np.asarray(devices).reshape(data, fsdp), ("data", "fsdp"))


@dataclass(frozen=True)
class Placement:
    """The placement rules of one trainer."""

    mesh: Mesh
    data_axes: tuple[str, ...]
    fsdp_axis: str | None

    @staticmethod
    def of(config: TrainingConfig) -> "Placement":
        """The config's mesh, or this process's first device under the config's axis names."""
        mesh = config.mesh
        if mesh is None:
            names = dict.fromkeys([*config.data_sharding_axis, *([config.fsdp_axis] if config.fsdp_axis else [])])
            mesh = Mesh(np.asarray(jax.local_devices()[:1]).reshape((1,) * len(names)), tuple(names))
        return Placement(mesh, config.data_sharding_axis, config.fsdp_axis)

    @property
    def replicated(self) -> NamedSharding:
        """The whole array on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def parameter_sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Splits the largest dimension that the fsdp axis divides (the last one among equals), else replicates.

        A parameter with no such dimension, a norm's scale for instance, is small enough to be everywhere.
        """
        pieces = 1 if self.fsdp_axis is None else self.mesh.shape[self.fsdp_axis]
        divisible = [axis for axis, size in enumerate(shape) if size and size % pieces == 0]
        if pieces == 1 or not divisible:
            return self.replicated
        chosen = max(divisible, key=lambda axis: (shape[axis], axis))
        return NamedSharding(
            self.mesh, PartitionSpec(*(self.fsdp_axis if axis == chosen else None for axis in range(len(shape))))
        )

    def state_shardings(self, state: Any, parameters: dict[str, Any]) -> Any:
        """Gives an optimiser-state leaf the sharding of the parameter it belongs to.

        Args:
            state: Optimiser state, or its shapes; leaves under a parameter's name that have its shape follow it.
            parameters: Name → array or shape.

        Returns:
            The same tree of shardings; all other leaves replicated.
        """

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            owner = parameters.get(str(getattr(path[-1], "key", ""))) if path else None
            follows = owner is not None and owner.shape == leaf.shape
            return self.parameter_sharding(leaf.shape) if follows else self.replicated

        return jax.tree_util.tree_map_with_path(sharding, state)

    def put(self, array: Any, sharding: Sharding) -> jax.Array:
        """Places one array that every process holds in full; may share memory with it."""
        if sharding.is_fully_addressable or (isinstance(array, jax.Array) and not array.is_fully_addressable):
            return jax.device_put(array, sharding)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            bits = self.put(jax.random.key_data(array), sharding)
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(array))
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def everywhere(self, tree: Any) -> Any:
        """Places small arrays on every device."""
        return jax.tree.map(lambda leaf: self.put(leaf, self.replicated), tree)

    def parameter(self, array: jax.Array) -> jax.Array:
        """Places a parameter, or another array of the model."""
        return self.put(array, self.parameter_sharding(array.shape))

    def copied(self, array: jax.Array) -> jax.Array:
        """Places a copy of a parameter that shares no memory with it, so that it may be donated."""
        return self.parameter(jnp.array(array, copy=True))

    def copied_like(self, array: Any, like: jax.Array) -> jax.Array:
        """Places a copy where `like` is."""
        return self.put(jnp.array(array, copy=True), like.sharding)

    def batch(self, batch: Any) -> Any:
        """Splits the rows of a batch over the data axes; scalars are replicated.

        With several processes each passes its own rows, the same number in each, and gets the global batch.

        Args:
            batch: Pytree of numpy or JAX arrays, rows first.

        Raises:
            BatchTypeError: A leaf is not an array.
            BatchValueError: The rows do not divide over the data axes; they are never replicated instead.
        """
        return jax.tree_util.tree_map_with_path(self._batch_leaf, batch)

    def _batch_leaf(self, path: Any, leaf: Any) -> jax.Array:
        name = f"batch{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            raise BatchTypeError(f"{name} is {type(leaf).__name__}; every leaf of a batch must be a numpy or JAX array")
        if leaf.ndim == 0:
            return self.put(leaf, self.replicated)
        sharding = NamedSharding(self.mesh, PartitionSpec(self.data_axes))
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        processes = 1 if sharding.is_fully_addressable else jax.process_count()
        rows, shards = leaf.shape[0] * processes, int(np.prod([self.mesh.shape[axis] for axis in self.data_axes]))
        if rows % shards:
            raise BatchValueError(
                f"{name} has {rows} rows in all; they do not divide over {shards} data shards"
                f" ({', '.join(f'{axis}={self.mesh.shape[axis]}' for axis in self.data_axes)}): pad the batch with rows"
                " of weight 0, or use fewer devices"
            )
        if isinstance(leaf, np.ndarray) and leaf.flags.writeable:
            # The device array may share host memory until the step has run, and the caller may reuse it before that.
            leaf = leaf.copy()
        if processes == 1:
            return jax.device_put(leaf, sharding)
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))
