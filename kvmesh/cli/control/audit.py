"""Entries of the audit stream `{mesh}:control:events`, for people and for programs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from google.protobuf.timestamp_pb2 import Timestamp

from kvmesh.cli.control.rollout_tables import TimeText
from kvmesh.cli.fitted_table import Column, FittedTable

EVENTS_MAX: Final = 10_000
"""Approximate length of the stream."""

COLUMNS: Final = (
    Column("at"),
    Column("by", rank=2),
    Column("from", rank=4),
    Column("event"),
    Column("target", rank=1),
    Column("result", is_text=True),
    Column("details", rank=3, is_text=True),
)
OWN: Final = "control plane"
"""Author of an event without an operator."""

REPLICA_EVENTS: Final = "replica"
"""Beginning of the events about processes, for example "replica.cordon"."""

REGION_EVENTS: Final = "region"
"""Beginning of the events about regions, for example "region.drain"."""


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One entry."""

    id: str
    """Id in the stream: Unix time in milliseconds and a number."""
    what: str
    target: str
    result: str
    by: str
    """Name in the operator's certificate. Empty: the control plane itself."""
    source: str
    """Address of the operator. Empty: the control plane itself."""
    process_id: str
    """The control process that wrote the entry."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Values before and after, the reason, and fields of a later release."""

    @property
    def at_ms(self) -> int:
        """Unix time of the entry in milliseconds; 0 if the id is not of Redis."""
        head = self.id.partition("-")[0]
        return int(head) if head.isascii() and head.isdecimal() else 0

    def as_dict(self) -> dict[str, Any]:
        """Return the entry for programs."""
        names = ("id", "at_ms", "by", "source", "what", "target", "result", "process_id")
        return {**{name: getattr(self, name) for name in names}, "details": dict(self.details)}


def event_of(entry_id: bytes, fields: Mapping[bytes, bytes]) -> AuditEvent:
    """Return the event of an entry. Unreadable parts stay as text, because the stream is evidence."""
    texts = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in fields.items()}
    known = {name: texts.pop(name, "") for name in ("what", "target", "result", "by", "source", "process_id")}
    details = _details(texts.pop("details", ""))
    return AuditEvent(id=entry_id.decode(errors="replace"), details={**details, **texts}, **known)


def cells(event: AuditEvent, time_text: TimeText) -> tuple[str, ...]:
    """Return the columns of an event. An entry may be hostile, so nothing in it formats the terminal."""
    at = time_text(Timestamp(seconds=event.at_ms // 1000))
    details = ", ".join(f"{key} {value}" for key, value in event.details.items())
    texts = (event.by or OWN, event.source, event.what, event.target, event.result, details)
    return (at, *(_printable(text) or "-" for text in texts))


def line(event: AuditEvent, time_text: TimeText) -> str:
    """Return an event in one line, for `--follow`."""
    at, by, source, what, target, result, details = cells(event, time_text)
    place = f" from {source}" if source != "-" else ""
    more = f" ({details})" if details != "-" else ""
    return f"{at}  {by}{place}: {what} {target}: {result}{more}"


def table(events: Iterable[AuditEvent], time_text: TimeText) -> FittedTable:
    """Return one row per event, the oldest first."""
    made = FittedTable(COLUMNS)
    for event in events:
        made.add_row(*cells(event, time_text))
    return made


def own_fields(
    *, what: str, target: str, result: str, by: str, source: str, details: Mapping[str, str]
) -> Sequence[str]:
    """Return the words of an entry that a command writes itself, in the order of XADD."""
    fields = {
        "process_id": "kvmesh",
        "what": what,
        "target": target,
        "result": result,
        "by": by,
        "source": source,
        "details": msgspec.json.encode(details).decode(),
    }
    return [word for pair in fields.items() for word in pair]


def _details(text: str) -> dict[str, str]:
    try:
        return msgspec.json.decode(text.encode(), type=dict[str, str]) if text else {}
    except msgspec.DecodeError:
        return {"details": text}


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)
