"""The links to all routers of the mesh: opened when a router registers, closed when it is gone.

A shell. A lost lease alone closes nothing: while the stream to a router lives, it serves (architecture, section 5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import grpc

from kvmesh.attach.client import AttachLink
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.clock import Clock
from kvmesh.membership import Member
from services.frontend.core import FrontendCore


class RouterLinks:
    """One kept link per router. Owned by who calls `run`; its tasks end with it.

    `update` may be called at any time, also before `run`.
    """

    def __init__(
        self,
        core: FrontendCore,
        hello: pb.Hello,
        model_version: str,
        clock: Clock,
        open_channel: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self._core = core
        self._hello = hello
        self._model_version = model_version
        self._clock = clock
        self._open_channel = open_channel
        self._wanted: dict[str, Member] = {}
        self._links: dict[str, tuple[AttachLink, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._links)

    @property
    def up_count(self) -> int:
        """Links whose stream is up."""
        return sum(link.is_up for link, _ in self._links.values())

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
                    # A link whose lease is gone is looked at again until its stream is gone, too.
                    async with asyncio.timeout(None if is_settled else 1.0):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            for name in list(self._links):
                await self._close(name)

    async def _settle(self) -> bool:
        """Bring the links in line with the members. False: some must be looked at again."""
        is_settled = True
        for name, (link, _) in list(self._links.items()):
            member = self._wanted.get(name)
            if member is not None and member.address == link.address:
                continue
            if link.is_up:
                is_settled = False
            else:
                await self._close(name)
        for name, member in self._wanted.items():
            if name not in self._links:
                self._open(member)
            peer = self._core.peers.get(name)
            if peer is not None:
                peer.is_draining = member.draining
        return is_settled

    def _open(self, member: Member) -> None:
        link = AttachLink(
            member.process_id,
            member.address,
            self._hello,
            self._core,
            self._clock,
            self._open_channel,
            keep=True,
        )
        self._core.add_router(link)
        task = asyncio.create_task(link.run(), name=f"router-link:{member.process_id}")
        self._links[member.process_id] = (link, task)

    async def _close(self, name: str) -> None:
        _, task = self._links.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._core.remove_router(name)
