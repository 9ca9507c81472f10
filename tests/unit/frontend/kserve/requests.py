"""Requests for the models of KServe, as bytes, and their translation."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from kvmesh.config import MeshConfig
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.surface import served_versions
from services.frontend.surface.kserve.asked import Inference
from services.frontend.surface.kserve.protocol import service_pb2
from services.frontend.surface.kserve.served_models import CONTRACTS, ServedModels
from services.frontend.surface.kserve.translation import Translation

BY_NAME: Final = {contract.name: contract for contract in CONTRACTS}
MESSAGE_BYTES_MAX: Final = 1 << 20
_CODES: Final = {"INT32": "i", "UINT64": "Q", "FP32": "f", "BOOL": "?"}

REQUIRED: Final[Mapping[str, Mapping[str, Sequence[Any]]]] = {
    "ensemble": {"text_input": [b"hello"], "max_tokens": [5]},
    "tensorrt_llm": {"input_ids": [7, 8, 9], "input_lengths": [3], "request_output_len": [5]},
}
"""The least request of each model."""


@cache
def models() -> ServedModels:
    """Return the models of a mesh without configuration."""
    config = MeshConfig()
    return ServedModels(served_versions.load(config), config.mesh.model)


def translated(message: Any) -> Inference:
    """Return the translation of a ModelInferRequest, or of bytes."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return Translation(models(), MESSAGE_BYTES_MAX).of(data)


def good(message: Any) -> pb.GenerateRequest:
    """Return the request of the mesh for `message`, which is right."""
    found = translated(message)
    assert found.error is None, found.error
    return pb.GenerateRequest.FromString(found.data)


def refusal(message: Any) -> str:
    """Return the error for `message`."""
    found = translated(message)
    assert found.error is not None, found.asked
    assert not found.data
    return str(found.error)


def message(model: str = "ensemble", **inputs: Sequence[Any]) -> Any:
    """Return a request with the required inputs and `inputs`, raw as the stock client sends them."""
    made = service_pb2.ModelInferRequest(model_name=model, id="r-1")
    for name, values in {**REQUIRED[model], **inputs}.items():
        add(made, name, values)
    return made


def add(
    message: Any, name: str, values: Sequence[Any], datatype: str = "", shape: Sequence[int] = ()
) -> None:
    """Add an input with raw contents; datatype and shape are those of its declaration unless given."""
    declared = BY_NAME[message.model_name].inputs.get(name)
    datatype = datatype or (declared.tensor.datatype if declared else "INT32")
    dims = declared.tensor.dims if declared else (1,)
    fixed = [size for size in dims if size != -1]
    rows = fixed[0] if len(fixed) == 1 and len(dims) > 1 else 1
    shape = shape or [1, *(size if size != -1 else len(values) // rows for size in dims)]
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    message.raw_input_contents.append(packed(datatype, values))


def packed(datatype: str, values: Sequence[Any]) -> bytes:
    """Return raw contents."""
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(each)) + each for each in values)
    return struct.pack(f"<{len(values)}{_CODES[datatype]}", *values)
