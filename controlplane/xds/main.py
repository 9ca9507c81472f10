"""The process of the role `xds`: config -> build -> serve -> end the streams.

It receives snapshots as the services do, and holds no lease: no other process dials it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

from controlplane.xds import schema, telemetry
from controlplane.xds.feed import Feed
from controlplane.xds.publication import Publication
from controlplane.xds.server import SERVICE_NAME, AdsServer
from controlplane.xds.topology import Topology
from kvmesh import process, service_options
from kvmesh.clock import MonotonicClock
from kvmesh.config import ConfigError
from kvmesh.membership.address_filter import AddressFilter
from kvmesh.membership.member import POOLS
from kvmesh.membership.membership import Membership
from kvmesh.membership.region_claim import RegionClaim
from kvmesh.metrics import Metrics
from kvmesh.metrics_port import exposed
from kvmesh.redis_link import RedisLink
from kvmesh.request_reader import RequestReader, export_request_reader
from kvmesh.roles import XDS
from kvmesh.server import MeshServer, ServerLimits
from kvmesh.service_options import ServiceOptions
from kvmesh.snapshot import telemetry as receiver_telemetry
from kvmesh.snapshot.dialing import ControlDialer
from kvmesh.snapshot.fence import Fence
from kvmesh.snapshot.identity import Identity
from kvmesh.snapshot.initial import initial_content
from kvmesh.snapshot.receiver import Receiver
from kvmesh.tasks import end
from kvmesh.trust.edge import Edge
from kvmesh.trust.networks import Networks
from kvmesh.trust.peers import EXPIRES, Trust

log = logging.getLogger(__name__)

MESSAGE_BYTES_MAX: Final = 1 << 20
"""Largest request. Envoy lists its extensions in each one, some 100 KB."""

KEEPALIVE_S: Final = 20.0
"""Time between two pings of a client. Clients may be far away."""

STOP_S: Final = 1.0
"""Longest end of all streams at a graceful shutdown."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; return the exit status. 2: it could not start, and one sentence on stderr says why."""
    return process.main(
        XDS,
        lambda: service_options.parse(XDS, arguments, os.environ),
        lambda options: XdsProcess(options).serve(),
        (ConfigError, OSError),
    )


class XdsProcess:
    """One xDS server, built but not started: `serve` opens its sockets and tasks."""

    def __init__(self, options: ServiceOptions) -> None:
        """Read the certificates. Raises ConfigError."""
        config = options.config
        self._options = options
        clock = MonotonicClock()
        trust = Trust(config, XDS)
        edge = Edge(config, trust)
        networks = Networks(config.trust.networks)
        self._redis = RedisLink(options.redis_url)
        self._metrics = Metrics(XDS)
        self._metrics.gauge("certificate_expires_seconds", EXPIRES, trust.expires_s)
        self._metrics.gauge("client_certificate_expires_seconds", EXPIRES, edge.expires_s)
        messages, own = schema.load(), config.region.name
        publication = Publication(messages, own)
        reader = RequestReader(MESSAGE_BYTES_MAX, clock=clock)
        export_request_reader(self._metrics, reader)
        self._ads = AdsServer(messages, publication, reader, clock)
        feed = Feed(config.mesh.name, own, initial_content(config), self._publish)
        telemetry.export(self._ads, publication, feed, self._metrics)
        self._has_published = asyncio.Event()
        self._receiver = Receiver(
            self._redis,
            config.mesh.name,
            Identity(options.process_id, secrets.token_hex(8), XDS, "", (POOLS,)),
            Fence(lambda _: ""),
            ControlDialer(trust, clock, networks),
            state_dir=options.state_dir,
            on_change=feed.on_snapshot,
            clock=clock,
        )
        receiver_telemetry.export(self._receiver, self._metrics)
        self._membership = Membership(
            self._redis, config.mesh.name, feed.on_members, address_filter=AddressFilter(networks)
        )
        self._server = MeshServer(
            XDS,
            options.process_id,
            (SERVICE_NAME,),
            credentials=edge.server_credentials(),
            keepalive_s=KEEPALIVE_S,
            limits=ServerLimits(message_bytes_max=MESSAGE_BYTES_MAX),
            request_reader=reader,
        )
        self._ads.register(self._server.grpc)

    async def serve(self) -> None:
        """Serve until a signal, then end the streams. Raises ListenError, or ConfigError for another region's Redis."""
        options = self._options
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._redis.close)
            claim = RegionClaim(self._redis, options.config.mesh.name, options.config.region.name)
            if fault := await claim.fault_if_reachable():
                raise ConfigError(fault)
            metrics_address = await stack.enter_async_context(
                exposed(
                    self._metrics, lambda: self._server.unready_reason, options.host, options.metrics_port
                )
            )
            self._metrics.process_gauges()
            await self._server.listen(options.listen)
            await self._server.set_serving(False, "no frontend is known yet")
            await self._receiver.start()
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(work, name=name)
                    for name, work in (
                        ("snapshots", self._receiver.run()),
                        ("membership", self._membership.run()),
                        ("readiness", self._become_ready(metrics_address)),
                    )
                ]
                try:
                    await self._server.run(self._ads.stop, STOP_S)
                finally:
                    await end(running)

    def _publish(self, topology: Topology) -> None:
        if self._ads.publish(topology):
            self._has_published.set()

    async def _become_ready(self, metrics_address: str) -> None:
        self._server.announce(metrics_address)
        await self._has_published.wait()
        await self._server.set_serving(True)
        log.info("serving", extra={"address": self._server.address})
