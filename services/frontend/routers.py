"""The links to all routers of the mesh: opened when a router registers, closed when it is gone.

A shell. A lost lease alone closes nothing: while the stream to a router lives, it serves (architecture, section 5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import grpc

from kvmesh.attach.client import AttachLink
from kvmesh.attach.dialing import Dialer
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.clock import Clock
from kvmesh.membership.member import Member
from kvmesh.tasks import end
from services.frontend.requests.core import FrontendCore

LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Linked:
    """A router's process, its stream and the task that keeps it."""

    member: Member
    link: AttachLink
    task: asyncio.Task[None]


class RouterLinks:
    """One kept link per router's process. Owned by who calls `run`; its tasks end with it.

    A process that started again is another one: it gets a link of its own beside the old process's, which takes nothing
    new and is closed when nothing runs there or its stream is down. `update` may be called at any time, also before `run`.
    """

    def __init__(
        self,
        core: FrontendCore,
        hello: pb.Hello,
        model_version: str,
        clock: Clock,
        open_channel: Callable[[str], grpc.aio.Channel],
        explain: Callable[[str], Awaitable[str]] | None = None,
        dialer: Dialer | None = None,
    ) -> None:
        self._core = core
        self._hello = hello
        self._model_version = model_version
        self._clock = clock
        self._open_channel = open_channel
        self._explain = explain
        self._dialer = dialer or Dialer(clock)
        self._wanted: dict[str, Member] = {}
        self._links: dict[str, Linked] = {}
        """By the link's name: the process's, with place and boot where an older process of that name is still here."""
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._links)

    def update(self, members: Iterable[Member]) -> None:
        """Take the members of the mesh; those that are no routers of this model version are left out."""
        self._wanted = {
            member.process_id: member
            for member in members
            if member.role == "router" and member.model_version == self._model_version
        }
        self._changed.set()

    async def run(self) -> None:
        """Open and close links until cancelled; then close all."""
        try:
            while True:
                self._changed.clear()
                is_settled = await self._settle()
                try:
                    # A link that is not wanted any more is looked at again until it can be closed.
                    async with asyncio.timeout(None if is_settled else LOOK_S):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            for name in list(self._links):
                await self._close(name)

    async def _settle(self) -> bool:
        """Bring the links in line with the members. False: some must be looked at again."""
        is_settled = True
        for name, linked in list(self._links.items()):
            member = self._wanted.get(linked.member.process_id)
            peer = self._core.peers.get(name)
            assert peer is not None, f"{name} has a link and is no peer"
            if member is not None and _is_same(member, linked.member):
                peer.is_draining = member.draining
                continue
            if member is not None:
                peer.is_draining = True
            is_unused = member is not None and not peer.slots and not linked.link.outbox.waiting_bytes
            if linked.link.is_up and not is_unused:
                is_settled = False
            else:
                await self._close(name)
        for member in list(self._wanted.values()):
            if not any(_is_same(member, linked.member) for linked in self._links.values()):
                self._open(member)
        return is_settled

    def _open(self, member: Member) -> None:
        is_free = member.process_id not in self._links
        name = member.process_id if is_free else f"{member.process_id}@{member.address}/{member.boot_id}"
        link = AttachLink(
            name,
            member.address,
            self._hello,
            self._core,
            self._clock,
            self._open_channel,
            keep=True,
            expected_process=member.process_id,
            expected_boot=member.boot_id,
            explain=self._explain,
            dialer=self._dialer,
        )
        self._core.add_router(link).is_draining = member.draining
        task = asyncio.create_task(link.run(), name=f"router-link:{name}")
        self._links[name] = Linked(member, link, task)

    async def _close(self, name: str) -> None:
        await end([self._links[name].task])
        self._links.pop(name, None)
        self._core.remove_router(name)


def _is_same(one: Member, other: Member) -> bool:
    """True if both tell of one process at one place."""
    return (one.process_id, one.boot_id, one.address) == (other.process_id, other.boot_id, other.address)
