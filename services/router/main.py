"""The router process: config -> build -> serve -> drain."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Final

from kvmesh import process, service_options
from kvmesh.attach.dialing import Dialer
from kvmesh.attach.link_manager import LinkManager
from kvmesh.config import ConfigError
from kvmesh.control.v1 import region_pb2, snapshot_pb2
from kvmesh.membership.member import Member
from kvmesh.queue_order import ORDERS
from kvmesh.regions.quantity import Quantity
from kvmesh.router.v1 import router_pb2_grpc
from kvmesh.service_options import ServiceOptions
from kvmesh.snapshot.published import Published
from kvmesh.start import export_start, wait_for_start
from kvmesh.start_conditions import StartConditions
from kvmesh.tenants.sections import may_be_served_in
from kvmesh.timer import Timer
from kvmesh.trust.peers import Trust
from services.router import telemetry
from services.router.forwarding.admission import ForwardingLimits
from services.router.forwarding.core import ForwardingCore
from services.router.forwarding.prefill_load import PrefillLoad
from services.router.forwarding.region_load import RegionLoad
from services.router.forwarding.replica_links import ReplicaHost
from services.router.gossip.dispatch_gossip import DispatchGossip
from services.router.gossip.peer_routers import known_dispatches
from services.router.hot.listing import HotPrefixListing
from services.router.hot.release_recorder import ReleaseRecorder
from services.router.index.index_reader import IndexReader
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from services.router.pool_members import REFUSED, PoolMembers
from services.router.regions.callers import Callers
from services.router.rehearsal import Rehearsal
from services.router.status import SERVICE_NAME, RouterStatus

log = logging.getLogger(__name__)

VIEW: Final = "leases"
SNAPSHOT: Final = "snapshot"
REPLICAS: Final = "replica links"
INDEX: Final = "prefix index"
DISPATCHES: Final = "dispatches of peer routers"
"""The conditions of the start. Until they hold, at most START_WAIT_S, the router does not register."""

REHEARSALS: Final = 3
"""Runs of the rehearsal, a few milliseconds in all."""

IDLE_POLL_S: Final = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; return the exit status. 2: it could not start, and one sentence on stderr says why."""
    return process.main(
        "router",
        lambda: service_options.parse("router", arguments, os.environ),
        lambda options: Router(options).serve(),
        (ConfigError, OSError),
    )


class Router(process.MeshProcess):
    """One router, built but not started: its sockets and tasks belong to `serve`."""

    def __init__(self, options: ServiceOptions) -> None:
        config = options.config
        super().__init__("router", options, Trust(config, "router"))
        self._is_view_known = False
        self._is_warmed_up = False
        self.start_conditions = StartConditions(
            (VIEW, SNAPSHOT, REPLICAS, INDEX, DISPATCHES), self.clock.now_s()
        )
        export_start(self.start_conditions, self.metrics)
        self._members: list[Member] = []
        self._prefill_load = PrefillLoad()
        self.pool_members = PoolMembers(self.member(""))
        self.metrics.gauge("refused_replicas", REFUSED, lambda: len(self.pool_members.refused))
        name, section, mesh = options.process_id, config.router, config.mesh.name
        block_tokens = config.engine.block_tokens
        dialer = Dialer(self.clock, self.networks)
        dialer.export(self.metrics)
        local_index = LocalPrefixIndex(section.index_blocks_max)
        policy = self._policy = CostPolicy(
            name,
            local_index,
            random.Random(),
            block_tokens=block_tokens,
            dispatch_ahead_s=section.dispatch_ahead_s,
            local_prefill_tokens_max=section.local_prefill_tokens_max,
            transfer_block_s=section.transfer_block_us / 1e6,
            order_key=ORDERS[config.prefill.queue_order],
        )
        self.dispatches = DispatchGossip(
            self.redis,
            mesh,
            name,
            self.boot_id,
            policy.observe,
            known_dispatches(policy.backlog),
            lambda replica: replica in self.core.replicas,
            self.clock,
            pool=self.pool.name,
        )
        self._telemetry = telemetry.ForwardingTelemetry(self.metrics, self.tracing, block_tokens)
        self.release_recorder = ReleaseRecorder(block_tokens)
        self.hot = HotPrefixListing(
            *(self.release_recorder, local_index, self.pool.version.name, block_tokens, self.clock),
            may_leave=partial(may_be_served_in, options.config.tenants),
        )
        self.callers = Callers(config.region.name, config.regions) if config.regions else None
        self.core = ForwardingCore(
            name,
            self.pool.version.name,
            block_tokens,
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
            on_release=self.release_recorder,
            callers=self.callers,
        )
        self.region_load: RegionLoad | None = None
        if self.callers is not None:
            self.region_load = RegionLoad(
                self.core, self.callers, policy, config.decode.slots_max, self._telemetry.ended
            )
            telemetry.export_regions(self.callers, self.region_load, self.metrics, self.clock)
        self.core.readiness.needs_prefill = self.pool.prefill > 0
        self._timer = Timer(self.core, self.clock, _log_bug)
        self.core.on_change = self._timer.update
        self.index = IndexReader(self.redis, mesh, local_index, self.clock)
        host = ReplicaHost(
            self.core,
            self.hello,
            self.pool_members.serves,
            self.clock,
            self.trust.link_channel,
            self.on_replicas,
            self.trust.explain,
            dialer,
            self._is_cordoned,
        )
        self.links = LinkManager(host, self.clock, "replica")
        telemetry.export(self.core, policy, self.index, self.dispatches, self.metrics, self.clock)
        telemetry.export_hot(self.release_recorder, self.metrics)
        attach = self.serve_attach(self.core, SERVICE_NAME)
        router_pb2_grpc.add_RouterServiceServicer_to_server(
            RouterStatus(self.core, policy, attach, self.redis, self.clock, self.hot), self.server.grpc
        )

    def on_members(self, members: list[Member]) -> None:
        """Take a new view of the mesh."""
        self._is_view_known, self._members = True, members
        for refused in self.pool_members.take(members):
            log.warning(refused)
        self.links.update(members)
        if self._is_warmed_up or self.links.is_settled():
            self.dispatches.set_routers(self.pool_members.routers)

    def on_replicas(self, names: Sequence[str]) -> None:
        """Take the present replicas: dispatches of peer routers to them count from now on."""
        self.index.set_replicas(names)
        self._telemetry.set_replicas(names)
        self.dispatches.set_routers(self.pool_members.routers)

    def background(self) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the tasks that keep the replicas, the index, the peer routers and the recorded prompts up to date."""
        yield "replica-links", self.links.run()
        yield "index-reader", self.index.run()
        yield "dispatches", self.dispatches.run()
        yield "hot-prompts", self.hot.run()

    async def become_ready(self) -> None:
        """Serve once the router is warm, or once the wait for it is over."""
        await self.warm_up()
        await self.set_serving()

    async def warm_up(self) -> None:
        """Wait, at most START_WAIT_S, until the router is warm.

        A warm router has the snapshot, has attached its replicas, loaded their index, and heard the open dispatches of its
        peer routers.
        """
        self._rehearse()
        tell = partial(self.server.set_serving, False)
        await wait_for_start(self.start_conditions, self._holds, self.clock, tell)
        self._is_warmed_up = True
        self.dispatches.set_routers(self.pool_members.routers)

    def _rehearse(self) -> None:
        """Run the hot path on a private core. A bug in it is logged: a cold router is better than none."""
        section = self.options.config.router
        try:
            rehearsal = Rehearsal(
                self.options.config.engine.block_tokens,
                dispatch_ahead_s=section.dispatch_ahead_s,
                local_prefill_tokens_max=section.local_prefill_tokens_max,
            )
            for _ in range(REHEARSALS):
                rehearsal.run(self.clock.now_s())
        except Exception:
            log.exception("bug in the rehearsal")

    def _holds(self, _: float) -> dict[str, bool]:
        are_linked = self._is_view_known and self.links.is_settled()
        is_loaded = are_linked and self.index.is_caught_up
        return {
            VIEW: self._is_view_known,
            SNAPSHOT: not self.control.receiver.awaits_first,
            REPLICAS: are_linked and all(replica.is_up for replica in self.core.replicas.values()),
            INDEX: is_loaded,
            DISPATCHES: is_loaded and self.dispatches.is_caught_up(),
        }

    async def drain(self) -> None:
        """Graceful shutdown: refuse new requests. Return when none is left, or another router can take over all."""
        self.core.drain()
        while not self.core.is_idle():
            if self.pool_members.has_other_router and self.core.can_be_taken_over():
                log.info("drained: the other routers take over", extra={"requests": self.core.placed_count})
                return
            await asyncio.sleep(IDLE_POLL_S)

    def on_snapshot(self, published: Published) -> None:
        """Take the cordons of replicas, and whether the pool is closed."""
        pool = published.content.pool(self.pool.name)
        self.core.readiness.is_closed = pool is not None and pool.is_closed
        self.core.check_readiness()
        if self._is_view_known:
            self.links.update(self._members)
        self.core.after_event(self.clock.now_s())

    def _is_cordoned(self, member: Member) -> bool:
        return self.control.content.cordon_of(member.process_id, member.boot_id) is not None

    def set_cordoned(self, is_cordoned: bool) -> None:
        """Report to frontends whether they may place new requests here."""
        self.core.readiness.is_cordoned = is_cordoned
        self.core.check_readiness()
        self.core.after_event(self.clock.now_s())

    def begin_drain(self) -> None:
        """Refuse new requests. Takeovers are still served."""
        self.core.drain()
        self.core.after_event(self.clock.now_s())

    def end_drain(self) -> None:
        """Take new requests again."""
        self.core.undrain()
        self.core.after_event(self.clock.now_s())

    def on_regions(self, traffic: snapshot_pb2.RegionTraffic) -> None:
        """Take this router's part of the grants to other regions."""
        if self.callers is not None:
            grants = {
                each.region: Quantity(each.quantity.tokens_per_s, each.quantity.blocks)
                for each in traffic.grants
            }
            self.callers.renew(grants, self.clock.now_s())

    def _measured_region_load(self) -> region_pb2.RouterLoad | None:
        """Return the load for other regions. None: a mesh without regions."""
        load, now_s = self.region_load, self.clock.now_s()
        if load is None:
            return None
        load.router_count = max(1, len(self.pool_members.routers))
        load.sample(now_s)
        return load.report(now_s)

    def report(self) -> snapshot_pb2.ReceiverReport:
        """Return the load of the pool as this router sees it."""
        load = self._prefill_load
        load.take(self.core.admission.arrived, self._policy.measured_total_s, self.clock.now_s())
        prefill = [each for each in self.core.replicas.values() if each.role == "prefill"]
        in_use = sum(each.is_placeable() for each in prefill)
        is_known = self._policy.knows_costs()
        return snapshot_pb2.ReceiverReport(
            prefill_load_share=load.measured_per_s() / in_use if in_use and is_known else 0.0,
            uncached_prefill_s_per_s=load.uncached_per_s(self._policy.costs.coefficients)
            if is_known
            else 0.0,
            ejection_total=self.core.ejection_total,
            can_place=self.core.readiness.can_place,
            queue_delay_us=self.core.queue_delay_us(),
            longest_wait_us=self.core.longest_wait_us(self.clock.now_s()),
            live_request_count=self.core.live_request_count(),
            region_load=self._measured_region_load(),
        )

    async def close(self) -> None:
        """Stop the timer, and close what every process has."""
        self._timer.close()
        await super().close()


def _log_bug(error: Exception) -> None:
    log.error("timer failed", exc_info=error)
