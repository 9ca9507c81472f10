"""Client messages from bytes: checks size, form, text encoding and unknown fields, and refuses each by name.

Pure. protobuf reports only that parsing failed. This module reports the position, so that a client with a bad byte or a
newer proto learns the name of the field.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from kvmesh.errors import MAX_VIOLATIONS, MeshError, Violation, invalid
from kvmesh.inference.v1 import inference_pb2 as pb

LOOK_BYTES_MIN: Final = 8192
"""A message from this size on is checked field by field before it is parsed. A smaller one cannot hold many fields."""


def parse(data: bytes, bytes_max: int, tokens_max: int) -> pb.GenerateRequest:
    """Return the request in `data`. Raises MeshError (INVALID_ARGUMENT) with field, value and range.

    `tokens_max`: tokens of the longest context. It bounds the number of fields and numbers that are parsed: two bytes may
    be a chat message, which takes some hundred bytes of memory once it is parsed.
    """
    if len(data) > bytes_max:
        what = Violation(MESSAGE, f"{len(data)} bytes", f"at most {bytes_max} bytes")
        raise invalid("MESSAGE_TOO_LARGE", [what])
    if len(data) >= LOOK_BYTES_MIN:
        look(data, pb.GenerateRequest.DESCRIPTOR, fields_bound(tokens_max), 2 * tokens_max)
    message = pb.GenerateRequest()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise malformed(data, pb.GenerateRequest.DESCRIPTOR) from None
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        again = pb.GenerateRequest.FromString(data)
        found = [
            Violation(path, f"unknown field {number}", "only fields of kvmesh.inference.v1")
            for path, number in islice(_unknown(again, ""), MAX_VIOLATIONS)
        ]
        raise invalid("FIELD_UNKNOWN", found)
    return message


def may_resume(data: bytes) -> bool:
    """Return True if the request in `data` may have a resume token, without parsing it.

    True also if the request has more than _GLANCE_FIELDS fields, or is truncated.
    """
    at, end = 0, len(data)
    try:
        for _ in range(_GLANCE_FIELDS):
            if at >= end:
                return False
            key = data[at]
            if (
                key & 0x87 == 2 and at + 1 < end and data[at + 1] < 0x80
            ):  # the usual case: a short text or message
                if key == _OPTIONS_KEY:
                    return True
                at += 2 + data[at + 1]
                continue
            key, at = _varint(data, at, MESSAGE)
            if key >> 3 == pb.GenerateRequest.OPTIONS_FIELD_NUMBER:
                return True
            if key & 7 == 2:
                length, at = _varint(data, at, MESSAGE)
                at += length
            else:
                at = _skip(data, at, key & 7, MESSAGE)
    except _Truncated:
        return True  # the parser reports the reason
    return True


_OPTIONS_KEY: Final = pb.GenerateRequest.OPTIONS_FIELD_NUMBER << 3 | 2
assert _OPTIONS_KEY < 0x80

_GLANCE_FIELDS: Final = 16
"""Fields that `may_resume` reads. A message has nine; one with more fields than this may have a resume token."""


def fields_bound(tokens_max: int) -> int:
    """Return the most fields of a message: each token may be a chat message or an unpacked id, other fields are few."""
    return min(4 * tokens_max, _FIELDS_MAX) + 1024


_FIELDS_MAX: Final = 65_536
"""More fields than this are never allowed, so longer lists of ids must be packed.

A walk over this many fields takes 0.1 s of CPU (measured once, by hand).
"""


def look(data: bytes, descriptor: Descriptor, fields_max: int, numbers_max: int) -> None:
    """Raise MeshError if the message has too many fields or numbers, or cannot be walked to its end."""
    fields = numbers = 0
    try:
        for path, field, value in _fields(data, descriptor, "", 0):
            fields += 1
            if fields > fields_max:
                what = f"more than {fields_max} fields"
                raise invalid("MESSAGE_TOO_LARGE", [Violation(_group(path), what, f"at most {fields_max}")])
            if value is not None and field is not None and field.cpp_type in _NUMBERS:
                # The longest number has ten bytes.
                too_long = len(value) > 10 * numbers_max
                numbers += numbers_max + 1 if too_long else len(value.translate(None, _CONTINUED))
                if numbers > numbers_max:
                    what = f"more than {numbers_max} numbers"
                    raise invalid(
                        "MESSAGE_TOO_LARGE", [Violation(_group(path), what, f"at most {numbers_max}")]
                    )
    except _Truncated as error:
        raise _truncated(error) from None


_NUMBERS: Final = (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
_CONTINUED: Final = bytes(range(0x80, 0x100))
"""Bytes that do not end a number."""


def _group(path: str) -> str:
    """Return the path of the whole repeated field that `path` is an item of."""
    return (path[: path.rindex("[")] if path.endswith("]") else path) or MESSAGE


MESSAGE: Final = "(message)"
"""Stands for the whole message where a field's path is expected."""


def _unknown(message: Message, path: str) -> Iterator[tuple[str, int]]:
    """Yield (path, number) of the fields outside the proto; a path ends in the number."""
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]  # the stubs lack its iterator
        yield _join(path, str(unknown.field_number)), unknown.field_number
    for descriptor, value in message.ListFields():
        if descriptor.message_type is None:
            continue
        here = _join(path, descriptor.name)
        if isinstance(value, Message):
            yield from _unknown(value, here)
        else:
            for index, each in enumerate(value):
                yield from _unknown(each, f"{here}[{index}]")


def malformed(data: bytes, descriptor: Descriptor) -> MeshError:
    """Return the reason why `data` did not parse: a text that is not UTF-8, or bytes that are not a message."""
    try:
        for path, field, value in _fields(data, descriptor, "", 0):
            if value is None or field is None or field.type != FieldDescriptor.TYPE_STRING:
                continue
            try:
                value.decode("utf-8")
            except UnicodeDecodeError as error:
                bad = value[error.start : error.start + 4].hex(" ")
                what = f"bytes {bad} at offset {error.start}"
                return invalid("INVALID_UTF8", [Violation(path, what, "valid UTF-8")])
    except _Truncated as error:
        return _truncated(error)
    what = f"{len(data)} bytes that do not parse"
    return invalid("MESSAGE_MALFORMED", [Violation(MESSAGE, what, f"a {descriptor.full_name}")])


class _Truncated(Exception):
    def __init__(self, path: str, what: str) -> None:
        super().__init__(what)
        self.path = path


def _truncated(error: _Truncated) -> MeshError:
    return invalid("MESSAGE_MALFORMED", [Violation(error.path or MESSAGE, str(error), "a whole message")])


_DEPTH_MAX: Final = 16


def _fields(
    data: bytes, descriptor: Descriptor, path: str, depth: int
) -> Iterator[tuple[str, FieldDescriptor | None, bytes | None]]:
    """Yield (path, field, value) of every field in the encoded message `data`, outer ones first. Raises _Truncated.

    The field is None if the proto does not have it. In this case, and for a value that is not length-delimited (value
    None), the path is that of the message.
    """
    counts: dict[int, int] = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at, path)
        number, kind = key >> 3, key & 7
        field = descriptor.fields_by_number.get(number)
        if kind != 2:
            at = _skip(data, at, kind, path)
            yield path, field, None
            continue
        length, at = _varint(data, at, path)
        if at + length > len(data):
            raise _Truncated(path, f"field {number} of {length} bytes, {len(data) - at} of them there")
        value, at = data[at : at + length], at + length
        if field is None:
            yield path, None, value
            continue
        here = _join(path, field.name)
        if field.is_repeated:
            index = counts.get(number, 0)
            counts[number] = index + 1
            here = f"{here}[{index}]"
        yield here, field, value
        if field.message_type is not None and depth < _DEPTH_MAX:
            yield from _fields(value, field.message_type, here, depth + 1)


def _varint(data: bytes, at: int, path: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise _Truncated(path, "bytes that end inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _Truncated(path, "a number of more than 10 bytes")


def _skip(data: bytes, at: int, kind: int, path: str) -> int:
    if kind == 0:
        return _varint(data, at, path)[1]
    if kind in (1, 5):
        end = at + (8 if kind == 1 else 4)
        if end <= len(data):
            return end
        raise _Truncated(path, "bytes that end inside a number")
    raise _Truncated(path, f"wire type {kind}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
