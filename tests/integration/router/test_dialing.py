"""Limits on dialing registered addresses: a rate limit (token bucket) for connections, and the allowed networks."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from kvmesh.attach.client import REFUSED_PAUSE_S, STABLE_S, AttachLink
from kvmesh.attach.dial_budget import BURST, RATE_PER_S
from kvmesh.attach.dial_queue import CONNECTIONS
from kvmesh.attach.dialing import KNOWN_BURST, Dialer, DialRefused, PeerUnreachable
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.attach.v1 import attach_pb2_grpc
from kvmesh.clock import Clock, MonotonicClock, VirtualClock
from kvmesh.trust.networks import Networks
from tests.integration.router.test_links import linked, member, replica, until
from tests.patience import wait_for

CLOCK = MonotonicClock()


class Listener:
    """Accepts connections and sends nothing."""

    def __init__(self) -> None:
        self.address = ""
        self.accepted: list[float] = []

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted.append(CLOCK.now_s())
        try:
            await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    made = Listener()
    server = await asyncio.start_server(made.take, "127.0.0.1", 0, backlog=1024)
    made.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()


async def test_a_thousand_forged_members_are_dialed_within_the_rate_limit() -> None:
    """They point to a listener that sends nothing; a replica that registers after them does not wait for their retries."""
    async with listening() as listener, linked() as (links, core), replica("decode-0", "A") as (_, real):
        forged = [member(f"forged-{number}", listener.address, "x") for number in range(1000)]
        began_s = CLOCK.now_s()
        links.update(forged[:60])
        await until(lambda: len(listener.accepted) >= 120)
        links.update([*forged[:60], real])
        await until(lambda: "decode-0" in core.replicas and core.replicas["decode-0"].is_up)
        links.update([*forged, real])
        await until(lambda: len(listener.accepted) > BURST + 2 * RATE_PER_S)
        for number, at_s in enumerate(listener.accepted, 1):
            assert number <= BURST + RATE_PER_S * (at_s - began_s) + 1, (
                f"{number} after {at_s - began_s:.2f} s"
            )


async def test_a_mesh_of_64_replicas_is_attached_within_one_burst() -> None:
    """No attempt waits: at start the token bucket of a process holds two connections for each."""
    async with AsyncExitStack() as stack:
        members = []
        for number in range(64):
            _, one = await stack.enter_async_context(replica(f"decode-{number}", f"boot-{number}"))
            members.append(one)
        links, core = await stack.enter_async_context(linked())
        random.Random(1).shuffle(members)
        links.update(members)
        await until(
            lambda: len(core.replicas) == 64 and all(each.is_up for each in core.replicas.values()), 30
        )


async def test_a_name_is_resolved_and_checked_before_it_is_dialed() -> None:
    """The address inside the networks is dialed, not the name. A name without such an address is refused with the
    addresses found; a name without an answer is a lost peer.
    """
    inside, outside = Dialer(CLOCK, Networks(["127.0.0.0/8"])), Dialer(CLOCK, Networks(["10.0.0.0/8"]))
    assert await inside.resolve("localhost:7") == "127.0.0.1:7"
    assert await Dialer(CLOCK).resolve("localhost:7") == "localhost:7"
    with pytest.raises(DialRefused, match=r"localhost:7 resolves to .*127\.0\.0\.1.*inside trust\.networks"):
        await outside.resolve("localhost:7")
    with pytest.raises(PeerUnreachable, match=r"nowhere\.invalid does not resolve: "):
        await inside.resolve("nowhere.invalid:7")
    with pytest.raises(DialRefused, match=r"127\.0\.0\.1:7 is outside trust\.networks"):
        await outside.resolve("127.0.0.1:7")
    assert (inside.refused_total, outside.refused_total) == (0, 1)


async def test_a_cancelled_attempt_gives_its_turn_to_the_next() -> None:
    """A link that is closed while it waits delays no other link."""
    dialer = Dialer(CLOCK)
    queue = dialer.queue(is_known=False)
    waiting = [asyncio.create_task(queue.acquire(0)) for _ in range(70)]
    await until(lambda: sum(task.done() for task in waiting) >= 64)
    late = [task for task in waiting if not task.done()]
    for task in late[:-1]:
        task.cancel()
    await wait_for(waiting[-1], 10)
    assert dialer.waiting_count == 0


class Hello(attach_pb2_grpc.AttachServiceServicer):
    """A peer that sends a hello; then it closes the stream, or keeps it open."""

    def __init__(self, *, hangs_up: bool) -> None:
        self.hangs_up = hangs_up
        self.count = 0

    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[pb.AttachResponse]:
        self.count += 1
        yield pb.AttachResponse(hello=pb.Hello(process_id="x", boot_id="x", protocol_version=1))
        if not self.hangs_up:
            await asyncio.Event().wait()


class Counting:
    """A sink that counts its events."""

    def __init__(self) -> None:
        self.attached = 0
        self.lost: list[str] = []

    def on_attached(self, link: AttachLink, peer: pb.Hello, now_s: float) -> None:
        self.attached += 1

    def on_response(self, link: AttachLink, message: pb.AttachResponse, now_s: float) -> None:
        return None

    def on_lost(self, link: AttachLink, reason: str, now_s: float) -> None:
        self.lost.append(reason)


async def serve(
    stack: AsyncExitStack, *, hangs_up: bool, port: int = 0
) -> tuple[grpc.aio.Server, Hello, str]:
    server, peer = grpc.aio.server(options=[("grpc.so_reuseport", 0)]), Hello(hangs_up=hangs_up)
    attach_pb2_grpc.add_AttachServiceServicer_to_server(peer, server)
    address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return server, peer, address


def dial(
    stack: AsyncExitStack, address: str, dialer: Dialer, clock: Clock = CLOCK
) -> tuple[AttachLink, Counting]:
    sink, hello = Counting(), pb.Hello(process_id="r", boot_id="r", protocol_version=1)
    link = AttachLink(address, address, hello, sink, clock, _channel, keep=True, dialer=dialer)
    task = asyncio.create_task(link.run())

    async def stop() -> None:
        task.cancel()
        await asyncio.wait([task])

    stack.push_async_callback(stop)
    return link, sink


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def closed_port(stack: AsyncExitStack) -> str:
    """Return an address that is bound and accepts no connections."""
    bound = stack.enter_context(socket.socket())
    bound.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{bound.getsockname()[1]}"


async def test_peers_that_close_after_hello_are_rate_limited_as_new_ones() -> None:
    """The clock of the budget stands still: one burst, whatever they send. A member that registers then is next."""
    async with AsyncExitStack() as stack:
        clock = VirtualClock()
        dialer = Dialer(clock)
        _, forged, address = await serve(stack, hangs_up=True)
        sinks = [dial(stack, address, dialer)[1] for _ in range(10)]
        await until(lambda: dialer.waiting_count == 10 or forged.count > BURST)
        assert sum(sink.attached for sink in sinks) > 0
        assert forged.count <= BURST / CONNECTIONS
        _, _, honest = await serve(stack, hangs_up=False)
        link, _ = dial(stack, honest, dialer)
        await until(lambda: dialer.waiting_count == 11)
        clock.advance(CONNECTIONS / RATE_PER_S + 1e-6)
        await until(lambda: link.is_up)
        assert forged.count <= BURST / CONNECTIONS


async def test_an_attempt_at_a_closed_port_costs_one_connection() -> None:
    """gRPC's own connection is not opened, and its token is returned: all connections of a burst but the last are
    probes.
    """
    async with AsyncExitStack() as stack:
        dialer = Dialer(VirtualClock())
        address = await closed_port(stack)
        sinks = [dial(stack, address, dialer)[1] for _ in range(40)]
        await until(lambda: dialer.waiting_count == 40)
        assert sum(len(sink.lost) for sink in sinks) == BURST - 1


@pytest.mark.parametrize("lasted_s", [STABLE_S, STABLE_S - 0.1])
async def test_a_known_peer_is_dialed_again_while_new_ones_wait(lasted_s: float) -> None:
    """A stream of STABLE_S makes a peer known; after a shorter stream the peer counts as new."""
    async with AsyncExitStack() as stack:
        dialer, clock = Dialer(VirtualClock()), VirtualClock()
        server, _, address = await serve(stack, hangs_up=False)
        link, sink = dial(stack, address, dialer, clock)
        await until(lambda: link.is_up)
        clock.advance(lasted_s)
        while dialer.queue(is_known=False).try_acquire():
            pass
        await server.stop(0)
        await until(lambda: bool(sink.lost))
        _, reschedule, _ = await serve(stack, hangs_up=False, port=int(address.rpartition(":")[2]))
        is_known = lasted_s >= STABLE_S
        await until(lambda: link.is_up or dialer.waiting_count > 0)
        assert (link.is_up, reschedule.count > 0) == (is_known, is_known)


async def test_known_peers_have_a_rate_limit_too() -> None:
    """A known peer that accepts no more connections: the clock of the budget stands still, so there is one burst."""
    async with AsyncExitStack() as stack:
        dialer, clock = Dialer(VirtualClock()), VirtualClock()
        for _ in range(int(KNOWN_BURST / CONNECTIONS) - 2):
            await dialer.queue(is_known=True).acquire(0)
        server, _, address = await serve(stack, hangs_up=False)
        link, sink = dial(stack, address, dialer, clock)
        await until(lambda: link.is_up)
        clock.advance(STABLE_S)
        await server.stop(0)
        await until(lambda: dialer.waiting_count == 1)
        assert len(sink.lost) == 1 + 3


async def test_a_name_that_does_not_resolve_is_looked_up_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed or late lookup is a lost peer, not an address outside the networks; then its addresses are tried in
    turn.

    A lookup counts as one connection, so names that never resolve have the same rate limit as dead addresses.
    """
    async with AsyncExitStack() as stack:
        _, _, address = await serve(stack, hangs_up=False)
        port = int(address.rpartition(":")[2])
        answers: list[Callable[[], list[str]]] = [_fail, _time_out, _no_label]
        looked_up: list[str] = []

        async def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
            if host != "replica.test":
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]
            looked_up.append(host)
            found = answers.pop(0)() if answers else ["10.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.1"]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        dialer = Dialer(VirtualClock(), Networks(["127.0.0.0/8"]))
        link, sink = dial(stack, f"replica.test:{port}", dialer)
        await until(lambda: link.is_up)
        assert len(looked_up) >= 6 and dialer.refused_total == 0
        assert ["resolve" in reason for reason in sink.lost[:3]] == [True] * 3, sink.lost
        assert all(reason.startswith("UNAVAILABLE") for reason in sink.lost[:5]), sink.lost
        assert REFUSED_PAUSE_S > 10, "`until` waits for 10 s"


def _fail() -> list[str]:
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def _time_out() -> list[str]:
    raise TimeoutError


def _no_label() -> list[str]:
    raise UnicodeError("label too long")
