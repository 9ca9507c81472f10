"""Assembly of one frontend: builds all parts. `MeshProcess.serve` opens the sockets and runs the tasks."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import msgspec

from kvmesh import server as shell
from kvmesh.attach.dialing import Dialer
from kvmesh.attach.link_manager import LinkManager
from kvmesh.clock import MonotonicClock, wall_ns
from kvmesh.config import MeshConfig
from kvmesh.config_sections import Frontend as FrontendSection
from kvmesh.control.v1 import shadow_pb2, snapshot_pb2
from kvmesh.http1.limits import HttpLimits
from kvmesh.http1.server import HttpServer
from kvmesh.http1.telemetry import export_http
from kvmesh.membership.address_filter import AddressFilter
from kvmesh.membership.member import Member
from kvmesh.pools import pool_names
from kvmesh.process import MeshProcess
from kvmesh.redis_link import RedisLink
from kvmesh.regions.names import split
from kvmesh.request_reader import RequestReader, export_request_reader
from kvmesh.service_options import ServiceOptions
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.identity import Identity
from kvmesh.snapshot.initial import initial_content
from kvmesh.snapshot.published import Published
from kvmesh.snapshot.regions import PERMILLE
from kvmesh.snapshot.shadow import SHADOW
from kvmesh.tenants.store import CatalogueStore
from kvmesh.timer import Timer
from kvmesh.trust.edge import Edge
from kvmesh.trust.peers import EXPIRES, Trust
from services.frontend.accounts.accounts import Accounts
from services.frontend.accounts.budgets.batcher import ANSWER_S
from services.frontend.accounts.tenant_metrics import TenantMetrics
from services.frontend.draining import drain
from services.frontend.listeners import Listeners
from services.frontend.mesh_secret import MeshSecret
from services.frontend.metrics import RequestMetrics, watch_core, watch_pools, watch_regions
from services.frontend.readiness import follow_routers
from services.frontend.region_listener import follow_drain
from services.frontend.region_routers import RegionRouters
from services.frontend.requests.core import FrontendCore, Observer
from services.frontend.requests.region_choice import RegionSettings
from services.frontend.requests.resume_token import SECRET_BYTES, Seal
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from services.frontend.requests.watchdog import Watchdog
from services.frontend.routers import Router, router_links
from services.frontend.shadow.lease_store import LeaseStore
from services.frontend.shadow.metrics import watch_shadow
from services.frontend.shadow.shadow_core import ShadowCore
from services.frontend.shadow.shadowing import Shadowing, Tap
from services.frontend.shadow.traffic import ShadowTraffic
from services.frontend.start_gate import hold_diversions
from services.frontend.surface.call_reader import CallReader
from services.frontend.surface.guide_check import GuideCheck
from services.frontend.surface.identity import identify
from services.frontend.surface.intake import Intake
from services.frontend.surface.kserve.protocol import SERVICE_NAME as KSERVE_NAME
from services.frontend.surface.kserve.served_models import ServedModels
from services.frontend.surface.kserve.service import KserveService
from services.frontend.surface.messages import Messages
from services.frontend.surface.model_listing import ModelListing
from services.frontend.surface.openai import http_errors
from services.frontend.surface.openai.app import OpenAiSurface
from services.frontend.surface.request_parser import RequestParser
from services.frontend.surface.served_versions import ServedVersions, models_of
from services.frontend.surface.service import SERVICE_NAME, InferenceService
from services.frontend.warm_up import WarmUp

log = logging.getLogger(__name__)

CLIENT_KEEPALIVE_S: Final = 20.0
"""Keepalive interval of client connections, because clients may be far away. Hops inside the mesh use one second."""

FLUSH_S: Final = 2.0
"""Time at the end of a drain in which clients continue elsewhere and the last settlements are written."""

SEEDED: Final = "seeded_resume"

STREAMS_MIN: Final = 1_000
"""Open calls that one connection may always have. With a small limit, stock gRPC clients see UNAVAILABLE."""

MESSAGE_SLACK_BYTES: Final = 64 << 10
"""The frontend itself refuses a message that is too long by less than this, with a better error than gRPC's."""


class Frontend(MeshProcess):
    """See the module."""

    def __init__(
        self,
        options: ServiceOptions,
        versions: ServedVersions,
        budgets_redis_url: str = "",
        *,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`budgets_redis_url`: Redis of the budgets, if separate. `answer_s`: longest wait for a Redis answer."""
        config = options.config
        self._versions = versions
        super().__init__("frontend", options, Trust(config, "frontend"))
        self._config = config
        self._unseeded_pools: frozenset[str] = frozenset()
        """Pools with a replica whose tokens depend on the engine that makes them."""
        self._has_other = False
        self._guides = GuideCheck()
        self._moving: asyncio.Task[None] | None = None
        """Hands streams over while the control plane drains this frontend."""
        self._budgets_redis = RedisLink(budgets_redis_url) if budgets_redis_url else self.redis
        self.seal = Seal(secrets.token_bytes(SECRET_BYTES))
        self._secret = MeshSecret(
            self.redis, config.mesh.name, self.seal, config.regions.keys() - {config.region.name}
        )
        self.tenants = CatalogueStore(self.redis, config)
        pools = pool_names(config)
        others = self._other_regions = sorted(config.regions.keys() - {config.region.name})
        regions = [config.region.name, *others] if config.regions else []
        counts = RequestMetrics(self.metrics, TenantMetrics(self.metrics, config.tenants), pools, regions)
        self.core = _core(config, self.clock, counts, self.boot_id)
        self.core.take_snapshot(initial_content(config))
        self.core.pools.share_tokenizer = versions.share_tokenizer
        self.core.pools.models = models_of(config)
        self.core.regions.serves = versions.__contains__
        counts.track_of = self.core.pools.track
        watch_core(self.metrics, self.core)
        watch_pools(self.metrics, self.core, pools)
        watch_regions(self.metrics, self.core, self.seal, others)
        self._timer = Timer(self.core, self.clock, lambda error: log.error("bug in a timer", exc_info=error))
        self.core.on_event = self._timer.update
        self.accounts = Accounts(
            config,
            self.redis,
            self._budgets_redis,
            self.boot_id,
            self.clock,
            self.metrics,
            on_news=lambda request_id, epoch, owner: self.core.supersede(
                request_id, epoch, self.clock.now_s(), owner
            ),
            on_charge=counts.on_charge,
            answer_s=answer_s,
        )
        self.is_started = asyncio.Event()
        """Set once the snapshot and the secret of the mesh are known. Requests wait for it."""
        self._is_view_known = False
        """True once the leases were read."""
        self._members: list[Member] = []
        """Members of the own region."""
        self._region_routers = RegionRouters(config.region.name, config.regions, AddressFilter(self.networks))
        self.warm_up = WarmUp(
            self.core,
            versions,
            config.engine.block_tokens,
            self.clock,
            self.metrics,
            has_snapshot=lambda: not self.control.receiver.awaits_first,
            are_routers_known=lambda: self._is_view_known and self.links.is_settled(),
        )
        dialer = Dialer(self.clock, self.networks)
        dialer.export(self.metrics)
        self.links = self._links(dialer)
        self._calls = self._call_reader()
        self._parser = RequestParser(
            versions, self.seal, self._guides, message_bytes_max=config.frontend.message_bytes_max
        )
        self._listing = ModelListing(
            versions, self.core.pools, self.core.peers, config.frontend.message_bytes_max
        )
        self.service = self._service(counts)
        self.shadowing = self._shadowing(dialer)
        watch_shadow(self.metrics, self.shadowing)
        self._edge = Edge(config, self.trust)
        self.server = self._server()
        self.server.register(self.service.register)
        self.http = self._http()
        self.kserve = KserveService(
            self.service,
            ServedModels(versions, self.core.pools.default_model),
            self.clock,
            message_bytes_max=config.frontend.message_bytes_max,
            unready_reason=lambda: self.server.unready_reason,
        )
        self.server.register(self.kserve.register)
        self.metrics.gauge("kserve_streams", "Open streams of KServe.", lambda: self.kserve.stream_count)

    def _links(self, dialer: Dialer) -> LinkManager[Router]:
        return router_links(
            self.core,
            self.hello,
            self._serves,
            self.clock,
            self.trust.links_to("router"),
            partial(self.trust.explain, role="router"),
            dialer,
            self.warm_up,
        )

    def _call_reader(self) -> CallReader:
        section = self._config.frontend
        reader = RequestReader(
            section.message_bytes_max + MESSAGE_SLACK_BYTES,
            calls_max=section.unread_calls_max,
            timeout_s=section.request_timeout_s,
            setting="frontend.request_timeout_s",
            clock=self.clock,
        )
        export_request_reader(self.metrics, reader)
        return CallReader(lambda call: identify(call, self.tenants.catalogue), reader)

    def _service(self, counts: RequestMetrics) -> InferenceService:
        section = self._config.frontend
        versions = self._versions
        return InferenceService(
            self.core,
            self._calls,
            Intake(
                self.core,
                versions,
                self._parser,
                self.accounts.executions,
                self.seal,
                self.clock,
                start_min_s=section.start_min_s,
                started=self.is_started.wait,
                is_seeded=self.is_seeded,
            ),
            self.accounts.accounting,
            Messages(
                lambda version: versions.get(version).tokenizer.detokenizer(),
                self.seal,
                self.options.process_id,
                self._config.region.name,
                self.is_seeded,
            ),
            self.tracing,
            self.clock,
            listing=self._listing,
            on_refused=counts.on_refused,
        )

    def _shadowing(self, dialer: Dialer) -> Shadowing:
        config, versions = self._config, self._versions
        traffic = ShadowTraffic(
            self.core,
            lambda observer: ShadowCore(
                config.engine.block_tokens,
                observer,
                self.clock.now_s(),
                _watchdog(config),
                jitter=random.random,
            ),
            detokenizer=lambda version: versions.get(version).tokenizer.detokenizer(),
            share_tokenizer=versions.share_tokenizer,
            wall_s=lambda: wall_ns() / 1e9,
            boot_id=self.boot_id,
        )
        return Shadowing(
            traffic,
            LeaseStore(self.redis, config.mesh.name),
            self.clock,
            self._set_tap,
            hello=self.hello,
            open_channel=self.trust.links_to("router"),
            explain=partial(self.trust.explain, role="router"),
            dialer=dialer,
            decode_slots=config.decode.slots_max,
        )

    def _set_tap(self, tap: Tap | None) -> None:
        self.service.tap = tap

    def _http(self) -> HttpServer:
        section = self._config.frontend
        surface = OpenAiSurface(
            self.core,
            self.service,
            self._calls,
            self._parser,
            self._listing,
            self._versions,
            self.clock,
            body_bytes_max=section.message_bytes_max,
            unready_reason=self.unready_reason,
        )
        limits = HttpLimits(
            connections_max=section.connections_max,
            head_s=section.request_timeout_s,
            handshake_s=shell.HANDSHAKE_S,
        )
        server = HttpServer(surface.application, limits, http_errors.plain, self._edge.server_credentials())
        export_http(self.metrics, server)
        return server

    def _server(self) -> shell.MeshServer:
        edge = self._edge
        self.metrics.gauge("client_certificate_expires_seconds", EXPIRES, edge.expires_s)
        return shell.MeshServer(
            "frontend",
            self.options.process_id,
            [SERVICE_NAME, KSERVE_NAME],
            keepalive_s=CLIENT_KEEPALIVE_S,
            credentials=edge.server_credentials(),
            limits=limits_of(self._config.frontend),
            transport=self._config.frontend.edge,
        )

    def is_seeded(self, pool: str) -> bool:
        """True if tokens of `pool` do not depend on the engine that makes them. Pools elsewhere count as the own ones."""
        return split(pool)[1] not in self._unseeded_pools

    def _serves(self, member: Member) -> bool:
        return member.model_version in self._versions

    def refusal(self, content: Content) -> str:
        """Return why this frontend cannot serve the pools of `content`, or an empty text."""
        return self._versions.refusal(content)

    def on_snapshot(self, published: Published) -> None:
        """Choose the pools of new requests by `published`."""
        self.core.take_snapshot(published.content)
        own = published.content.region(self._config.region.name)
        self.tenants.set_share(own.limit_share_permille / PERMILLE if own is not None else 0.0)
        self._region_routers.take(published.content.regions)
        if self._is_view_known:
            self._link_routers()
        self.shadowing.on_snapshot(published.content)

    def member(self, address: str) -> Member:
        """Return the member to register, which says that the frontend can copy requests."""
        found = super().member(address)
        return msgspec.structs.replace(found, capabilities=(*found.capabilities, SHADOW))

    def on_members(self, members: list[Member]) -> None:
        """Take a new view of the mesh's members."""
        self._is_view_known = True
        self._members = members
        self._link_routers()
        self.shadowing.on_members(members, sum(member.role == "frontend" for member in members))
        self._unseeded_pools = frozenset(
            member.pool
            for member in members
            if member.role in ("prefill", "decode") and SEEDED not in member.capabilities
        )
        others = [
            member
            for member in members
            if member.role == "frontend"
            and member.process_id != self.options.process_id
            and not member.draining
        ]
        self._has_other = bool(others)
        self.core.retries.share(1 + len(others), self.clock.now_s())
        rank = sum(other.process_id < self.options.process_id for other in others)
        self.accounts.budgets.on_members(1 + len(others), rank)

    def _link_routers(self) -> None:
        """Link the routers of all regions."""
        self.links.update(self._region_routers.with_foreign(self._members))

    def on_regions(self, traffic: snapshot_pb2.RegionTraffic) -> None:
        """Take the shares of new sessions that other regions get."""
        shares = {each.region: each.share for each in traffic.spill}
        self.core.regions.take_shares(shares, self.clock.now_s())

    async def drain(self) -> None:
        """Refuse new requests (graceful shutdown); return when every request has ended or is handed over."""
        self._stop_moving()
        self.kserve.begin_drain()
        await drain(
            self.core,
            self.clock,
            lambda: self._has_other,
            shell.DRAIN_S - FLUSH_S,
            self._send_clients_on,
        )

    def _send_clients_on(self) -> None:
        self.server.send_clients_on()
        self.http.send_clients_on()

    def begin_drain(self) -> None:
        """Refuse new requests, and hand streams over while another frontend is there. No stream is cut."""
        self._stop_moving()
        self._moving = asyncio.create_task(
            drain(self.core, self.clock, lambda: self._has_other, float("inf")), name="drain"
        )
        self.core.is_draining = True
        self.kserve.begin_drain()

    def end_drain(self) -> None:
        """Take new requests again."""
        self._stop_moving()
        self.core.is_draining = False
        self.kserve.end_drain()

    def _stop_moving(self) -> None:
        if self._moving is not None:
            self._moving.cancel()
            self._moving = None

    def identity(self) -> Identity:
        """Return the introduction of the frontend, with the model versions that it can serve."""
        found = super().identity()
        capabilities = (*found.capabilities, SHADOW)
        return dataclasses.replace(found, model_versions=tuple(self._versions), capabilities=capabilities)

    def report(self) -> snapshot_pb2.ReceiverReport:
        """Return the number of requests, and which other regions are reached."""
        return snapshot_pb2.ReceiverReport(
            live_request_count=len(self.core.admitted.serving),
            reached=[
                snapshot_pb2.RegionReach(
                    region=region, up=any(peer.link.is_up for peer in self.core.peers.of_region(region))
                )
                for region in self._other_regions
            ],
        )

    def observations(self) -> snapshot_pb2.ObservationBatch | None:
        """Return the next batch of observations."""
        return self.core.observations.drain(self.clock.now_s())

    def on_confirmed(self, sequence: int) -> None:
        """Forget the observations that the control plane has stored."""
        self.core.observations.confirm(sequence)

    def shadows(self) -> Sequence[shadow_pb2.ShadowReport]:
        """Return the counts of shadow traffic that changed since the last call."""
        return self.shadowing.report()

    def on_leader(self) -> None:
        """Send unconfirmed observations and all counts of shadow traffic again."""
        self.core.observations.resend()
        self.shadowing.resend()

    async def prepare(self) -> None:
        """Take the mesh's secret and the tenants' catalogue from Redis: both are needed to answer requests."""
        await self._secret.renew()
        await self.tenants.start()

    def background(self) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the tasks of the links, of the state in Redis, and of readiness. Requests are read from now on."""
        self.is_started.set()
        yield "router-links", self.links.run()
        yield "start-gate", hold_diversions(self.core, self.clock)
        yield "mesh-secret", self._secret.run()
        yield from self.accounts.background()
        yield from self.shadowing.background()
        yield "tenants", self.tenants.run()
        if self._config.regions:
            own = self._config.region.name
            yield (
                "region-listener",
                follow_drain(
                    Listeners(self.server, self.http),
                    lambda: self.core.pools.content.is_region_drained(own),
                    self.clock,
                ),
            )
        yield (
            "readiness",
            follow_routers(
                lambda: self.core.pools.has_router or self.core.regions.takes_new,
                self.clock,
                self.server.set_serving,
            ),
        )

    async def become_ready(self) -> None:
        """Serve once the frontend is warm, or once the wait for it is over."""
        await self.warm_up.run(partial(self.server.set_serving, False))
        await self.set_serving()

    @asynccontextmanager
    async def further_ports(self) -> AsyncIterator[Mapping[str, str]]:
        """Serve HTTP inside the block, and yield its address. Raises HttpListenError."""
        host = self.options.listen.rpartition(":")[0]
        try:
            yield {"http": self.http.listen(f"{host}:{self.options.http_port}")}
        finally:
            await self.http.stop()

    async def flush(self) -> None:
        """End what is left of requests over HTTP, and write every settlement to Redis, within FLUSH_S."""
        await self.http.stop()
        await self.accounts.flush(FLUSH_S)

    async def close(self) -> None:
        """Stop the timer and export the last spans."""
        self._stop_moving()
        self.shadowing.close()
        self._timer.close()
        await self._guides.close()
        await self._budgets_redis.close()
        await super().close()


def _core(config: MeshConfig, clock: MonotonicClock, observer: Observer, boot_id: str) -> FrontendCore:
    section = config.frontend
    return FrontendCore(
        Limits(
            section.attempts_max,
            config.decode.detached_s,
            config.engine.block_tokens,
            _watchdog(config),
            section.start_min_s,
        ),
        limit=section.max_live_requests,
        retries=RetryBudget(section.retry_budget_ratio, section.retry_budget_per_s, clock.now_s()),
        jitter=random.random,
        observer=observer,
        boot_id=boot_id,
        regions=RegionSettings(
            config.region.name, frozenset(config.regions), config.region.other_version == "stable"
        ),
    )


def _watchdog(config: MeshConfig) -> Watchdog:
    section = config.frontend
    return Watchdog(section.first_token_silence_s, section.token_silence_s, config.router.queue_max_wait_s)


def limits_of(section: FrontendSection) -> shell.ServerLimits:
    """Return gRPC's limits for clients. On one connection the frontend refuses a call before gRPC does."""
    streams = max(STREAMS_MIN, section.max_live_requests + section.unread_calls_max)
    return shell.ServerLimits(
        message_bytes_max=section.message_bytes_max + MESSAGE_SLACK_BYTES,
        connections_max=section.connections_max,
        streams_max=streams,
        pending_max=max(shell.ServerLimits().pending_max, streams),
    )
