"""The links to the prefill and decode replicas of the router's pool, for a LinkManager.

A link is opened when its replica registers, and closed when the replica is gone. A lost lease alone closes no link: the
replica gets no new requests, and its stream stays.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, Literal

import grpc

from kvmesh.attach.client import AttachLink
from kvmesh.attach.dialing import Dialer
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.clock import Clock
from kvmesh.membership.member import Member
from services.router.forwarding.attempt import Attempt
from services.router.forwarding.core import ForwardingCore
from services.router.forwarding.replicas import Replica

log = logging.getLogger(__name__)

GONE_S: Final = 5.0
"""A replica without a lease is forgotten, and its cached blocks too, when its stream is down for this long."""


class ReplicaHost:
    """Adds replicas to a core and removes them. Implements link_manager.Host.

    `is_served` is true for the replicas of the router's pool. `open_channel` and `explain` get the address of a replica
    and its role. `explain` returns the TLS fault between both processes, or an empty text. `on_replicas` gets the names
    whenever they change. `is_cordoned` is true for replicas that the snapshot of this router takes out of use.
    """

    def __init__(
        self,
        core: ForwardingCore,
        hello: pb.Hello,
        is_served: Callable[[Member], bool],
        clock: Clock,
        open_channel: Callable[[str, str], grpc.aio.Channel],
        on_replicas: Callable[[list[str]], None],
        explain: Callable[[str, str], Awaitable[str]] | None = None,
        dialer: Dialer | None = None,
        is_cordoned: Callable[[Member], bool] = lambda _: False,
    ) -> None:
        self._core = core
        self._hello = hello
        self._is_served = is_served
        self._clock = clock
        self._open_channel = open_channel
        self._on_replicas = on_replicas
        self._explain = explain
        self._is_cordoned = is_cordoned
        self._dialer = dialer or Dialer(clock)
        self._names: list[str] = []

    def is_wanted(self, member: Member) -> bool:
        return self._is_served(member)

    def open(self, member: Member, name: str) -> tuple[Replica[Attempt], AttachLink]:
        role: Literal["prefill", "decode"] = "prefill" if member.role == "prefill" else "decode"
        explain = self._explain
        replica = self._core.add_replica(
            member.process_id, role, address=member.address, kv_address=member.kv_address
        )
        replica.is_draining = self._is_out_of_use(member)
        replica.take_capabilities(member.capabilities)
        replica.hold(member.is_out_of_service)
        link = AttachLink(
            name,
            member.address,
            self._hello,
            replica,
            self._clock,
            lambda address: self._open_channel(address, role),
            keep=True,
            expected_process=member.process_id,
            expected_boot=member.boot_id,
            explain=None if explain is None else lambda address: explain(address, role),
            dialer=self._dialer,
        )
        replica.connect(link)
        log.info("replica found", extra={"replica": member.process_id, "address": member.address})
        return replica, link

    def on_listed(self, peer: Replica[Attempt], member: Member | None) -> None:
        peer.is_listed = member is not None
        if member is not None:
            peer.is_draining = self._is_out_of_use(member)
            peer.take_capabilities(member.capabilities)
            peer.hold(member.is_out_of_service)

    def _is_out_of_use(self, member: Member) -> bool:
        return member.is_leaving or self._is_cordoned(member)

    def on_replaced(self, peer: Replica[Attempt]) -> None:
        self._core.retire_replica(peer)

    def may_return(self, peer: Replica[Attempt]) -> bool:
        """Return False: a retired replica has no name any more, and its process gets another link."""
        return False

    def may_close(self, peer: Replica[Attempt], now_s: float, *, is_replaced: bool) -> bool:
        """Return True if the link may be closed: it is down for GONE_S.

        A process that has lost its name keeps its link only while its stream is up and has attempts or unsent rows.
        """
        is_down = not peer.is_up and peer.down_since_s is not None
        if is_replaced:
            return is_down or not (peer.slots or peer.outbox.waiting_bytes)
        return is_down and now_s - (peer.down_since_s or 0.0) >= GONE_S

    def on_closing(self, peer: Replica[Attempt], now_s: float) -> None:
        """Remove the replica before its stream ends, so that outlier ejection does not count that end as a failure."""
        self._core.remove_replica(peer, now_s)

    def on_closed(self, peer: Replica[Attempt], now_s: float) -> None:
        log.info("replica gone", extra={"replica": peer.name, "address": peer.address})

    def on_settled(self, names: list[str], now_s: float) -> None:
        if names != self._names:
            self._names = names
            self._on_replicas(names)
        self._core.after_event(now_s)
