"""Links the routers of all pools of the mesh to the frontend's core.

A router without a lease keeps its link while its stream is up. A replaced router loses its link once no slot uses it, and
so does a router of another region that the snapshot does not list any more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc

from kvmesh.attach.client import AttachLink, Sink
from kvmesh.attach.dialing import Dialer
from kvmesh.attach.link_manager import LinkManager
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.clock import Clock
from kvmesh.membership.member import Member
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.router_peers import Peer

Router: TypeAlias = Peer[LiveRequest]


def router_links(
    core: FrontendCore,
    hello: pb.Hello,
    is_served: Callable[[Member], bool],
    clock: Clock,
    open_channel: Callable[[str], grpc.aio.Channel],
    explain: Callable[[str], Awaitable[str]] | None = None,
    dialer: Dialer | None = None,
    sink: Sink | None = None,
) -> LinkManager[Router]:
    """Return the links to the routers for which `is_served` is true. `explain`, `dialer`: as of AttachLink.

    `sink`: takes the events of the links and passes them on to `core`. None: `core` takes them itself. The region in
    `hello` is the own one.
    """
    dialer = dialer or Dialer(clock)
    host = RouterHost(core, hello, is_served, clock, open_channel, explain, dialer, sink)
    return LinkManager(host, clock, "router", hello.region)


class RouterHost:
    """Adds routers to a core and removes them. Implements link_manager.Host."""

    def __init__(
        self,
        core: FrontendCore,
        hello: pb.Hello,
        is_served: Callable[[Member], bool],
        clock: Clock,
        open_channel: Callable[[str], grpc.aio.Channel],
        explain: Callable[[str], Awaitable[str]] | None,
        dialer: Dialer,
        sink: Sink | None = None,
    ) -> None:
        self._core = core
        self._sink = sink or core
        self._hello = hello
        self._is_served = is_served
        self._clock = clock
        self._open_channel = open_channel
        self._explain = explain
        self._dialer = dialer

    def is_wanted(self, member: Member) -> bool:
        return member.role == "router" and self._is_served(member)

    def open(self, member: Member, name: str) -> tuple[Router, AttachLink]:
        link = AttachLink(
            name,
            member.address,
            self._hello,
            self._sink,
            self._clock,
            self._open_channel,
            keep=True,
            expected_process=member.process_id,
            expected_boot=member.boot_id,
            explain=self._explain,
            dialer=self._dialer,
        )
        region = "" if member.region == self._hello.region else member.region
        router = self._core.add_router(link, member.pool, member.model_version, region)
        router.is_draining = member.draining
        return router, link

    def on_listed(self, peer: Router, member: Member | None) -> None:
        if member is not None:
            peer.is_draining = member.draining

    def on_replaced(self, peer: Router) -> None:
        peer.is_draining = True

    def may_return(self, peer: Router) -> bool:
        return True

    def may_close(self, peer: Router, now_s: float, *, is_replaced: bool) -> bool:
        is_unused = not peer.slots and not peer.link.outbox.waiting_bytes
        return not peer.link.is_up or ((is_replaced or bool(peer.region)) and is_unused)

    def on_closing(self, peer: Router, now_s: float) -> None:
        """Do nothing: the end of the stream moves its requests."""

    def on_closed(self, peer: Router, now_s: float) -> None:
        self._core.remove_router(peer.name)

    def on_settled(self, names: list[str], now_s: float) -> None:
        """Do nothing: no part of the frontend depends on the set of links."""
