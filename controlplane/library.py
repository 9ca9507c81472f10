"""The documents of one control process as the core decides by them: rollouts, and what operators asked for. Pure.

The highest revision counts. The store puts back what Redis lost (`store.documents`). A document that counts without a
write, because it takes traffic back, is here alone: the leader writes it later.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from controlplane.actions import AidKind, DocumentKind, WriteDocument
from controlplane.rollouts import document as documents
from controlplane.rollouts.document import (
    DOCUMENT_BYTES_MAX,
    ROLLOUTS_MAX,
    TIMESTAMP_MAX_S,
    DocumentError,
    RolloutDocument,
)
from controlplane.snapshots import desired as desired_documents
from controlplane.snapshots.desired import Desired
from kvmesh.snapshot.published import Published

DESIRED: Final = "desired"
"""Name of the desired document, beside the ids of rollouts."""

Document: TypeAlias = RolloutDocument | Desired


@dataclass(frozen=True, slots=True)
class StoreRead:
    """Answer of Redis to a read."""

    rollouts: Mapping[str, bytes]
    desired: bytes | None
    board: Published | None
    """The snapshot in Redis. None: there is none, or an unreadable one."""
    number: int
    """Highest number of a term."""
    aids: Mapping[AidKind, Mapping[str, bytes]] = field(default_factory=dict)
    """Packages and registered prefixes, by kind and name."""
    shadows: Mapping[str, bytes] = field(default_factory=dict)
    """Documents of shadows by id."""


class Library:
    """See the module."""

    def __init__(self) -> None:
        self.desired = Desired()
        self.problems: dict[str, str] = {}
        """Documents in Redis that cannot be read, with the reason."""
        self._rollouts: dict[str, RolloutDocument] = {}
        self._stored: dict[str, tuple[bytes, int]] = {}
        """Documents in Redis at the last read, with their revisions."""

    @property
    def rollouts(self) -> list[RolloutDocument]:
        """All rollouts, the latest last."""
        return sorted(self._rollouts.values(), key=lambda each: (each.origin.started_s, each.id))

    @property
    def running(self) -> RolloutDocument | None:
        """The rollout that is not over."""
        return next((each for each in reversed(self.rollouts) if not each.is_final), None)

    @property
    def current(self) -> RolloutDocument | None:
        """The running rollout, else the last one."""
        return self.running or next(reversed(self.rollouts), None)

    def start_s(self, wall_s: float) -> float:
        """Return the time of a rollout that starts at `wall_s`: after that of every known one, whatever the clocks did.

        Rollouts are ordered by their start. An earlier one that counted as the last would decide about the stable pool.
        """
        latest_s = max((each.origin.started_s for each in self._rollouts.values()), default=0.0)
        return min(max(wall_s, latest_s + 1), TIMESTAMP_MAX_S)

    def rollout(self, name: str) -> RolloutDocument | None:
        """Return the rollout `name`; for an empty name `current`."""
        return self._rollouts.get(name) if name else self.current

    def learn(self, read: StoreRead, *, is_leader: bool) -> None:
        """Take later revisions from Redis. A follower also takes another document of an equal revision."""
        for name, data in read.rollouts.items():
            if self._is_known(name, data):
                continue
            try:
                found = documents.decode(name, data)
            except DocumentError as error:
                self.problems[name] = str(error)
                continue
            self._stored[name] = (data, found.revision)
            known = self._rollouts.get(name)
            if known is None or found.revision > known.revision - (not is_leader):
                self._rollouts[name] = found
        if read.desired is not None and not self._is_known(DESIRED, read.desired):
            self._learn_desired(read.desired, is_leader=is_leader)
        for name in self._stored.keys() - read.rollouts.keys() - {DESIRED}:
            del self._stored[name]
        if read.desired is None:
            self._stored.pop(DESIRED, None)
        self._trim()

    def _is_known(self, name: str, data: bytes) -> bool:
        """True if `data` was read before. Else forget what was known of it."""
        if name in self._stored and self._stored[name][0] == data:
            return True
        self._stored.pop(name, None)
        self.problems.pop(name, None)
        return False

    def _learn_desired(self, data: bytes, *, is_leader: bool) -> None:
        try:
            found = desired_documents.decode(data)
        except ValueError as error:  # msgspec.DecodeError and ValidationError
            self.problems[DESIRED] = str(error)
            return
        self._stored[DESIRED] = (data, found.revision)
        if found.revision > self.desired.revision - (not is_leader):
            self.desired = found

    def adopt(self, document: Document) -> None:
        """Take a document that was written, or that counts without a write."""
        if isinstance(document, Desired):
            self.desired = document
        else:
            self._rollouts[document.id] = document
            self._trim()

    def unwritten(self, read: StoreRead) -> WriteDocument | None:
        """Return the write of a document that counts here and is not in `read`, one at a time.

        An unreadable document is left alone: a later release may have written it.
        """
        for rollout in reversed(self.rollouts):
            found = self._revision_in(read.rollouts.get(rollout.id), rollout.id)
            if found is not None and found < rollout.revision:
                with suppress(DocumentError):  # too large to be written: it counts in memory
                    return writing(0, rollout, found)
        found = self._revision_in(read.desired, DESIRED)
        if found is not None and found < self.desired.revision:
            with suppress(DocumentError):
                return writing(0, self.desired, found)
        return None

    def revision(self, document: Document) -> int:
        """Return the known revision of a document; 0 for a new one."""
        if isinstance(document, Desired):
            return self.desired.revision
        known = self._rollouts.get(document.id)
        return known.revision if known is not None else 0

    def _revision_in(self, data: bytes | None, name: str) -> int | None:
        """Return the revision in Redis; 0 without a document, None for an unreadable one."""
        if data is None:
            return 0
        return self._stored[name][1] if name in self._stored else None

    def _trim(self) -> None:
        for old in self.rollouts[:-ROLLOUTS_MAX]:
            if old.is_final:
                del self._rollouts[old.id]


def writing(number: int, document: Document, replaces: int) -> WriteDocument:
    """Return the write `number` of a document. `replaces`: the revision that Redis may have at most.

    Raises DocumentError if the document is too large.
    """
    if isinstance(document, Desired):
        data = desired_documents.encode(document)
        if len(data) > DOCUMENT_BYTES_MAX:
            raise DocumentError(
                f"the document of cordons has {len(data)} bytes; up to {DOCUMENT_BYTES_MAX} are allowed"
            )
        return WriteDocument(DocumentKind.DESIRED, "", data, document.revision, replaces, number)
    data = documents.encode(document)
    return WriteDocument(DocumentKind.ROLLOUT, document.id, data, document.revision, replaces, number)
