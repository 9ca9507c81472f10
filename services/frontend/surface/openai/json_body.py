"""JSON bodies of clients: decoded into typed structures, and refused by name. Pure.

msgspec checks types, unknown fields, encoding and nesting while it decodes.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

from kvmesh.errors import MeshError, Violation, invalid

T = TypeVar("T")

BODY: Final = "(body)"
"""Stands for the whole body where a field's path is expected."""

_AT: Final = re.compile(r"^(?P<what>.*?) - at `\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_EXPECTED: Final = re.compile(r"^Expected `(?P<allowed>.*)`, got `(?P<found>.*)`$", re.DOTALL)
_NAME_CHARACTERS_MAX: Final = 128


class JsonReader:
    """Decodes bodies of one type."""

    def __init__(self, kind: type[Any]) -> None:
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)

    def read(self, data: bytes) -> Any:
        """Return the structure in `data`.

        Raises MeshError: MESSAGE_MALFORMED (no JSON), INVALID_UTF8, FIELD_UNKNOWN, FIELD_OUT_OF_RANGE (another type).
        """
        if not data.strip(b" \t\r\n"):
            raise invalid("MESSAGE_MALFORMED", [Violation(BODY, "empty", "a JSON object")])
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            raise _refused(str(error)) from None
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


def _refused(text: str) -> MeshError:
    """Return the refusal that msgspec's `text` explains."""
    found = _AT.match(text)
    path, what = (found["path"], found["what"]) if found is not None else ("", text)
    unknown = _UNKNOWN.match(what)
    if unknown is not None:
        name = unknown["name"][:_NAME_CHARACTERS_MAX]
        field = f"{path}.{name}" if path else name
        return invalid(
            "FIELD_UNKNOWN",
            [Violation(field, "unknown", "docs/openai.md lists the fields that are served", is_clause=True)],
        )
    expected = _EXPECTED.match(what)
    if expected is not None:
        value, allowed = f"of type {expected['found']}", f"{expected['allowed'].replace(' | ', ' or ')}"
        return invalid("FIELD_OUT_OF_RANGE", [Violation(path or BODY, value, allowed)])
    return invalid("FIELD_OUT_OF_RANGE", [Violation(path or BODY, "wrong", what, is_clause=True)])
