"""Chooses shape, weights, device and type of a configuration, and loads the decoder of that choice.

The choice is cheap: the launcher makes it to tell the model's facts, and the model's process makes it again and loads.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from engines.reference.config import EngineConfig
from engines.reference.llama.folder import check_weights, read_shape, weight_names
from engines.reference.llama.safetensors import StoredTensor, read_folder
from engines.reference.llama.shape import NAMED, LlamaShape

if TYPE_CHECKING:
    from engines.reference.llama.decoder import LlamaDecoder

_SAMPLE_BYTES: Final = 4096
"""Bytes at the begin and at the end of each tensor that the digest of a folder reads."""


@dataclass(frozen=True, slots=True)
class LlamaChoice:
    """A decoder that is not loaded yet. Without `stored` its weights are drawn."""

    shape: LlamaShape
    device: str
    dtype: str
    seed: int
    folder: Path
    stored: Mapping[str, StoredTensor]
    max_sequence_tokens: int
    digest: str

    def load(self) -> LlamaDecoder:
        """Put the weights on the device. Raises ValueError and OSError."""
        import torch  # type: ignore[import-not-found, unused-ignore]

        from engines.reference.llama import weights
        from engines.reference.llama.decoder import LlamaDecoder

        if self.device == "cpu":
            torch.set_num_threads(1)  # engines of a mesh share the cores of one machine
        dtype = getattr(torch, self.dtype)
        self._check_memory(dtype.itemsize)
        if self.stored:
            made = weights.loaded(self.folder, self.shape, self.stored, self.device, dtype)
        else:
            made = weights.drawn(self.shape, self.seed, self.device, dtype)
        return LlamaDecoder(self.shape, made, self.device, self.max_sequence_tokens)

    def _check_memory(self, value_bytes: int) -> None:
        import torch

        if self.device != "cuda":
            return
        free, needed = torch.cuda.mem_get_info()[0], self.shape.weight_count * value_bytes
        if needed > free:
            raise ValueError(
                f"the weights take {needed / 1e9:.1f} GB of {self.dtype}, but the device has {free / 1e9:.1f} GB free"
            )


def choose(config: EngineConfig) -> LlamaChoice:
    """Return the decoder of a configuration with the arithmetic `torch`.

    Raises ValueError for a folder that cannot be served or a device that is missing, OSError for a file that cannot be
    read.
    """
    device = _device(config.device)
    folder = Path(config.model_dir)
    stored: Mapping[str, StoredTensor] = {}
    if config.torch_shape:
        shape = NAMED[config.torch_shape]
        source = f"{config.torch_shape}-seed{config.torch_seed}-{device}"
    else:
        shape, stored = read_shape(folder), read_folder(folder)
        check_weights(folder, shape, stored)
        source = _digest(shape, stored)
    longest = min(config.max_sequence_tokens, shape.positions)
    digest = f"torch-{source}-{config.dtype}"
    return LlamaChoice(shape, device, config.dtype, config.torch_seed, folder, stored, longest, digest)


def _device(asked: str) -> str:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ValueError(
            "the arithmetic torch needs PyTorch 2.4 or later, which is not installed: pip install torch"
        ) from error
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and not has_cuda:
        raise ValueError(
            f'device = "cuda": PyTorch {torch.__version__} finds no CUDA device; allowed: cpu, auto'
        )
    return asked if asked != "auto" else "cuda" if has_cuda else "cpu"


def _digest(shape: LlamaShape, stored: Mapping[str, StoredTensor]) -> str:
    """Return xxh3_64 over the shape, and over type and both ends of each weight, as 16 hex digits.

    The weights of another training differ there. Reading them whole would take as long as loading them.
    """
    digest = xxhash.xxh3_64(repr(shape).encode())
    for name in weight_names(shape):
        tensor = stored[name]
        data = tensor.data()
        digest.update(f"{name} {tensor.dtype}".encode())
        digest.update(data[:_SAMPLE_BYTES])
        digest.update(data[-_SAMPLE_BYTES:])
    return digest.hexdigest()
