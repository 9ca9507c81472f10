"""A router that accepts every request and never answers: `python -m bench.black_hole --redis URL --pool next --version v1`.

It has a lease, sends load reports that say that it can place, and accepts submits. No replica is behind it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated, Final

import typer

from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.server import AttachService
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.clock import MonotonicClock
from kvmesh.membership.member import POOLS, Member
from kvmesh.membership.registration import Registration
from kvmesh.redis_link import RedisLink
from kvmesh.server import MeshServer

NAME: Final = "black-hole"
REPORT_S: Final = 0.5


class Session:
    """The stream of one frontend."""

    def __init__(self, hole: BlackHole, outbox: DownwardOutbox) -> None:
        self.outbox = outbox
        self._hole = hole

    def on_request(self, message: pb.AttachRequest, now_s: float) -> None:
        """Accept each submit, and answer nothing more."""
        for submit in message.submits:
            self.outbox.accept(submit.slot)

    def on_closed(self, now_s: float) -> None:
        """Forget the stream."""
        self._hole.sessions.discard(self)


class BlackHole:
    """See the module."""

    def __init__(self) -> None:
        self.sessions: set[Session] = set()

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> Session:
        """Return the session of a frontend."""
        session = Session(self, outbox)
        self.sessions.add(session)
        return session

    def after_event(self) -> None:
        """Nothing waits for time here."""

    async def report(self) -> None:
        """Send load reports, the heartbeats, until cancelled."""
        while True:
            for session in self.sessions:
                session.outbox.load(pb.LoadReport(engine_ready=True, can_place=True))
            await asyncio.sleep(REPORT_S)


async def serve(redis_url: str, mesh: str, pool: str, version: str) -> None:
    """Serve until cancelled."""
    redis, hole = RedisLink(redis_url), BlackHole()
    hello = pb.Hello(process_id=NAME, boot_id="black-hole-0", protocol_version=1)
    server = MeshServer("router", NAME, ())
    service = AttachService(hole, hello, MonotonicClock())
    attach_pb2_grpc.add_AttachServiceServicer_to_server(service, server.grpc)
    address = await server.listen("127.0.0.1:0")
    member = Member(
        process_id=NAME,
        role="router",
        address=address,
        boot_id="black-hole-0",
        model_version=version,
        block_tokens=32,
        pool=pool,
        capabilities=(POOLS,),
    )
    registration = Registration(redis, mesh, member)
    server.announce("")
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(hole.report())
            tasks.create_task(registration.run())
    finally:
        await redis.close()


def main(
    redis: Annotated[str, typer.Option()],
    pool: Annotated[str, typer.Option()],
    version: Annotated[str, typer.Option()],
    mesh: Annotated[str, typer.Option()] = "kvmesh",
) -> None:
    """Run until a signal."""
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(redis, mesh, pool, version))


if __name__ == "__main__":
    typer.run(main)
