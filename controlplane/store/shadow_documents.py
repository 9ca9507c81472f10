"""Documents of shadows in Redis, in memory and in the state folder: results, for `document.KEPT_S` behind the end.

They have a key of their own, so that rollouts never lose their room to them. Compare-and-set by revision, as rollouts.
RedisUnavailable leaves this module: the store stands between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from controlplane.shadow.document import KEPT_S, SHADOWS_MAX
from controlplane.store.document_rows import rows
from controlplane.store.documents import Document, Documents, known_stamps, value_of
from controlplane.store.state_folder import StateFolder
from kvmesh.redis_link import RedisLink, key
from kvmesh.redis_script import Script

_READ: Final = Script.beside(__file__, "read_documents.lua")
_WRITE: Final = Script.beside(__file__, "write_document.lua")

PREFIX: Final = "shadow-"
"""Beginning of the id of a shadow. The time of its start follows."""

TIME_FORMAT: Final = "%Y%m%d-%H%M%S"
LIFE_S: Final = KEPT_S + 24 * 3600.0
"""Time from the start of a shadow, which runs for a day at most, to the removal of its document."""


class ShadowDocuments:
    """See the module."""

    def __init__(self, redis: RedisLink, mesh: str, folder: Path | None) -> None:
        self.folder = StateFolder(folder, prefix="shadow.", has_desired=False)
        self._redis = redis
        self._keys = (key(mesh, "control", "shadows"), key(mesh, "control", "no-desired"))
        """The second key stays empty: the scripts of documents expect one."""
        self._documents = Documents(rollouts_max=SHADOWS_MAX)

    async def load(self) -> None:
        """Read the state folder."""
        found = await asyncio.to_thread(self.folder.read)
        self._documents = Documents(found, rollouts_max=SHADOWS_MAX)

    async def read(self, wall_s: float) -> dict[str, bytes]:
        """Return JSON by id; put back what Redis lost, and remove what is older than LIFE_S."""
        (found,) = await self._redis.scripts(_READ, [(self._keys, tuple(known_stamps(self._documents)))])
        for restore in self._documents.take(*rows(found)):
            if not is_old(restore.name, wall_s):
                await self._put(restore.name, restore.document, restore.replaces)
        old = [name for name in self._documents.rollouts if is_old(name, wall_s)]
        if old:
            await self._redis.execute("HDEL", self._keys[0], *old)
            self._documents.forget(old)
            await asyncio.to_thread(self.folder.keep_only, self._documents.names())
        return self._documents.rollouts

    async def write(self, name: str, document: Document, replaces: int) -> bool:
        """Write a document by compare-and-set, and a copy on disk. False: a conflict."""
        written = await self._put(name, document, replaces)
        if written:
            await asyncio.to_thread(self.folder.write, name, document)
        return written

    async def _put(self, name: str, document: Document, replaces: int) -> bool:
        arguments = (name, value_of(document), replaces, SHADOWS_MAX)
        (answer,) = await self._redis.scripts(_WRITE, [(self._keys, arguments)])
        if answer[0]:
            self._documents.stored(name, document)
        return bool(answer[0])


def name_at(wall_s: float, taken: Iterable[str]) -> str:
    """Return the id of a shadow that starts at `wall_s`, none of `taken`."""
    first = f"{PREFIX}{datetime.fromtimestamp(wall_s, UTC):{TIME_FORMAT}}"
    known, name, number = set(taken), first, 2
    while name in known:
        name, number = f"{first}-{number}", number + 1
    return name


def is_old(name: str, wall_s: float) -> bool:
    """True if the shadow `name` started longer than LIFE_S ago. A name without a time is old."""
    text = "-".join(name.removeprefix(PREFIX).split("-")[:2])
    try:
        started = datetime.strptime(text, TIME_FORMAT).replace(tzinfo=UTC)
    except ValueError:
        return True
    return wall_s - started.timestamp() > LIFE_S
