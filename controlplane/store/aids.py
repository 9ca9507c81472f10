"""Aids of warm-ups, packages and registered prefixes, in Redis and in the state folder. Losing one costs a slower warm-up.

Redis has a hash for each kind. A stored value has the revision and a digest in front, as documents have (`documents`).
The state folder follows Redis: a prefix that another process deleted leaves this disk, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from controlplane.actions import AidKind, WriteAid
from controlplane.store.documents import Document, is_name, read_value, value_of
from controlplane.store.state_folder import StateFolder
from controlplane.warmup.packages import PACKAGES_MAX
from controlplane.warmup.prefixes import STORED_MAX
from kvmesh.redis_link import RedisLink, key
from kvmesh.redis_script import Script

_READ: Final = Script.beside(__file__, "read_documents.lua")
_WRITE: Final = Script.beside(__file__, "write_document.lua")

MOST: Final = {AidKind.PACKAGE: PACKAGES_MAX, AidKind.PREFIX: STORED_MAX}
"""Aids of a kind in Redis. Beyond it those with the first names are dropped."""


class AidStore:
    """See the module. `read` and `write` raise RedisUnavailable."""

    def __init__(self, redis: RedisLink, mesh: str, folder: Path | None) -> None:
        self._redis = redis
        # The scripts take a key for the desired document as well. It is never written here.
        self._keys = {
            kind: (key(mesh, "control", kind.value), key(mesh, "control", f"{kind.value}-none"))
            for kind in AidKind
        }
        self._folders = {
            kind: StateFolder(folder / kind.value if folder is not None else None) for kind in AidKind
        }
        self._known: dict[AidKind, dict[str, Document]] = {kind: {} for kind in AidKind}
        self._saved: dict[AidKind, dict[str, Document]] = {kind: {} for kind in AidKind}
        """Aids in the state folder, as far as it took them."""

    async def load(self) -> dict[AidKind, dict[str, bytes]]:
        """Return what the state folder has, by kind and name."""
        found = {}
        for kind, folder in self._folders.items():
            documents = self._saved[kind] = await asyncio.to_thread(folder.read)
            found[kind] = {name: each.data for name, each in documents.items()}
        return found

    async def read(self) -> dict[AidKind, Mapping[str, bytes]]:
        """Return all aids in Redis, by kind and name. Those that were read before are not sent again."""
        calls = [(self._keys[kind], self._stamps(kind)) for kind in AidKind]
        answers = await self._redis.scripts(_READ, calls)
        for kind, rows in zip(AidKind, answers, strict=True):
            self._known[kind] = self._taken(kind, rows)
            await asyncio.to_thread(self._follow, kind)
        return {
            kind: {name: each.data for name, each in known.items()} for kind, known in self._known.items()
        }

    async def write(self, wanted: WriteAid) -> None:
        """Write an aid to the state folder, and to Redis unless Redis has its revision or a later one."""
        document = Document(wanted.revision, wanted.data)
        await asyncio.to_thread(self._save, wanted.kind, wanted.name, document)
        arguments = (wanted.name, value_of(document), wanted.revision - 1, MOST[wanted.kind])
        await self._redis.scripts(_WRITE, [(self._keys[wanted.kind], arguments)])

    def _follow(self, kind: AidKind) -> None:
        """Save what Redis has in a later revision than the state folder. An overfull folder loses what Redis has not."""
        known, saved = self._known[kind], self._saved[kind]
        for name, document in known.items():
            before = saved.get(name)
            if before is None or (before.revision <= document.revision and before != document):
                self._save(kind, name, document)
        if len(saved) > MOST[kind]:
            self._folders[kind].keep_only(set(known))
            self._saved[kind] = {name: each for name, each in saved.items() if name in known}

    def _save(self, kind: AidKind, name: str, document: Document) -> None:
        if self._folders[kind].write(name, document):
            self._saved[kind][name] = document

    def _stamps(self, kind: AidKind) -> tuple[str, ...]:
        return tuple(part for name, each in sorted(self._known[kind].items()) for part in (name, each.stamp))

    def _taken(self, kind: AidKind, rows: list[bytes]) -> dict[str, Document]:
        found: dict[str, Document] = {}
        for at in range(0, len(rows), 3):
            name, value = rows[at].decode(errors="replace"), rows[at + 2]
            document = read_value(value) if value else self._known[kind].get(name)
            if name and is_name(name) and document is not None:
                found[name] = document
        return found
