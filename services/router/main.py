"""The router process: config -> build -> serve -> drain."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import random
import secrets
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from kvmesh import server as mesh_server
from kvmesh import service_options
from kvmesh.advertise import AS_LISTENED, Advertised
from kvmesh.attach.dialing import Dialer
from kvmesh.attach.link_manager import LinkManager
from kvmesh.attach.outbox import MESSAGE_BYTES_MAX
from kvmesh.attach.server import PROTOCOL_VERSION, AttachService
from kvmesh.attach.v1 import attach_pb2, attach_pb2_grpc
from kvmesh.clock import MonotonicClock
from kvmesh.config import ConfigError, MeshConfig
from kvmesh.membership import telemetry as name_telemetry
from kvmesh.membership.address_filter import AddressFilter
from kvmesh.membership.member import Member
from kvmesh.membership.membership import Membership
from kvmesh.membership.registration import Registration
from kvmesh.metrics import Metrics, exposed
from kvmesh.queue_order import ORDERS
from kvmesh.redis_link import RedisLink
from kvmesh.request_reader import RequestReader, export_request_reader
from kvmesh.router.v1 import router_pb2_grpc
from kvmesh.tasks import end
from kvmesh.telemetry import start_logging, tracing_of
from kvmesh.timer import Timer
from kvmesh.trust.networks import Networks
from kvmesh.trust.peers import EXPIRES, Trust
from services.router import telemetry
from services.router.forwarding.admission import ForwardingLimits
from services.router.forwarding.core import ForwardingCore
from services.router.forwarding.replica_links import ReplicaHost
from services.router.gossip.dispatch_gossip import DispatchGossip
from services.router.gossip.peer_routers import known_dispatches
from services.router.index.index_reader import IndexReader
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from services.router.status import SERVICE_NAME, RouterStatus

log = logging.getLogger(__name__)

ATTACH_NAME: Final = "kvmesh.attach.v1.AttachService"
WARM_UP_S: Final = 2.0
"""A router registers when it is attached to the replicas it found and has loaded their index, or after this."""

LOOK_S: Final = 0.02
IDLE_LOOK_S: Final = 0.05
USAGE_ERROR: Final = 2


@dataclass(frozen=True, slots=True)
class Place:
    """Where and as whom this process runs."""

    name: str
    listen: str
    redis_url: str
    metrics_port: int
    advertise: Advertised = AS_LISTENED
    """What is registered in place of `listen`."""

    @property
    def host(self) -> str:
        """Host the process listens on."""
        return self.listen.rpartition(":")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; return the exit status. 2: it could not start, and one sentence on stderr says why."""
    parser = argparse.ArgumentParser(prog="python -m services.router")
    service_options.add_options(parser, "router", os.environ)
    given = parser.parse_args(arguments)
    try:
        options = service_options.read(given)
        config = options.config
        place = Place(
            *(options.process_id, options.listen, options.redis_url, options.metrics_port, options.advertise)
        )
        start_logging(config.telemetry.log_level, "router", place.name)
        return mesh_server.run(serve(config, place))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return USAGE_ERROR


async def serve(config: MeshConfig, place: Place) -> int:
    """Serve until a signal; return the exit status."""
    async with AsyncExitStack() as stack:
        router = Router(config, place)
        stack.callback(router.close)
        stack.push_async_callback(router.redis.close)
        metrics_address = await stack.enter_async_context(
            exposed(router.metrics, place.host, place.metrics_port)
        )
        router.metrics.process_gauges()
        address = await router.server.listen(place.listen)
        member = router.member(place.advertise.address(address))
        registration = Registration(router.redis, config.mesh.name, member, router.server.stand_by)
        address_filter = AddressFilter(router.networks)
        name_telemetry.export(registration, address_filter, router.metrics)
        membership = Membership(
            router.redis, config.mesh.name, router.on_members, own=registration, address_filter=address_filter
        )
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(router.links.run(), name="replica-links"),
                tasks.create_task(router.index.run(), name="index-reader"),
                tasks.create_task(router.dispatches.run(), name="dispatches"),
                tasks.create_task(membership.run(), name="membership"),
            ]
            try:
                await router.warm_up()
                running.append(tasks.create_task(registration.run(), name="registration"))
                await router.server.set_serving(True)
                router.server.announce(metrics_address)
                log.info("serving", extra={"address": address})
                gc.collect()
                gc.freeze()  # what is built lives as long as the process; the collector need not walk it again

                async def drain() -> None:
                    registration.update(draining=True)
                    await router.drain()

                await router.server.run(drain)
            finally:
                await end(running)
        await registration.deregister()
    return 0


class Router:
    """One router, built but not started: everything but its sockets, Redis and tasks."""

    def __init__(self, config: MeshConfig, place: Place) -> None:
        self._place = place
        self._version = config.engine.salt
        self._block_tokens = config.engine.block_tokens
        self._boot_id = secrets.token_hex(8)
        self._is_view_known = False
        self._is_warmed_up = False
        self._routers: list[tuple[str, str]] = []
        self.has_heir = False
        """True while another router is there that takes new requests."""
        clock = MonotonicClock()
        section, mesh = config.router, config.mesh.name
        trust = Trust(config, "router")
        self.networks = Networks(config.trust.networks)
        self.metrics = Metrics("router")
        dialer = Dialer(clock, self.networks)
        dialer.export(self.metrics)
        self._tracing = tracing_of(config.telemetry, "router", place.name)
        self.redis = RedisLink(place.redis_url)
        local_index = LocalPrefixIndex(section.index_blocks_max)
        policy = CostPolicy(
            place.name,
            local_index,
            random.Random(),
            block_tokens=self._block_tokens,
            dispatch_ahead_s=section.dispatch_ahead_s,
            local_prefill_tokens_max=section.local_prefill_tokens_max,
            transfer_block_s=section.transfer_block_us / 1e6,
            order_key=ORDERS[config.prefill.queue_order],
        )
        self.dispatches = DispatchGossip(
            self.redis,
            mesh,
            place.name,
            self._boot_id,
            policy.observe,
            known_dispatches(policy.backlog),
            lambda replica: replica in self.relay.replicas,
            clock,
        )
        self._telemetry = telemetry.ForwardingTelemetry(self.metrics, self._tracing, self._block_tokens)
        self.relay = ForwardingCore(
            place.name,
            self._version,
            self._block_tokens,
            policy,
            ForwardingLimits(
                section.queue_max_requests,
                section.queue_max_wait_s,
                config.decode.detached_s,
                section.queue_max_tokens,
                section.queue_delay_max_s,
                ORDERS[config.prefill.queue_order],
            ),
            publish=self.dispatches.publish,
            record=self._telemetry,
            forecast=policy,
        )
        self._alarm = Timer(self.relay, clock, _log_bug)
        self.relay.on_change = self._alarm.update
        self.index = IndexReader(self.redis, mesh, local_index, clock)
        hello = attach_pb2.Hello(
            process_id=place.name, boot_id=self._boot_id, protocol_version=PROTOCOL_VERSION
        )
        host = ReplicaHost(
            self.relay,
            hello,
            self._version,
            self._block_tokens,
            clock,
            trust.channel,
            self.on_replicas,
            trust.explain,
            dialer,
        )
        self.links = LinkManager(host, clock, "replica")
        telemetry.export(self.relay, policy, self.index, self.dispatches, self.metrics, clock)
        self.metrics.gauge("certificate_expires_seconds", EXPIRES, trust.expires_s)
        request_reader = RequestReader(MESSAGE_BYTES_MAX, clock=clock)
        export_request_reader(self.metrics, request_reader)
        self.server = mesh_server.MeshServer(
            "router",
            place.name,
            (ATTACH_NAME, SERVICE_NAME),
            credentials=trust.server_credentials(),
            guards=trust.guards(),
            request_reader=request_reader,
        )
        attach = AttachService(self.relay, hello, clock, request_reader)
        attach_pb2_grpc.add_AttachServiceServicer_to_server(attach, self.server.grpc)
        router_pb2_grpc.add_RouterServiceServicer_to_server(
            RouterStatus(self.relay, policy, attach, self.redis, clock), self.server.grpc
        )

    def member(self, address: str) -> Member:
        """Return what this process registers as."""
        return Member(
            process_id=self._place.name,
            role="router",
            address=address,
            boot_id=self._boot_id,
            model_version=self._version,
            block_tokens=self._block_tokens,
        )

    def on_members(self, members: Sequence[Member]) -> None:
        """Take a new view of the mesh."""
        self._is_view_known = True
        self.has_heir = any(
            member.role == "router"
            and member.boot_id != self._boot_id
            and member.model_version == self._version
            and not member.draining
            for member in members
        )
        self.links.update(members)
        self._routers = [(member.process_id, member.boot_id) for member in members if member.role == "router"]
        if self._is_warmed_up or self.links.is_settled():
            self.dispatches.set_routers(self._routers)

    def on_replicas(self, names: Sequence[str]) -> None:
        """Take the replicas there are: what other routers have dispatched to them means something from now on."""
        self.index.set_replicas(names)
        self._telemetry.set_replicas(names)
        self.dispatches.set_routers(self._routers)

    async def warm_up(self) -> None:
        """Wait until the replicas that are there are attached, their index is loaded, and the other routers have told what
        they have dispatched; at most WARM_UP_S.
        """
        try:
            async with asyncio.timeout(WARM_UP_S):
                while not self._is_warm():
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            log.warning("serving before every replica is attached and known")
        self._is_warmed_up = True
        self.dispatches.set_routers(self._routers)

    def _is_warm(self) -> bool:
        if not (self._is_view_known and self.links.is_settled() and self.index.is_caught_up):
            return False
        is_attached = all(replica.is_up for replica in self.relay.replicas.values())
        return is_attached and self.dispatches.is_caught_up()

    async def drain(self) -> None:
        """Refuse new requests and wait until the last one ended, or until another router can take over what is left."""
        self.relay.drain()
        while not self.relay.is_idle():
            if self.has_heir and self.relay.can_be_taken_over():
                log.info("the other routers take over", extra={"requests": self.relay.relayed_count})
                return
            await asyncio.sleep(IDLE_LOOK_S)

    def close(self) -> None:
        """Stop the timer and export the last spans."""
        self._alarm.close()
        self._tracing.close()


def _log_bug(error: Exception) -> None:
    log.error("bug in a timer", exc_info=error)
