"""The slow twin of the step-frame codec: one number after the other, as the README of the reference engine says it."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field


@dataclass
class Tokens:
    """A row of tokens. `log_probs` None: the row has none. `alternatives`: pairs for each token."""

    slot: int
    position: int
    ids: list[int]
    log_probs: list[float] | None = None
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass
class Frame:
    """The rows of one frame."""

    number: int
    is_last: bool = False
    tokens: list[Tokens] = field(default_factory=list)
    first: list[tuple[int, int, bytes]] = field(default_factory=list)
    final: list[tuple[int, bool]] = field(default_factory=list)
    errors: list[tuple[int, str]] = field(default_factory=list)


def encoded(frame: Frame) -> bytes:
    """Return the bytes of `frame`."""
    has_alternatives = any(any(row.alternatives) for row in frame.tokens)
    out = bytearray()

    def put(kind: str, value: float) -> None:
        out.extend(struct.pack("<" + kind, value))

    put("B", 1)
    put("B", frame.is_last * 1 + has_alternatives * 2)
    put("H", 0)
    put("Q", frame.number)
    for count in (
        len(frame.tokens),
        sum(len(row.ids) for row in frame.tokens),
        len(frame.first),
        len(frame.final),
        len(frame.errors),
    ):
        put("I", count)
    for row in frame.tokens:
        put("I", row.slot)
    for row in frame.tokens:
        put("I", row.position)
    for row in frame.tokens:
        put("I", len(row.ids))
    for row in frame.tokens:
        for one in row.ids:
            put("i", one)
    for row in frame.tokens:
        put("B", 0 if row.log_probs is None else 1)
    for row in frame.tokens:
        for value in row.log_probs or ():
            put("f", value)
    if has_alternatives:
        for row in frame.tokens:
            put("B", len(row.alternatives[0]) if row.alternatives else 0)
        for row in frame.tokens:
            for beside in row.alternatives:
                for one, value in beside:
                    put("i", one)
                    put("f", value)
    for slot, _, _ in frame.first:
        put("I", slot)
    for _, reused, _ in frame.first:
        put("I", reused)
    for _, _, handoff in frame.first:
        put("I", len(handoff))
    for _, _, handoff in frame.first:
        out.extend(handoff)
    for slot, _ in frame.final:
        put("I", slot)
    for _, is_complete in frame.final:
        put("B", is_complete)
    for slot, _ in frame.errors:
        put("I", slot)
    for _, text in frame.errors:
        put("I", len(text.encode()))
    for _, text in frame.errors:
        out.extend(text.encode())
    return bytes(out)
