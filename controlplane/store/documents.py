"""The documents of the control plane as one process knows them, and their form in Redis and on disk. Pure.

A stored value has the revision and a digest in front, so that Redis compares them without parsing the document. A process
keeps the highest revision of each document that it has seen stored. It puts back what Redis has lost, or has in a lower
revision.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from controlplane.rollouts.document import DOCUMENT_BYTES_MAX, ROLLOUTS_MAX
from kvmesh.snapshot.content import REVISION_MAX

DESIRED: Final = ""
"""Name of the desired document. Every other document is a rollout, named by its id."""

VALUE_BYTES_MAX: Final = DOCUMENT_BYTES_MAX + 128
"""Largest stored value: a document with its revision and digest. A larger one is ignored."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VALUE: Final = re.compile(
    rb'\{"revision":([0-9]{1,16}),"digest":"([0-9a-f]{16})","document":(.*)\}', re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Document:
    """One stored document."""

    revision: int
    data: bytes
    """JSON of the document."""

    @property
    def digest(self) -> str:
        """Digest of the data: two leaders may write different documents of one revision."""
        return hashlib.sha256(self.data).hexdigest()[:16]

    @property
    def stamp(self) -> str:
        """Revision and digest, as read_documents.lua compares them."""
        return f"{self.revision}.{self.digest}"


class _Position(msgspec.Struct, frozen=True):
    state: str = ""
    step: int = 0
    weight_percent: int = 0
    baseline_percent: int = 0
    attestations: msgspec.Raw = msgspec.Raw(b"")


def is_checkpoint(before: Document, after: Document) -> bool:
    """True if a rollout is where it was: `after` only counts its time and its samples on."""
    try:
        first, second = (msgspec.json.decode(each.data, type=_Position) for each in (before, after))
    except msgspec.DecodeError:
        return False
    return bool(first.state) and first == second


@dataclass(frozen=True, slots=True)
class Restore:
    """Redis lacks `document`, or has the revision `replaces` of it."""

    name: str
    document: Document
    replaces: int


def value_of(document: Document) -> bytes:
    """Return the stored value of `document`."""
    head = f'{{"revision":{document.revision},"digest":"{document.digest}","document":'
    return head.encode() + document.data + b"}"


def read_value(value: bytes) -> Document | None:
    """Return the document in a stored value. None: another program wrote it."""
    found = _VALUE.fullmatch(value) if len(value) <= VALUE_BYTES_MAX else None
    if found is None or not 1 <= int(found[1]) <= REVISION_MAX:
        return None
    document = Document(int(found[1]), found[3])
    return document if document.digest.encode() == found[2] else None


def is_name(name: str) -> bool:
    """True if `name` names a document: the desired one, or a rollout."""
    return name == DESIRED or _NAME.fullmatch(name) is not None


class Documents:
    """See the module.

    INVARIANT: revisions never go back. INVARIANT: at most `rollouts_max` rollouts. Those with the lowest ids, the earliest
    ones, are removed first.
    """

    def __init__(
        self, known: Mapping[str, Document] | None = None, *, rollouts_max: int = ROLLOUTS_MAX
    ) -> None:
        self._rollouts_max = rollouts_max
        self._known = dict(known or {})
        self._trim()

    @property
    def rollouts(self) -> dict[str, bytes]:
        """JSON of each rollout by its id, in the order of ids."""
        return {name: self._known[name].data for name in sorted(self._known) if name != DESIRED}

    @property
    def desired(self) -> bytes | None:
        """JSON of the desired document."""
        found = self._known.get(DESIRED)
        return found.data if found else None

    def names(self) -> set[str]:
        """Return the names of all known documents."""
        return set(self._known)

    def revision(self, name: str) -> int:
        """Return the known revision of a document, 0 for none."""
        found = self._known.get(name)
        return found.revision if found else 0

    def get(self, name: str) -> Document | None:
        """Return a document."""
        return self._known.get(name)

    def take(self, found: Mapping[str, Document | None], revisions: Mapping[str, int]) -> list[Restore]:
        """Take what Redis has: the changed documents, and the revision of every one. Return what to put back.

        A changed document of None is unreadable. At an equal revision the document of Redis counts.
        """
        for name, document in found.items():
            if document is not None and document.revision >= self.revision(name):
                self._known[name] = document
        self._trim()
        return [
            Restore(name, document, revisions.get(name, 0))
            for name, document in sorted(self._known.items())
            if document.revision > revisions.get(name, 0)
        ]

    def stored(self, name: str, document: Document) -> None:
        """Note that Redis took `document`."""
        if document.revision >= self.revision(name):
            self._known[name] = document
        self._trim()

    def forget(self, names: Iterable[str]) -> None:
        """Forget documents that were removed from Redis."""
        for name in names:
            self._known.pop(name, None)

    def _trim(self) -> None:
        rollouts = sorted(name for name in self._known if name != DESIRED)
        for name in rollouts[: max(0, len(rollouts) - self._rollouts_max)]:
            del self._known[name]


def known_stamps(documents: Documents) -> Iterable[str]:
    """Yield name and stamp of each known document, as arguments of read_documents.lua."""
    for name in sorted(documents.names()):
        found = documents.get(name)
        assert found is not None
        yield name
        yield found.stamp
