"""Input tensors of a ModelInferRequest: from bytes to values, checked against their declaration. Pure.

Source: KServe v2 (kserve/open-inference-protocol, inference_grpc.md), Triton's extension of binary tensor data.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvmesh.errors import MeshError, Violation, invalid

BYTES: Final = "BYTES"
BOOL: Final = "BOOL"
INT32: Final = "INT32"
UINT64: Final = "UINT64"
FP32: Final = "FP32"

ELEMENTS_MAX: Final = 1_024
"""Elements of a BYTES tensor."""

_LENGTH_BYTES: Final = 4
"""Length prefix of each element of a BYTES tensor."""


class _Datatype(NamedTuple):
    code: str
    """Type code of `array`."""
    contents: str
    """Field of InferTensorContents."""


_DATATYPES: Final[Mapping[str, _Datatype]] = {
    BOOL: _Datatype("B", "bool_contents"),
    INT32: _Datatype("i", "int_contents"),
    UINT64: _Datatype("Q", "uint64_contents"),
    FP32: _Datatype("f", "fp32_contents"),
    BYTES: _Datatype("", "bytes_contents"),
}


class Declared(NamedTuple):
    """A tensor of a model, as its metadata and its configuration say."""

    name: str
    datatype: str
    dims: tuple[int, ...] = (1,)
    """Without the batch; -1: any size."""


def values(declared: Declared, tensor: Any, raw: bytes | None) -> Sequence[Any]:
    """Return the values of `tensor`, an InferInputTensor with `raw` as its raw contents, or None.

    The batch must be 1. Raises MeshError (FIELD_OUT_OF_RANGE) with the input's name.
    """
    name, datatype = declared.name, declared.datatype
    if tensor.datatype != datatype:
        raise refused(name, f"of datatype {tensor.datatype[:32]!r}", datatype)
    _check_parameters(name, tensor.parameters)
    count = _count(declared, tensor.shape)
    if raw is None:
        found = _contents(name, datatype, tensor.contents)
        if len(found) != count:
            raise refused(name, f"{len(found)} elements", f"{count} elements, as its shape says,")
        return found
    if tensor.HasField("contents"):
        raise refused(name, "in contents and in raw_input_contents", "one of them")
    if datatype == BYTES:
        return _elements(name, raw, count)
    code = _DATATYPES[datatype].code
    found = array(code)
    if len(raw) != count * found.itemsize:
        size = f"{count * found.itemsize} bytes, as its shape says,"
        raise refused(name, f"{len(raw)} bytes in raw_input_contents", size)
    found.frombytes(raw)
    return found


def texts(name: str, elements: Sequence[bytes]) -> list[str]:
    """Return the elements of the input `name` as texts. Raises MeshError (INVALID_UTF8)."""
    found = []
    for element in elements:
        try:
            found.append(element.decode())
        except UnicodeDecodeError as error:
            bad = element[error.start : error.start + 4].hex(" ")
            what = Violation(name, f"bytes {bad} at offset {error.start}", "valid UTF-8")
            raise invalid("INVALID_UTF8", [what]) from None
    return found


def refused(name: str, what: str, allowed: str) -> MeshError:
    """Return the refusal of a value of the input or parameter `name`."""
    return invalid("FIELD_OUT_OF_RANGE", [Violation(name, what, allowed)])


def _count(declared: Declared, shape: Sequence[int]) -> int:
    """Return the elements of a tensor with `shape`. Raises MeshError."""
    wanted = (1, *declared.dims)
    fits = len(shape) == len(wanted) and all(
        (each >= 0 if size == -1 else each == size) for each, size in zip(shape, wanted, strict=True)
    )
    if not fits:
        found = list(shape[:8])
        raise refused(
            declared.name,
            f"of shape {found}",
            f"{list(wanted)}, where -1 is any size and the first is the batch,",
        )
    return math.prod(shape)


def _check_parameters(name: str, parameters: Mapping[str, Any]) -> None:
    for key in parameters:
        raise refused(
            name, f"with the parameter {key[:64]!r}", "no parameter of a tensor, such as shared memory,"
        )


def _contents(name: str, datatype: str, contents: Any) -> Sequence[Any]:
    field = _DATATYPES[datatype].contents
    for descriptor, _ in contents.ListFields():
        if descriptor.name != field:
            raise refused(name, f"in {descriptor.name}", f"{field} for {datatype}")
    found: Sequence[Any] = getattr(contents, field)
    if datatype == BYTES and len(found) > ELEMENTS_MAX:
        raise refused(name, f"{len(found)} elements", f"at most {ELEMENTS_MAX}")
    return found


def _elements(name: str, raw: bytes, count: int) -> list[bytes]:
    """Return the elements of a BYTES tensor, each behind its length."""
    if count > ELEMENTS_MAX:
        raise refused(name, f"{count} elements", f"at most {ELEMENTS_MAX}")
    found, at = [], 0
    for index in range(count):
        start = at + _LENGTH_BYTES
        if start > len(raw):
            raise refused(
                name,
                f"{len(raw)} bytes in raw_input_contents, which end in the length of element {index}",
                "a length of 4 bytes before each element",
            )
        at = start + int.from_bytes(raw[at:start], "little")
        if at > len(raw):
            what = f"an element {index} of {at - start} bytes, {len(raw) - start} of them there"
            raise refused(name, what, "a length that the bytes have")
        found.append(raw[start:at])
    if at != len(raw):
        raise refused(
            name, f"{len(raw) - at} bytes longer than its elements", f"{count} elements, as its shape says,"
        )
    return found
