"""The paged KV cache on the device, and its blocks as bytes. Needs PyTorch."""
# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]

from engines.reference.llama.shape import LlamaShape


class DeviceStore:
    """Pages [block, layer, key or value, block_tokens, kv head, head width], zeroed. Implements Blocks.

    A block is contiguous, so its bytes are those of one copy. On a GPU, copies from and to the host run on a CUDA stream
    of their own, beside the steps. The blocks of a handoff are complete before they are read: the step that filled them
    has ended with a copy of its logits to the host.
    """

    def __init__(
        self, shape: LlamaShape, block_count: int, block_tokens: int, device: str, dtype: Any
    ) -> None:
        """Allocate. Raises ValueError if the device has too little free memory."""
        size = (block_count, shape.layers, 2, block_tokens, shape.kv_heads, shape.head_width)
        self.block_bytes = shape.kv_values(block_tokens) * dtype.itemsize
        if device == "cuda":
            free = torch.cuda.mem_get_info()[0]
            if free < block_count * self.block_bytes:
                raise ValueError(
                    f"kv_blocks = {block_count} needs {block_count * self.block_bytes / 1e9:.1f} GB on the device, which "
                    f"has {free / 1e9:.1f} GB free; allowed: 1 to {free // self.block_bytes}"
                )
        self.pages = torch.zeros(size, device=device, dtype=dtype)
        self.block_tokens = block_tokens
        self._copies = torch.cuda.Stream() if device == "cuda" else None

    def read(self, block_id: int) -> memoryview:
        """See Blocks. The bytes are a copy."""
        with self._beside():
            copied = self.pages[block_id].to("cpu", copy=True)
        return memoryview(copied.view(torch.uint8).numpy()).cast("B")

    def stage(self, data: bytearray) -> Any:
        """See Blocks. The result is on the device."""
        found = torch.frombuffer(data, dtype=self.pages.dtype).view(-1, *self.pages.shape[1:])
        with self._beside():
            staged = found.to(self.pages.device)
            if self._copies is not None:
                self._copies.synchronize()
        return staged

    def write(self, block_ids: Sequence[int], staged: Any) -> None:
        """See Blocks."""
        self.pages[torch.tensor(list(block_ids), device=self.pages.device)] = staged
        if (
            self._copies is not None
        ):  # its memory belongs to the other stream, which must not reuse it too early
            staged.record_stream(torch.cuda.current_stream())

    def _beside(self) -> AbstractContextManager[Any]:
        if self._copies is None:
            return contextlib.nullcontext()
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._copies)
        return stream
