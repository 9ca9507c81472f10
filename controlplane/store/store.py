"""The store of one control process. Documents, board and audit stream in Redis; copies in memory and in the state folder.

Every call of Redis is bounded by CALL_S. RedisUnavailable never leaves this module: None stands for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

from controlplane.actions import AidKind, AppendEvent, DocumentKind, WriteAid, WriteDocument
from controlplane.leadership import LeaseAnswer
from controlplane.library import StoreRead
from controlplane.rollouts.document import ROLLOUTS_MAX
from controlplane.store.aids import AidStore
from controlplane.store.audit import AuditStream
from controlplane.store.document_rows import rows
from controlplane.store.documents import (
    DESIRED,
    Document,
    Documents,
    Restore,
    is_checkpoint,
    known_stamps,
    value_of,
)
from controlplane.store.leader_lease import Identity, LeaderLease
from controlplane.store.processes import ProcessLeases
from controlplane.store.shadow_documents import ShadowDocuments
from controlplane.store.snapshot_history import SNAPSHOTS_MAX, PastSnapshot, SnapshotHistory
from controlplane.store.state_folder import StateFolder
from kvmesh.clock import wall_s
from kvmesh.membership.region_claim import RegionClaim
from kvmesh.redis_link import RedisLink, RedisUnavailable, key
from kvmesh.redis_script import Script
from kvmesh.region_sections import UNNAMED
from kvmesh.snapshot.board import Board, Junk, Known, OnBoard, Written, order_of
from kvmesh.snapshot.control_processes import ControlProcess
from kvmesh.snapshot.published import Published
from kvmesh.snapshot.state_file import StateFile

log = logging.getLogger(__name__)

_READ: Final = Script.beside(__file__, "read_documents.lua")
_WRITE: Final = Script.beside(__file__, "write_document.lua")

CHECKPOINT_S: Final = 10.0
"""Least time between two copies on disk of a rollout that is where it was. Redis has it each second; it may be large."""

CALL_S: Final = 2.0
"""Longest call. A script that Redis lacks takes two round trips of up to a second."""

Answer = TypeVar("Answer")


class Store:
    """See the module. One task at a time calls `read` and the writing methods; the leases have lanes of their own."""

    def __init__(
        self,
        redis: RedisLink,
        mesh: str,
        identity: Identity,
        folder: Path | None = None,
        region: str = UNNAMED,
    ) -> None:
        self.folder = StateFolder(folder)
        self.audit = AuditStream(redis, mesh, identity.process_id)
        self.shadows = ShadowDocuments(redis, mesh, folder)
        self._redis = redis
        self._keys = (key(mesh, "control", "rollouts"), key(mesh, "control", "desired"))
        self._number_key = key(mesh, "control", "term")
        self._lists = (key(mesh, "control", "events"), key(mesh, "control", "snapshots"))
        self._mesh = mesh
        self._claim = RegionClaim(redis, mesh, region)
        self._is_foreign = False
        """True while Redis belongs to another region. It then counts as unavailable."""
        self.identify(identity)
        self._history = SnapshotHistory(redis, mesh)
        self._aids = AidStore(redis, mesh, folder)
        self.loaded_aids: dict[AidKind, dict[str, bytes]] = {}
        """Packages and prefixes of the state folder, after `load`."""
        self._board = Board(redis, mesh)
        self._board_file = StateFile(folder)
        self._board_order = ""
        """Order of the last snapshot that was read from the board."""
        self._on_board: Published | None = None
        self._latest: Published | None = None
        """The highest snapshot that this process has seen."""
        self._unrecorded: deque[PastSnapshot] = deque(maxlen=SNAPSHOTS_MAX)
        """Published snapshots that are not in the history yet. The earliest is dropped first."""
        self._documents = Documents()
        self._saved: dict[str, Document] = {}
        """Documents in the state folder."""
        self._saved_s: dict[str, float] = {}
        """Times at which they were written."""

    def identify(self, identity: Identity) -> None:
        """Set the identity with which leases are written: the address is known once the server listens."""
        self._lease = LeaderLease(self._redis, self._mesh, identity)
        self._processes = ProcessLeases(self._redis, self._mesh, identity)

    async def load(self) -> None:
        """Read the state folder, before anything else."""
        self._saved = await asyncio.to_thread(self.folder.read)
        self._documents = Documents(self._saved)
        self._latest = await asyncio.to_thread(self._board_file.read)
        self.loaded_aids = await self._aids.load()
        await self.shadows.load()

    async def claim(self, number: int) -> LeaseAnswer | None:
        """Claim or renew the leader's lease. None: Redis is unavailable, or belongs to another region."""
        answer = await self._ask(lambda: self._claim_lease(number))
        if answer is None:
            self._claim.on_failure()
        return answer

    async def _claim_lease(self, number: int) -> LeaseAnswer | None:
        fault = await self._claim.fault()
        if fault and not self._is_foreign:
            log.error("%s", fault)
        self._is_foreign = bool(fault)
        return None if fault else await self._lease.claim(number)

    async def release(self) -> None:
        """Give the leader's lease and the lease of the process back."""
        await self._ask(self._lease.release)
        await self._ask(self._processes.leave)

    async def renew(self) -> list[ControlProcess] | None:
        """Renew the lease of the process; return the other control processes. None: Redis is unavailable."""
        return await self._ask(self._processes.renew)

    async def read(self) -> StoreRead | None:
        """Read documents, board and the highest number; put back what Redis lost. None: Redis is unavailable."""
        found = await self._ask(self._read)
        if found is not None and self._unrecorded:
            await self._ask(self._record)
        return found

    async def write(self, wanted: WriteDocument) -> bool | None:
        """Write a document by compare-and-set. False: a conflict. None: Redis is unavailable.

        A copy on disk is made unless there is a conflict. A checkpoint that Redis took may wait (CHECKPOINT_S).
        """
        name = DESIRED if wanted.kind is DocumentKind.DESIRED else wanted.name
        document = Document(wanted.revision, wanted.data)
        if wanted.kind is DocumentKind.SHADOW:
            return await self._ask(lambda: self.shadows.write(name, document, wanted.replaces))
        written = await self._ask(lambda: self._write(name, document, wanted.replaces))
        if written is None or (written and self._is_due(name, document)):
            await asyncio.to_thread(self._keep, name, document)
        return written

    async def write_board(self, snapshot: Published) -> bool | None:
        """Write the snapshot to the board. False: the board has a higher one. None: Redis is unavailable."""
        await self._see(snapshot)
        written = await self._ask(lambda: self._board.write(snapshot))
        return None if written is None else written is not Written.LOWER

    async def write_aid(self, wanted: WriteAid) -> None:
        """Write a package or a prefix. Without Redis a later read finds that it is missing."""
        await self._ask(lambda: self._aids.write(wanted))

    async def record(self, past: PastSnapshot, *, is_later: bool = False) -> None:
        """Add a published snapshot to the history. `is_later`: with the next read, because Redis does not answer now."""
        if past not in self._unrecorded:
            self._unrecorded.append(past)
        if not is_later:
            await self._ask(self._record)

    async def history(self, count: int) -> list[PastSnapshot] | None:
        """Return up to `count` published snapshots, the latest first. None: Redis is unavailable."""
        return await self._ask(lambda: self._history.latest(count))

    def append(self, event: AppendEvent) -> None:
        """Log an event and queue it for the audit stream."""
        self.audit.append(event)

    async def flush(self) -> None:
        """Write the queued events."""
        await self._ask(self.audit.flush)

    async def _ask(self, call: Callable[[], Awaitable[Answer]]) -> Answer | None:
        try:
            async with asyncio.timeout(CALL_S):
                return await call()
        except TimeoutError:
            log.warning("Redis at %s did not answer within %g s", self._redis.shown, CALL_S)
            return None
        except RedisUnavailable as unavailable:
            if unavailable.is_corrupt:
                await self._repair()
            return None

    async def _repair(self) -> None:
        """Remove keys of another type. The other keys are repaired by their scripts."""
        for name, kind in zip(self._lists, (b"stream", b"list"), strict=True):
            try:
                async with asyncio.timeout(CALL_S):
                    if await self._redis.execute("TYPE", name) != kind:
                        await self._redis.execute("DEL", name)
            except (TimeoutError, RedisUnavailable):
                return

    async def _read(self) -> StoreRead:
        arguments = tuple(known_stamps(self._documents))
        (found,) = await self._redis.scripts(_READ, [(self._keys, arguments)])
        restores = self._documents.take(*rows(found))
        for restore in restores:
            await self._restore(restore)
        await asyncio.to_thread(self._save)
        number = await self._redis.execute("GET", self._number_key)
        await self._read_board()
        return StoreRead(
            self._documents.rollouts,
            self._documents.desired,
            self._latest,
            _number(number),
            shadows=await self.shadows.read(wall_s()),
            aids=await self._aids.read(),
        )

    async def _restore(self, restore: Restore) -> None:
        log.warning(
            "Redis lost a document; it is put back",
            extra={"document": restore.name or "desired", "revision": restore.document.revision},
        )
        await self._write(restore.name, restore.document, restore.replaces)

    async def _write(self, name: str, document: Document, replaces: int) -> bool:
        arguments = (name, value_of(document), replaces, ROLLOUTS_MAX)
        (answer,) = await self._redis.scripts(_WRITE, [(self._keys, arguments)])
        written, _ = answer
        if written:
            self._documents.stored(name, document)
        return bool(written)

    def _save(self) -> None:
        """Write the documents that changed to the state folder, and remove the others."""
        known = {
            name: document for name in self._documents.names() if (document := self._documents.get(name))
        }
        for name, document in known.items():
            if self._is_due(name, document):
                self._keep(name, document)
        if not known.keys() >= self._saved.keys():
            self.folder.keep_only(set(known))
            self._saved = {name: document for name, document in self._saved.items() if name in known}

    def _is_due(self, name: str, document: Document) -> bool:
        """True if the state folder lacks `document`, unless it has an earlier checkpoint of the last CHECKPOINT_S."""
        saved = self._saved.get(name)
        if saved is None:
            return True
        if saved == document:
            return False
        is_young = monotonic() < self._saved_s.get(name, float("-inf")) + CHECKPOINT_S
        return not (is_young and is_checkpoint(saved, document))

    def _keep(self, name: str, document: Document) -> None:
        if self.folder.write(name, document):
            self._saved[name], self._saved_s[name] = document, monotonic()

    async def _read_board(self) -> None:
        found = await self._board.read(self._board_order)
        if isinstance(found, OnBoard):
            self._board_order, self._on_board = found.order, found.snapshot
            await self._see(found.snapshot)
        elif isinstance(found, Junk):
            log.warning("the board is unreadable and is cleared: %s", found.reason)
            await self._board.clear(found)
        latest = self._latest
        if latest is None:
            return
        if found is None or (isinstance(found, OnBoard | Known) and found.order < order_of(latest.name)):
            await self._board.write(latest)

    async def _record(self) -> None:
        while self._unrecorded:
            await self._history.add(self._unrecorded[0])
            self._unrecorded.popleft()

    async def _see(self, snapshot: Published) -> None:
        if self._latest is None or snapshot.name.order > self._latest.name.order:
            self._latest = snapshot
            await asyncio.to_thread(self._board_file.write, snapshot)


def _number(found: Any) -> int:
    text = found if isinstance(found, bytes) else b""
    return int(text) if text.isdigit() and len(text) <= 16 else 0
