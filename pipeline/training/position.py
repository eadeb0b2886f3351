"""The place in the training data, as a value that is stored, never derived from step counts."""

from collections.abc import Iterable, Iterator
from typing import Any

from contracts.errors import CheckpointError


class PositionedData:
    """Training data with a position that a checkpoint can hold.

    Args:
        data: A sequence (position: index); an iterable whose iterator has `get_state` and `set_state`, such as grain's
            (position: that state); or any other iterable, which can be read but not resumed.
    """

    def __init__(self, data: Iterable[Any]) -> None:
        self._sequence: Any = data if hasattr(data, "__getitem__") and hasattr(data, "__len__") else None
        self._iterator: Iterator[Any] | None = None if self._sequence is not None else iter(data)
        self._drawn = 0

    def draw(self) -> tuple[Any, ...]:
        """The next batch as a tuple of one, or an empty tuple when the data has ended."""
        if self._sequence is not None:
            if self._drawn >= len(self._sequence):
                return ()
            batch = self._sequence[self._drawn]
        else:
            assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                return ()
        self._drawn += 1
        return (batch,)

    def position(self) -> dict[str, Any]:
        """The place after the last batch drawn, as JSON."""
        if self._has_state():
            state = self._iterator.get_state()  # type: ignore[union-attr]
            return {"kind": "state", "drawn": self._drawn, "state": state.hex() if isinstance(state, bytes) else state}
        return {"kind": "index" if self._sequence is not None else "iterator", "drawn": self._drawn}

    def seek(self, position: dict[str, Any]) -> None:
        """Goes to a stored place at once, without drawing what lies before it.

        Raises:
            CheckpointError: The data is of another kind than the position, or cannot be positioned.
        """
        kind = self.position()["kind"]
        if position["kind"] != kind:
            raise CheckpointError(
                f"the checkpoint's data position is of kind {position['kind']!r}, train_ds has kind {kind!r}: resume"
                " with the same kind of data"
            )
        if kind == "index" and position["drawn"] > len(self._sequence):
            raise CheckpointError(
                f"the checkpoint stands after batch {position['drawn']}, train_ds has {len(self._sequence)}: resume"
                " with the same data"
            )
        if kind == "iterator" and position["drawn"] != self._drawn:
            raise CheckpointError(
                f"train_ds is a plain iterator after {self._drawn} batches and the checkpoint stands after"
                f" {position['drawn']}: pass a sequence, or an iterator with get_state and set_state"
            )
        if kind == "state":
            state = position["state"]
            current = self._iterator.get_state()  # type: ignore[union-attr]
            self._iterator.set_state(bytes.fromhex(state) if isinstance(current, bytes) else state)  # type: ignore[union-attr]
        self._drawn = position["drawn"]

    def _has_state(self) -> bool:
        return hasattr(self._iterator, "get_state") and hasattr(self._iterator, "set_state")
