"""Reads the answer of read_documents.lua. Pure."""

from __future__ import annotations

from typing import Any

from controlplane.store.documents import Document, is_name, read_value


def rows(answer: list[Any]) -> tuple[dict[str, Document | None], dict[str, int]]:
    """Return the changed documents and all revisions. A changed document of None is unreadable."""
    changed: dict[str, Document | None] = {}
    revisions: dict[str, int] = {}
    for at in range(0, len(answer), 3):
        name = answer[at].decode(errors="replace")
        if not is_name(name):
            continue
        value = answer[at + 2]
        document = read_value(value) if value else None
        if value:
            changed[name] = document
        revisions[name] = int(answer[at + 1]) if not value or document is not None else 0
    return changed, revisions
