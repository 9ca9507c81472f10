"""Keeps one link to each wanted process.

A link is opened when its process registers, and closed when lease and stream are lost. A lost lease alone closes no link:
while its stream lives, the process serves the requests it has. A process that restarted is a new process with a link of its
own. The link to its predecessor takes no new requests, and is closed once nothing uses it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from kvmesh.attach.client import AttachLink
from kvmesh.clock import Clock
from kvmesh.membership.member import Member
from kvmesh.regions.names import qualified
from kvmesh.tasks import end

log = logging.getLogger(__name__)

CHECK_INTERVAL_S: Final = 1.0
"""Longest time between two checks of a link that was kept."""

Peer = TypeVar("Peer")
"""State of the process behind a link, at the owner of the links."""


class Host(Protocol[Peer]):
    """Owns the peers of a LinkManager. `update` calls `is_wanted` and `on_listed`; `run` all but `is_wanted`."""

    def is_wanted(self, member: Member) -> bool:
        """True if `member` gets a link."""
        ...

    def open(self, member: Member, name: str) -> tuple[Peer, AttachLink]:
        """Return a new peer and its link, not started. `name` is unique among the links."""
        ...

    def on_listed(self, peer: Peer, member: Member | None) -> None:
        """Take the lease of the process. None: it has no lease. Also called when nothing has changed."""
        ...

    def on_replaced(self, peer: Peer) -> None:
        """Note that a newer process has the name of `peer`."""
        ...

    def may_return(self, peer: Peer) -> bool:
        """True if a replaced process that holds its name again may use its old link."""
        ...

    def may_close(self, peer: Peer, now_s: float, *, is_replaced: bool) -> bool:
        """True if the link of a process without a lease, or of a replaced process, can be closed without loss."""
        ...

    def on_closing(self, peer: Peer, now_s: float) -> None:
        """Note that the manager closes the link now: its end is no failure of the peer."""
        ...

    def on_closed(self, peer: Peer, now_s: float) -> None:
        """Note that the link is closed. The last call for `peer`."""
        ...

    def on_settled(self, names: list[str], now_s: float) -> None:
        """Note that the links match the members. `names`: the processes with a link, sorted."""
        ...


class Linked(NamedTuple, Generic[Peer]):
    """A process, its link, and the task that keeps the link."""

    name: str
    """Name of the link."""
    member: Member
    peer: Peer
    link: AttachLink
    task: asyncio.Task[None]


class LinkManager(Generic[Peer]):
    """The links of this process to the wanted processes. Its tasks end with `run`.

    `update` may be called at any time, also before `run`. `role`: the role of the wanted processes, for the names of
    tasks. `region`: the own region; links to processes of another region are named "region/name". None: all processes are
    of one region.
    """

    def __init__(self, host: Host[Peer], clock: Clock, role: str, region: str | None = None) -> None:
        self._host = host
        self._clock = clock
        self._role = role
        self._region = region
        self._wanted: dict[str, Member] = {}
        self._linked: dict[str, Linked[Peer]] = {}
        """Links to the newest process of each name, by name."""
        self._replaced: list[Linked[Peer]] = []
        """Links to processes that lost their name to a newer process."""
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._linked) + len(self._replaced)

    def __iter__(self) -> Iterator[Linked[Peer]]:
        return iter([*self._linked.values(), *self._replaced])

    def is_settled(self) -> bool:
        """True if every wanted process has a link."""
        return all(name in self._linked for name in self._wanted)

    def update(self, members: Iterable[Member]) -> None:
        """Take the members of the mesh."""
        self._wanted = {self._name(member): member for member in members if self._host.is_wanted(member)}
        for name, linked in self._linked.items():
            member = self._wanted.get(name)
            if member is None or _is_same(member, linked.member):
                self._host.on_listed(linked.peer, member)
        self._changed.set()

    async def run(self) -> None:
        """Open and close links until cancelled. Then close all links."""
        try:
            while True:
                self._changed.clear()
                try:
                    await self._settle()
                except Exception:  # a bug with one peer must not end the process with all its streams
                    log.exception("bug in the link manager: the links do not match the members")
                try:
                    async with asyncio.timeout(CHECK_INTERVAL_S):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            links = list(self)
            await end([linked.task for linked in links])
            self._linked.clear()
            self._replaced.clear()
            for linked in links:
                self._host.on_closed(linked.peer, self._clock.now_s())

    async def _settle(self) -> None:
        """Reconcile the links with the members."""
        for name, linked in list(self._linked.items()):
            member = self._wanted.get(name)
            if member is None:
                if self._host.may_close(linked.peer, self._clock.now_s(), is_replaced=False):
                    await self._close(self._linked.pop(name))
            elif not _is_same(member, linked.member):
                self._host.on_replaced(linked.peer)
                self._replaced.append(self._linked.pop(name))
        for linked in list(self._replaced):
            if self._host.may_close(linked.peer, self._clock.now_s(), is_replaced=True):
                self._replaced.remove(linked)
                await self._close(linked)
        for name, member in list(self._wanted.items()):
            if name not in self._linked:
                self._linked[name] = self._returned(member) or self._open(member)
        self._host.on_settled(sorted(self._linked), self._clock.now_s())

    def _returned(self, member: Member) -> Linked[Peer] | None:
        """Take back the old link to the process of `member`, which lost its name to a newer process and holds it again.

        Return None if there is no such link, or if the host does not allow it (`may_return`).
        """
        for linked in self._replaced:
            if _is_same(member, linked.member) and self._host.may_return(linked.peer):
                self._replaced.remove(linked)
                self._host.on_listed(linked.peer, member)
                return linked
        return None

    def _name(self, member: Member) -> str:
        """Return the name of a member in the own region: "region/name" for a member of another one."""
        is_foreign = self._region is not None and member.region not in ("", self._region)
        return qualified(member.region, member.process_id) if is_foreign else member.process_id

    def _open(self, member: Member) -> Linked[Peer]:
        name = self._name(member)
        if any(linked.name == name for linked in self):
            name = f"{name}@{member.address}#{member.boot_id}"
        peer, link = self._host.open(member, name)
        task = asyncio.create_task(link.run(), name=f"{self._role}-link:{name}")
        return Linked(name, member, peer, link, task)

    async def _close(self, linked: Linked[Peer]) -> None:
        self._host.on_closing(linked.peer, self._clock.now_s())
        try:
            await end([linked.task])
        except asyncio.CancelledError:
            self._replaced.append(linked)  # `run` closes it with the others
            raise
        self._host.on_closed(linked.peer, self._clock.now_s())


def _is_same(one: Member, other: Member) -> bool:
    """True if both are leases of one process at one address."""
    return (one.process_id, one.boot_id, one.address) == (other.process_id, other.boot_id, other.address)
