"""Protobuf encoding of responses by hand: the parts that differ from token to token, behind parts that stay. Pure.

A response takes 2.1 us as a protobuf message, and 0.4 us as joined bytes.
"""

from __future__ import annotations

from typing import Final

from services.frontend.surface.kserve.tensors import BYTES

_LENGTH_DELIMITED: Final = 2
_BOOL: Final = 1
_STRING: Final = 3
_UINT64: Final = 5
"""Fields of InferParameter, by number."""

_SHORT: Final = tuple(bytes((value,)) for value in range(0x80))
"""Varints of one byte."""


def varint(value: int) -> bytes:
    """Return `value`, 0 to 2^64 - 1, as a varint."""
    if value < len(_SHORT):
        return _SHORT[value]
    made = bytearray()
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def field(number: int, data: bytes) -> bytes:
    """Return a length-delimited field."""
    return varint(number << 3 | _LENGTH_DELIMITED) + varint(len(data)) + data


def tensor(name: str, datatype: str, *shape: int) -> bytes:
    """Return the field `outputs` of a ModelInferResponse."""
    sizes = b"".join(varint(size) for size in shape)
    return field(5, field(1, name.encode()) + field(2, datatype.encode()) + field(3, sizes))


def raw(data: bytes) -> bytes:
    """Return one field `raw_output_contents`."""
    return b"\x32" + varint(len(data)) + data


def raw_text(text: bytes) -> bytes:
    """Return the field `raw_output_contents` of a BYTES tensor with one element."""
    return raw(len(text).to_bytes(4, "little") + text)


def parameter(name: str, value: bool | int | str) -> bytes:
    """Return a field `parameters` of a response. An int is a uint64_param."""
    match value:
        case bool():
            choice = varint(_BOOL << 3) + varint(value)
        case int():
            choice = varint(_UINT64 << 3) + varint(value)
        case str():
            choice = field(_STRING, value.encode())
    return field(4, field(1, name.encode()) + field(2, choice))


def head(model_name: str, version: str, id_: str) -> bytes:
    """Return the first fields of a ModelInferResponse. Empty ones are left out."""
    texts = (model_name, version, id_)
    return b"".join(field(number, text.encode()) for number, text in enumerate(texts, start=1) if text)


def on_stream(response: bytes, error: str = "") -> bytes:
    """Return a ModelStreamInferResponse with a ModelInferResponse, and with `error` as its error_message."""
    wrapped = b"\x12" + varint(len(response)) + response
    return field(1, error.encode()) + wrapped if error else wrapped


TEXT_SHAPE: Final = (1,)
"""Shape of text_output: TensorRT-LLM's postprocessing sends no batch dimension."""


def text_tensor(name: str) -> bytes:
    """Return the field `outputs` of one text."""
    return tensor(name, BYTES, *TEXT_SHAPE)
