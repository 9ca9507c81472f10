"""Two ends of an Attach stream, each with its own certificates, for tests of mutual authentication."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from kvmesh.attach.client import AttachLink
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.server import AttachService
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.clock import MonotonicClock
from kvmesh.config import MeshConfig, build
from kvmesh.server import MeshServer
from kvmesh.trust.peers import Trust
from tests.certificates import Folder

CLOCK = MonotonicClock()
ATTACH = "kvmesh.attach.v1.AttachService"


@dataclass
class Quiet:
    """A service that accepts every session and sends no response."""

    opened: list[str] = field(default_factory=list)

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> Quiet:
        self.opened.append(peer.process_id)
        return self

    def after_event(self) -> None:
        return None

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        return None

    def on_closed(self, now_s: float) -> None:
        return None


@dataclass
class Seen:
    """A sink that records the end of its link."""

    attached: int = 0
    lost: list[str] = field(default_factory=list)

    def on_attached(self, link: AttachLink, peer: pb.Hello, now_s: float) -> None:
        self.attached += 1

    def on_response(self, link: AttachLink, message: pb.AttachResponse, now_s: float) -> None:
        return None

    def on_lost(self, link: AttachLink, reason: str, now_s: float) -> None:
        self.lost.append(reason)


def config_of(folder: Folder | None, mesh: str = "kvmesh") -> MeshConfig:
    """Return a configuration with the certificates in `folder`, or without any."""
    tables: dict[str, dict[str, str]] = {"mesh": {"name": mesh}}
    if folder is not None:
        tables["trust"] = folder.section()
    return build(tables)


@asynccontextmanager
async def serving(trust: Trust, role: str = "router") -> AsyncIterator[tuple[str, Quiet]]:
    """Serve Attach as `role` with the certificates of `trust`; yield the address and the service."""
    quiet = Quiet()
    server = MeshServer(
        role, f"{role}-0", (ATTACH,), credentials=trust.server_credentials(), guards=trust.guards()
    )
    hello = pb.Hello(process_id=f"{role}-0", boot_id="boot", protocol_version=1)
    attach_pb2_grpc.add_AttachServiceServicer_to_server(AttachService(quiet, hello, CLOCK), server.grpc)
    address = await server.listen("127.0.0.1:0")
    try:
        yield address, quiet
    finally:
        await server.grpc.stop(0)


@asynccontextmanager
async def linked(trust: Trust, address: str, role: str = "router") -> AsyncIterator[tuple[AttachLink, Seen]]:
    """Keep a link to `address`, with `role` as the expected role."""
    seen = Seen()
    link = AttachLink(
        f"{role}-0",
        address,
        pb.Hello(process_id="caller", boot_id="c", protocol_version=1),
        seen,
        CLOCK,
        trust.channels_to(role),
        keep=True,
        explain=partial(trust.explain, role=role),
    )
    task = asyncio.create_task(link.run())
    try:
        yield link, seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
