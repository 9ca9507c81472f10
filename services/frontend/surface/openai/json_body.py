"""JSON bodies of clients: decoded into typed structures, and refused by name. Pure.

msgspec checks types, unknown fields, encoding and nesting while it decodes.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

from kvmesh.errors import MeshError, Violation, invalid

T = TypeVar("T")

ABSENT: Final = msgspec.Raw()
"""Value of a field that is not decoded, and is not there."""

BODY: Final = "(body)"
"""Stands for the whole body where a field's path is expected."""

_AT: Final = re.compile(r"^(?P<what>.*?) - at `\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING: Final = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)
_EXPECTED: Final = re.compile(r"^Expected `(?P<allowed>.*)`, got `(?P<found>.*)`$", re.DOTALL)
_NAME_CHARACTERS_MAX: Final = 128


class JsonReader:
    """Decodes bodies of one type, or fields with the path `path`."""

    def __init__(self, kind: Any, path: str = "") -> None:
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)
        self._path = path

    def read(self, data: bytes) -> Any:
        """Return the structure in `data`.

        Raises MeshError: MESSAGE_MALFORMED (no JSON), INVALID_UTF8, FIELD_UNKNOWN, FIELD_OUT_OF_RANGE (another type).
        """
        if not data.strip(b" \t\r\n"):
            raise invalid("MESSAGE_MALFORMED", [Violation(BODY, "empty", "a JSON object")])
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            raise _refused(str(error), self._path) from None
        except msgspec.DecodeError as error:
            raise invalid("MESSAGE_MALFORMED", [Violation(BODY, _fault(error), "a JSON object")]) from None
        except UnicodeDecodeError as error:
            bad = error.object[error.start : error.start + 4].hex(" ")
            raise invalid("INVALID_UTF8", [Violation(BODY, f"text with the bytes {bad}", "UTF-8")]) from None
        except RecursionError:
            raise invalid(
                "MESSAGE_MALFORMED", [Violation(BODY, "nested too deep", "a JSON object of few levels")]
            ) from None


def _fault(error: Exception) -> str:
    return f"not JSON ({str(error)[:160]})"


def is_set(value: msgspec.Raw) -> bool:
    """Return True if a field that is not decoded is there, and not null."""
    return bytes(value).strip() not in (b"", b"null")


def bounded(name: str, value: msgspec.Raw, reader: JsonReader, bytes_max: int) -> Any:
    """Return the value of the field `name`, or None. Decoded, it may take thirty times its bytes. Raises MeshError."""
    if not is_set(value):
        return None
    data = bytes(value)
    if len(data) > bytes_max:
        raise invalid(
            "FIELD_OUT_OF_RANGE", [Violation(name, f"{len(data)} bytes long", f"at most {bytes_max} bytes")]
        )
    return reader.read(data)


def _refused(text: str, before: str) -> MeshError:
    """Return the refusal that msgspec's `text` explains. `before`: path of the decoded field."""
    found = _AT.match(text)
    path, what = (found["path"], found["what"]) if found is not None else ("", text)
    if before:
        path = f"{before}{'' if not path or path.startswith('[') else '.'}{path}"
    unknown = _UNKNOWN.match(what)
    if unknown is not None:
        name = unknown["name"][:_NAME_CHARACTERS_MAX]
        field = f"{path}.{name}" if path else name
        return invalid(
            "FIELD_UNKNOWN",
            [Violation(field, "unknown", "docs/openai.md lists the fields that are served", is_clause=True)],
        )
    missing = _MISSING.match(what)
    if missing is not None:
        field = f"{path}.{missing['name']}" if path else missing["name"]
        return invalid("FIELD_OUT_OF_RANGE", [Violation(field, "missing", "a value")])
    expected = _EXPECTED.match(what)
    if expected is not None:
        value, allowed = f"of type {expected['found']}", f"{expected['allowed'].replace(' | ', ' or ')}"
        return invalid("FIELD_OUT_OF_RANGE", [Violation(path or BODY, value, allowed)])
    return invalid("FIELD_OUT_OF_RANGE", [Violation(path or BODY, "wrong", what, is_clause=True)])
