"""Starts a frontend: config -> build -> serve -> drain."""

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
from functools import partial

from kvmesh import server as shell
from kvmesh import service_options, telemetry
from kvmesh.advertise import AS_LISTENED, Advertised
from kvmesh.attach.dialing import Dialer
from kvmesh.attach.server import PROTOCOL_VERSION
from kvmesh.attach.v1 import attach_pb2
from kvmesh.buckets.ledger import Ledger
from kvmesh.clock import MonotonicClock
from kvmesh.config import ConfigError, MeshConfig
from kvmesh.config import Frontend as FrontendSection
from kvmesh.membership import telemetry as name_telemetry
from kvmesh.membership.address_filter import AddressFilter
from kvmesh.membership.member import Member
from kvmesh.membership.membership import Membership
from kvmesh.membership.registration import Registration
from kvmesh.metrics import Metrics, exposed
from kvmesh.redis_link import RedisLink
from kvmesh.redis_url import BUDGETS_VARIABLE
from kvmesh.request_reader import RequestReader, watch_request_reader
from kvmesh.tasks import end
from kvmesh.tenants.labels import Labels
from kvmesh.tenants.store import CatalogueStore
from kvmesh.timer import Timer
from kvmesh.trust.edge import Edge
from kvmesh.trust.networks import Networks
from kvmesh.trust.peers import EXPIRES, Trust
from services.frontend.accounts.accounting import Accounting
from services.frontend.accounts.budgets.batcher import ANSWER_S
from services.frontend.accounts.budgets.budgets import Budgets, watch_budgets
from services.frontend.accounts.budgets.metrics import BudgetMetrics
from services.frontend.accounts.executions import Executions
from services.frontend.accounts.settlement import Settlements
from services.frontend.accounts.tenant_metrics import TenantMetrics
from services.frontend.draining import drain
from services.frontend.mesh_secret import MeshSecret
from services.frontend.metrics import RequestMetrics, watch_core, watch_executions
from services.frontend.readiness import follow_routers
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.resume_token import SECRET_BYTES, Seal
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from services.frontend.requests.watchdog import Watchdog
from services.frontend.routers import router_links
from services.frontend.surface.call_reader import CallReader
from services.frontend.surface.identity import identify
from services.frontend.surface.intake import Intake
from services.frontend.surface.messages import Messages
from services.frontend.surface.request_parser import RequestParser
from services.frontend.surface.service import SERVICE_NAME, InferenceService
from services.frontend.surface.tokenizer import ModelFolderError, ModelTokenizer
from services.frontend.surface.validation import Bounds

log = logging.getLogger(__name__)

REGION = "local"
"""Until the control plane names regions there is one."""

CLIENT_KEEPALIVE_S = 20.0
"""Clients may be far away and asleep; the hops inside the mesh are watched every second."""

FLUSH_S = 2.0
"""Time at the end of a drain for clients to go on elsewhere and for the last settlements."""

SEEDED = "seeded_resume"

STREAMS_MIN = 1_000
"""Open calls that one connection may always have: stock clients see UNAVAILABLE where it is few."""

MESSAGE_SLACK_BYTES = 64 << 10
"""Messages that are too long by less than this are refused by the frontend, which says so better than gRPC."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where and as whom this process runs."""

    name: str
    listen: str
    redis_url: str
    metrics_port: int
    advertise: Advertised = AS_LISTENED
    """What is registered in place of `listen`."""
    budgets_redis_url: str = ""
    """Redis of the budgets, if it is another."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a frontend until it is asked to stop; exits with a sentence where it cannot start."""
    parser = argparse.ArgumentParser(prog="python -m services.frontend")
    service_options.add_options(parser, "frontend", os.environ)
    given = parser.parse_args(arguments)
    try:
        options = service_options.read(given)
        config = options.config
        place = Place(
            *(options.process_id, options.listen, options.redis_url, options.metrics_port, options.advertise),
            os.environ.get(BUDGETS_VARIABLE, ""),
        )
        telemetry.start_logging(config.telemetry.log_level, "frontend", place.name)
        tokenizer = ModelTokenizer.load(config.mesh.model_path)
        sys.exit(shell.run(serve(config, place, tokenizer)))
    except (ConfigError, ModelFolderError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


async def serve(config: MeshConfig, place: Place, tokenizer: ModelTokenizer) -> int:
    """Serve until a signal; return the exit status."""
    redis = RedisLink(place.redis_url)
    budgets_redis = RedisLink(place.budgets_redis_url) if place.budgets_redis_url else redis
    frontend = Frontend(config, place, tokenizer, redis, budgets_redis)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(redis.close)
        stack.push_async_callback(budgets_redis.close)
        address = await frontend.server.listen(place.listen)
        host = address.rpartition(":")[0]
        metrics_address = await stack.enter_async_context(exposed(frontend.metrics, host, place.metrics_port))
        frontend.metrics.process_gauges()
        member = frontend.member(place.advertise.address(address))
        registration = Registration(redis, config.mesh.name, member, frontend.server.stand_by)
        gate = AddressFilter(frontend.networks)
        name_telemetry.export(registration, gate, frontend.metrics)
        membership = Membership(redis, config.mesh.name, frontend.on_members, own=registration, gate=gate)
        secret = MeshSecret(redis, config.mesh.name, frontend.seal)
        await secret.renew()
        await frontend.tenants.start()
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        running = [
            tasks.create_task(frontend.links.run(), name="router-links"),
            tasks.create_task(membership.run(), name="membership"),
            tasks.create_task(registration.run(), name="registration"),
            tasks.create_task(secret.run(), name="mesh-secret"),
            tasks.create_task(frontend.executions.run(), name="executions"),
            tasks.create_task(frontend.settlements.run(), name="settlements"),
            tasks.create_task(frontend.tenants.run(), name="tenants"),
            tasks.create_task(frontend.budgets.run(), name="budgets"),
        ]
        await frontend.server.set_serving(True)
        readiness = follow_routers(frontend.core.peers, MonotonicClock(), frontend.server.set_serving)
        running.append(tasks.create_task(readiness, name="readiness"))
        frontend.server.announce(metrics_address)
        log.info("serving", extra={"address": address, "model_version": member.model_version})
        gc.collect()
        gc.freeze()  # what is built lives as long as the process; the collector need not walk it again

        async def drain() -> None:
            registration.update(draining=True)
            await frontend.drain()

        try:
            await frontend.server.run(drain)
        finally:
            await frontend.settlements.flush(FLUSH_S / 2)
            await frontend.budgets.flush(FLUSH_S / 2)
            await end(running)
            await registration.deregister()
            frontend.close()
    return 0


def limits_of(section: FrontendSection) -> shell.ServerLimits:
    """Return what gRPC holds for clients. One connection can fill the frontend and is still told so by the frontend."""
    streams = max(STREAMS_MIN, section.max_live_requests + section.unread_calls_max)
    return shell.ServerLimits(
        message_bytes_max=section.message_bytes_max + MESSAGE_SLACK_BYTES,
        connections_max=section.connections_max,
        streams_max=streams,
        pending_max=max(shell.ServerLimits().pending_max, streams),
    )


class Frontend:
    """One frontend, built but not started: everything but its sockets, Redis and tasks."""

    def __init__(
        self,
        config: MeshConfig,
        place: Place,
        tokenizer: ModelTokenizer,
        redis: RedisLink,
        budgets_redis: RedisLink | None = None,
        *,
        answer_s: float = ANSWER_S,
    ) -> None:
        """Build it. `answer_s`: longest wait for a word of Redis that a request has."""
        clock = MonotonicClock()
        section, version = config.frontend, config.engine.salt
        self._version = version
        self._block_tokens = config.engine.block_tokens
        self._name = place.name
        self._boot_id = f"{secrets.randbits(64):016x}"
        self._is_seeded = True
        self.seal = Seal(secrets.token_bytes(SECRET_BYTES))
        self._clock = clock
        self._has_other = False
        self.metrics = Metrics("frontend")
        self.tracing = telemetry.tracing_of(config.telemetry, "frontend", place.name)
        self.tenants = CatalogueStore(redis, config)
        tenants = TenantMetrics(self.metrics, config.tenants)
        self.budgets = Budgets(
            Ledger(budgets_redis or redis, config.mesh.name),
            self._boot_id,
            clock,
            BudgetMetrics(self.metrics, Labels(config.tenants).of),
            answer_s=answer_s,
        )
        watch_budgets(self.metrics, self.budgets)
        counts = RequestMetrics(self.metrics, tenants)
        self.core = FrontendCore(
            Limits(
                section.attempts_max,
                config.decode.detached_s,
                self._block_tokens,
                Watchdog(
                    section.first_token_silence_s, section.token_silence_s, config.router.queue_max_wait_s
                ),
                section.start_min_s,
            ),
            places=section.max_live_requests,
            retries=RetryBudget(section.retry_budget_ratio, section.retry_budget_per_s, clock.now_s()),
            jitter=random.random,
            observer=counts,
        )
        watch_core(self.metrics, self.core)
        self.executions = Executions(
            redis,
            config.mesh.name,
            self._boot_id,
            clock,
            max(section.runtime_max_s, config.runtime_longest_s),
            lambda request_id, epoch, owner: self.core.supersede(request_id, epoch, clock.now_s(), owner),
            answer_s=answer_s,
        )
        self.settlements = Settlements(
            redis, config.mesh.name, max(section.runtime_max_s, config.runtime_longest_s), counts.on_charge
        )
        watch_executions(self.metrics, self.executions, self.settlements)
        self._alarm = Timer(self.core, clock, lambda error: log.error("bug in a timer", exc_info=error))
        self.core.on_event = self._alarm.update
        hello = attach_pb2.Hello(
            process_id=place.name, boot_id=self._boot_id, protocol_version=PROTOCOL_VERSION
        )
        trust = Trust(config, "frontend")
        self.networks = Networks(config.trust.networks)
        dialer = Dialer(clock, self.networks)
        dialer.export(self.metrics)
        edge = Edge(config, trust)
        self.metrics.gauge("certificate_expires_seconds", EXPIRES, trust.expires_s)
        self.metrics.gauge("client_certificate_expires_seconds", EXPIRES, edge.expires_s)
        self.links = router_links(
            self.core,
            hello,
            version,
            clock,
            trust.channels_to("router"),
            partial(trust.explain, role="router"),
            dialer,
        )
        bounds = Bounds(
            model=config.mesh.model,
            model_version=version,
            vocab_size=tokenizer.vocab_size,
            token_bytes_max=tokenizer.token_bytes_max,
            max_sequence_tokens=config.engine.max_sequence_tokens,
            max_output_tokens_default=section.max_output_tokens_default,
            max_output_tokens_max=section.max_output_tokens_max,
        )
        parser = RequestParser(tokenizer, bounds, self.seal, message_bytes_max=section.message_bytes_max)
        intake = Intake(self.core, parser, self.executions, self.seal, clock, start_min_s=section.start_min_s)
        reception = RequestReader(
            section.message_bytes_max + MESSAGE_SLACK_BYTES,
            calls_max=section.unread_calls_max,
            timeout_s=section.request_timeout_s,
            setting="frontend.request_timeout_s",
            clock=clock,
        )
        watch_request_reader(self.metrics, reception)
        self.service = InferenceService(
            self.core,
            CallReader(lambda call: identify(call, self.tenants.catalogue), reception),
            intake,
            Accounting(self.settlements, self.budgets),
            Messages(tokenizer.token_bytes, self.seal, place.name, REGION, lambda: self._is_seeded),
            self.tracing,
            clock,
            on_refused=counts.on_refused,
        )
        self.server = shell.MeshServer(
            "frontend",
            place.name,
            [SERVICE_NAME],
            keepalive_s=CLIENT_KEEPALIVE_S,
            credentials=edge.server_credentials(),
            limits=limits_of(section),
        )
        self.service.register(self.server.grpc)

    def member(self, address: str) -> Member:
        """Return what this process registers as."""
        return Member(
            process_id=self._name,
            role="frontend",
            address=address,
            boot_id=self._boot_id,
            model_version=self._version,
            block_tokens=self._block_tokens,
        )

    def on_members(self, members: Sequence[Member]) -> None:
        """Take a new view of the mesh."""
        self.links.update(members)
        replicas = [member for member in members if member.role in ("prefill", "decode")]
        self._is_seeded = all(SEEDED in member.capabilities for member in replicas)
        others = [
            member
            for member in members
            if member.role == "frontend" and member.process_id != self._name and not member.draining
        ]
        self._has_other = bool(others)
        self.core.retries.share(1 + len(others), self._clock.now_s())
        place = sum(other.process_id < self._name for other in others)
        self.budgets.on_members(1 + len(others), place)

    async def drain(self) -> None:
        """Refuse new requests, and return when the last one ended or was told to go on elsewhere."""
        await drain(self.core, self._clock, lambda: self._has_other, shell.DRAIN_S - FLUSH_S)

    def close(self) -> None:
        """Stop the timer and export the last spans."""
        self._alarm.close()
        self.tracing.close()
