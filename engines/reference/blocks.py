"""Blocks of a paged store as bytes, for the KV transfer: the interface, and that of stores which are NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Blocks(Protocol):
    """Reads and writes the blocks of one store. A block that is read or written is in no step meanwhile."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        ...

    def read(self, block_id: int) -> memoryview:
        """Return the bytes of a block, valid until the block changes. Called on threads of the KV listener."""
        ...

    def stage(self, data: bytearray) -> Any:
        """Prepare the bytes of whole blocks for `write`. Called on the thread that has pulled them."""
        ...

    def write(self, block_ids: Sequence[int], staged: Any) -> None:
        """Copy what `stage` returned into blocks, in order. Called on the engine thread."""
        ...


@dataclass(frozen=True, slots=True)
class ArrayBlocks:
    """Blocks of a C-contiguous array, [block, ...]. Implements Blocks."""

    array: npt.NDArray[Any]

    @property
    def block_bytes(self) -> int:
        """See Blocks."""
        return int(self.array[0].nbytes)

    def read(self, block_id: int) -> memoryview:
        """See Blocks. The bytes are those of the store itself."""
        return memoryview(self.array[block_id]).cast("B")

    def stage(self, data: bytearray) -> npt.NDArray[Any]:
        """See Blocks."""
        return np.frombuffer(data, dtype=self.array.dtype).reshape(-1, *self.array.shape[1:])

    def write(self, block_ids: Sequence[int], staged: npt.NDArray[Any]) -> None:
        """See Blocks."""
        self.array[list(block_ids)] = staged
