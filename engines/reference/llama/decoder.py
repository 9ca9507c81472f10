"""The decoder in PyTorch: one forward over all rows of a step, with a paged KV cache on the device. Needs PyTorch 2.4.

INVARIANT: each row attends to the rows before it in its own sequence alone. Logits depend on the batch by rounding: the
kernels for other numbers of rows add in another order. So a resumed request may continue with other tokens, and the
engine does not offer `seeded_resume`.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch  # type: ignore[import-not-found, unused-ignore]
from torch.nn import functional  # type: ignore[import-not-found, unused-ignore]
from torch.nn.attention.bias import causal_lower_right  # type: ignore[import-not-found, unused-ignore]

from engines.reference.arithmetic import ChosenToken, ChunkInput, Logits
from engines.reference.llama.device_store import DeviceStore
from engines.reference.llama.layout import DecodeRows, PrefillRows, StepLayout
from engines.reference.llama.shape import LlamaShape
from engines.reference.llama.weights import LayerWeights, Weights


class LlamaDecoder:
    """Implements Arithmetic on one device. Has no state between steps but the store."""

    def __init__(self, shape: LlamaShape, weights: Weights, device: str, max_sequence_tokens: int) -> None:
        """Keep `weights`, which are on `device` ("cpu" or "cuda"), without copying them."""
        self.vocab_size = shape.vocabulary
        self.max_sequence_tokens = min(max_sequence_tokens, shape.positions)
        self._shape = shape
        self._weights = weights
        self._device = device
        self._dtype = weights.embedding.dtype
        angles = np.arange(self.max_sequence_tokens)[:, None] * shape.frequencies()
        self._cosine = self._on_device(np.cos(angles)[:, None, :]).to(self._dtype)
        self._sine = self._on_device(np.sin(angles)[:, None, :]).to(self._dtype)

    def new_store(self, block_count: int, block_tokens: int) -> DeviceStore:
        """See Arithmetic. Raises ValueError if the device has too little free memory."""
        return DeviceStore(self._shape, block_count, block_tokens, self._device, self._dtype)

    def blocks(self, store: DeviceStore) -> DeviceStore:
        """See Arithmetic."""
        return store

    def forward(
        self, chunk_inputs: list[ChunkInput], store: DeviceStore
    ) -> list[Logits | ChosenToken | None]:
        """See Arithmetic. Raises ValueError, before the store is written, if an input is out of range."""
        if not chunk_inputs:
            return []
        limit = self.max_sequence_tokens
        layout = StepLayout.of(chunk_inputs, store.block_tokens, limit, self.vocab_size)
        with torch.inference_mode():
            rows = self._rows(layout, store)
            return self._outputs(chunk_inputs, rows, layout)

    def _rows(self, layout: StepLayout, store: DeviceStore) -> Any:
        """Return the last layer's rows whose logits are wanted, [row, width]."""
        positions = self._on_device(layout.positions)
        step = _Step(
            self._shape,
            (self._cosine[positions], self._sine[positions]),
            self._on_device(layout.pages),
            self._on_device(layout.offsets),
            [(one, self._on_device(one.block_ids)) for one in layout.prefills],
            [_Group.of(one, store.block_tokens, self._device) for one in layout.decodes],
        )
        rows = self._weights.embedding[self._on_device(layout.tokens)]
        for number, layer in enumerate(self._weights.layers):
            rows = step.through(layer, rows, store.pages[:, number])
        return rows[self._on_device(layout.wanted)]

    def _outputs(
        self, chunks: list[ChunkInput], rows: Any, layout: StepLayout
    ) -> list[Logits | ChosenToken | None]:
        """Compute the logits of `rows` and copy what the chunks want of them to the host."""
        if not len(layout.wanted):
            self._wait()
            return [None] * len(chunks)
        normed = functional.rms_norm(rows, (self._shape.width,), self._weights.norm, self._shape.norm_epsilon)
        logits = functional.linear(normed, self._weights.head).float()
        top = logits.max(dim=-1)
        likely = (top.values - torch.logsumexp(logits, dim=-1)).cpu().tolist()
        ids = top.indices.cpu().tolist()  # of equal ones the first, as torch.max documents
        wanted = [chunk for chunk in chunks if chunk.wants_logits]
        whole = [at for at, chunk in enumerate(wanted) if not chunk.is_greedy]
        copied = iter(logits[whole].cpu().numpy().astype(np.float64)) if whole else iter(())
        made = iter(
            ChosenToken(token, value) if chunk.is_greedy else next(copied)
            for chunk, token, value in zip(wanted, ids, likely, strict=True)
        )
        return [next(made) if chunk.wants_logits else None for chunk in chunks]

    def _wait(self) -> None:
        """Return when the device has computed the step: its blocks may be sent then, and its time be measured."""
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _on_device(self, values: npt.NDArray[Any]) -> Any:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


class _Step:
    """One step's layout on the device, and the pass of its rows through a layer."""

    def __init__(
        self,
        shape: LlamaShape,
        rotation: tuple[Any, Any],
        pages: Any,
        offsets: Any,
        prefills: list[tuple[PrefillRows, Any]],
        decodes: list[_Group],
    ) -> None:
        self._shape = shape
        self._rotation = rotation
        self._pages = pages
        self._offsets = offsets
        self._prefills = prefills
        self._decodes = decodes

    def through(self, layer: LayerWeights, rows: Any, store: Any) -> Any:
        """Return `rows` behind `layer`, and write their keys and values into `store`, the pages of that layer.

        `store`: [block, key or value, block_tokens, kv head, head width].
        """
        shape = self._shape
        normed = functional.rms_norm(rows, (shape.width,), layer.attention_norm, shape.norm_epsilon)
        heads = functional.linear(normed, layer.qkv, layer.qkv_bias).view(len(rows), -1, shape.head_width)
        turned = _rotated(heads[:, : shape.heads + shape.kv_heads], self._rotation)
        store[self._pages, 0, self._offsets] = turned[:, shape.heads :]
        store[self._pages, 1, self._offsets] = heads[:, shape.heads + shape.kv_heads :]
        mixed = self._attend(turned[:, : shape.heads], store)
        rows = rows + functional.linear(mixed.view(len(rows), -1), layer.attention_out)
        normed = functional.rms_norm(rows, (shape.width,), layer.feed_forward_norm, shape.norm_epsilon)
        gate, up = functional.linear(normed, layer.gate_up).chunk(2, dim=-1)
        return rows + functional.linear(functional.silu(gate) * up, layer.feed_forward_out)

    def _attend(self, query: Any, store: Any) -> Any:
        """Return the attention of `query` [row, head, head width]; same shape."""
        mixed = torch.empty_like(query, memory_format=torch.contiguous_format)
        for prefill, block_ids in self._prefills:
            rows = slice(prefill.begin, prefill.end)
            mixed[rows] = self._causal(query[rows], prefill.start, _kept(store, block_ids[None], self._shape))
        for group in self._decodes:
            mixed[group.rows] = group.attend(query[group.rows], store, self._shape)
        return mixed

    def _causal(self, query: Any, start: int, kept: tuple[Any, Any]) -> Any:
        """Return causal attention of a chunk at position `start`. `kept`: keys and values of its sequence."""
        total = start + len(query)
        key, value = (one[:, :, :total].repeat_interleave(self._shape.group, dim=1) for one in kept)
        # Attention of fewer queries than keys must be aligned to the last key: is_causal aligns to the first.
        aligned = {"attn_mask": causal_lower_right(len(query), total)} if start else {"is_causal": True}
        heads = query.transpose(0, 1)[None]
        return functional.scaled_dot_product_attention(heads, key, value, **aligned)[0].transpose(0, 1)


class _Group:
    """A group of decode rows on the device."""

    def __init__(self, rows: Any, block_ids: Any, mask: Any) -> None:
        self.rows = rows
        self._block_ids = block_ids
        self._mask = mask
        """True for the keys of each sequence, [sequence, 1, 1, key]."""

    @classmethod
    def of(cls, rows: DecodeRows, block_tokens: int, device: str) -> _Group:
        keys = torch.arange(rows.block_ids.shape[1] * block_tokens, device=device)
        lengths = torch.from_numpy(rows.lengths).to(device)
        mask = (keys[None, :] < lengths[:, None])[:, None, None, :]
        return cls(torch.from_numpy(rows.rows).to(device), torch.from_numpy(rows.block_ids).to(device), mask)

    def attend(self, query: Any, store: Any, shape: LlamaShape) -> Any:
        """Return the attention of one row each, [sequence, head, head width].

        The query heads that share a key head are taken as rows of one query.
        """
        count = len(query)
        key, value = _kept(store, self._block_ids, shape)
        heads = query.view(count, shape.kv_heads, shape.group, shape.head_width)
        out = functional.scaled_dot_product_attention(heads, key, value, attn_mask=self._mask)
        return out.reshape(count, shape.heads, shape.head_width)


def _kept(store: Any, block_ids: Any, shape: LlamaShape) -> tuple[Any, Any]:
    """Copy the keys and the values of pages [sequence, page]: [sequence, kv head, key, head width] each."""
    size = (len(block_ids), -1, shape.kv_heads, shape.head_width)
    return (
        store[:, 0][block_ids].view(size).transpose(1, 2),
        store[:, 1][block_ids].view(size).transpose(1, 2),
    )


def _rotated(heads: Any, rotation: tuple[Any, Any]) -> Any:
    """Apply RoPE: rotate the pairs (i, i + head_width / 2) of each head; `heads` is [row, head, head width]."""
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
