"""The Redis of a simulated control plane, which forgets and rewinds, and what each control process has copied from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from controlplane.actions import DocumentKind, WriteDocument
from controlplane.leadership import LEASE_S, Holder, LeaseAnswer
from controlplane.library import StoreRead
from controlplane.rollouts import document as documents
from controlplane.rollouts.document import RolloutDocument
from controlplane.store.documents import DESIRED, Documents
from controlplane.store.documents import Document as StoredDocument
from kvmesh.snapshot.published import Published


class Dump(NamedTuple):
    """The documents of one time."""

    rollouts: dict[str, tuple[int, bytes]]
    desired: tuple[int, bytes] | None


class Redis:
    """One Redis: a lease, a term, documents, the board. `is_up` and the partitions decide who reaches it."""

    def __init__(self, now_s: Callable[[], float], on_expired: Callable[[Holder], None]) -> None:
        self._now_s = now_s
        self._on_expired = on_expired
        """Called when a process takes a lease that ran out, with the holder before."""
        self.is_up = True
        self.flush()
        self.has_lost = False
        """True once it forgot or rewound anything."""
        self.written: list[RolloutDocument] = []
        """Every rollout document that was ever written."""

    def flush(self) -> None:
        """Lose everything."""
        self.has_lost = True
        self.lease: tuple[Holder, float] | None = None
        self.number = 0
        self.rollouts: dict[str, tuple[int, bytes]] = {}
        self.desired: tuple[int, bytes] | None = None
        self.board: Published | None = None
        self.undo: list[Callable[[], None]] = []

    def dump(self) -> Dump:
        """Return a copy of the documents."""
        return Dump(dict(self.rollouts), self.desired)

    def restore(self, dump: Dump) -> None:
        """Start anew with an old dump. The snapshot is not in it."""
        self.flush()
        self.rollouts, self.desired = dict(dump.rollouts), dump.desired

    def lose_last_write(self) -> None:
        """Fail over to a replica that lacks the last write."""
        self.has_lost = True
        if self.undo:
            self.undo.pop()()

    def claim(self, holder: Holder, number: int) -> LeaseAnswer:
        """Claim or renew the lease."""
        now_s = self._now_s()
        if self.lease is None or self.lease[1] <= now_s or self.lease[0] == holder:
            if self.lease is not None and self.lease[0] != holder:  # it ran out; a lost one says nothing
                self._on_expired(self.lease[0])
            self.lease = (holder, now_s + LEASE_S)
            self.number = max(self.number, number)
        return LeaseAnswer(self.lease[0], self.number)

    def release(self, holder: Holder) -> None:
        """Delete the lease if it is the holder's own."""
        if self.lease is not None and self.lease[0] == holder:
            self.lease = None

    def read(self, copies: Copies) -> StoreRead:
        """Read all into the copies of a process, and put back what is lost, as `Store` does."""
        rows = dict(self.rollouts) | ({DESIRED: self.desired} if self.desired is not None else {})
        found = {name: StoredDocument(revision, data) for name, (revision, data) in rows.items()}
        for lost in copies.documents.take(found, {name: each.revision for name, each in found.items()}):
            document, is_desired = lost.document, lost.name == DESIRED
            kind = DocumentKind.DESIRED if is_desired else DocumentKind.ROLLOUT
            self.write(
                WriteDocument(kind, lost.name, document.data, document.revision, lost.replaces), is_new=False
            )
        copies.see(self.board)
        if copies.board is not None:
            self.offer(copies.board)
        documents = copies.documents
        return StoreRead(documents.rollouts, documents.desired, copies.board, self.number)

    def write(self, action: WriteDocument, *, is_new: bool = True) -> bool:
        """Write a document by compare-and-set."""
        if action.kind is DocumentKind.DESIRED:
            before = self.desired
            if (before[0] if before else 0) > action.replaces:
                return False
            self.desired = (action.revision, action.data)
            self.undo.append(lambda: setattr(self, "desired", before))
            return True
        known = self.rollouts.get(action.name)
        if (known[0] if known else 0) > action.replaces:
            return False
        self.rollouts[action.name] = (action.revision, action.data)
        if is_new:
            self.written.append(documents.decode(action.name, action.data))
        self.undo.append(lambda: self._back(action.name, known))
        return True

    def offer(self, snapshot: Published) -> None:
        """Write the board unless a higher snapshot is there."""
        if self.board is None or snapshot.name.order > self.board.name.order:
            before, self.board = self.board, snapshot
            self.undo.append(lambda: setattr(self, "board", before))

    def put_back(self, document: RolloutDocument) -> None:
        """Replace a document by an old revision of it."""
        self.has_lost = True
        self.rollouts[document.id] = (document.revision, documents.encode(document))

    def _back(self, name: str, known: tuple[int, bytes] | None) -> None:
        if known is None:
            self.rollouts.pop(name, None)
        else:
            self.rollouts[name] = known


class Copies:
    """What one control process has of the documents and the board: in memory, and on its disk."""

    def __init__(self) -> None:
        self.documents = Documents()
        self.board: Published | None = None
        self.unstored: dict[str, StoredDocument] = {}
        """Documents on disk whose write had no answer."""

    def see(self, snapshot: Published | None) -> None:
        """Keep the highest snapshot."""
        if snapshot is not None and (self.board is None or snapshot.name.order > self.board.name.order):
            self.board = snapshot

    def restarted(self) -> Copies:
        """Return the copies of the next boot, from the disk."""
        after, documents = Copies(), self.documents
        known = {name: found for name in documents.names() if (found := documents.get(name)) is not None}
        after.documents, after.board = Documents(known | self.unstored), self.board
        return after
