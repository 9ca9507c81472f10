"""The control plane's hold on a process: its snapshots, and its cordon or drain, shown in lease and health.

Only a MeshProcess owns one. The role decides in its steps (`Controlled`) what a cordon and a drain mean. A drain by the
control plane is reversible; one by a signal is not, and from then on snapshots change nothing here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol

from kvmesh.clock import Clock
from kvmesh.control.v1 import shadow_pb2
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.membership.registration import Registration
from kvmesh.metrics import Metrics
from kvmesh.redis_link import RedisLink
from kvmesh.server import MeshServer
from kvmesh.service_options import ServiceOptions
from kvmesh.snapshot import telemetry
from kvmesh.snapshot.availability import Availability, availability_of
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.dialing import ControlDialer
from kvmesh.snapshot.fence import Fence
from kvmesh.snapshot.identity import Identity
from kvmesh.snapshot.initial import initial_content
from kvmesh.snapshot.published import Published
from kvmesh.snapshot.receiver import Receiver
from kvmesh.trust.networks import Networks
from kvmesh.trust.peers import Trust

log = logging.getLogger(__name__)


class Controlled(Protocol):
    """The steps of a role."""

    @property
    def takes_cordon_by_lease(self) -> bool:
        """True if a cordoned process says in its lease that it drains, so that processes of release 0.1.0 avoid it."""
        ...

    def refusal(self, content: Content) -> str:
        """Return why this process cannot serve `content`, or an empty text."""
        ...

    def on_snapshot(self, published: Published) -> None:
        """Take the snapshot in force, after each change."""
        ...

    def set_cordoned(self, is_cordoned: bool) -> None:
        """Report to callers whether they may place new requests here."""
        ...

    def begin_drain(self) -> None:
        """Refuse new requests and finish the others."""
        ...

    def end_drain(self) -> None:
        """Take new requests again."""
        ...

    def report(self) -> pb.ReceiverReport:
        """Return the state of the process, for the control plane."""
        ...

    def observations(self) -> pb.ObservationBatch | None:
        """Return observations that were not sent yet."""
        ...

    def shadows(self) -> Sequence[shadow_pb2.ShadowReport]:
        """Return the counts of shadow traffic that changed since the last call."""
        ...

    def on_confirmed(self, sequence: int) -> None:
        """Take the sequence number up to which observations are stored."""
        ...

    def on_leader(self) -> None:
        """Send observations that were not confirmed again: the stream to the leader is new."""
        ...

    @property
    def life_state(self) -> LifeState:
        """State of the process's life. Only replicas have one other than SERVING."""
        ...

    def on_life(self, drives_lives: bool, order: pb.LifeOrder | None) -> None:
        """Take a message of a leader: whether it drives the lives of replicas, and the order in it, if there is one."""
        ...

    def on_regions(self, traffic: pb.RegionTraffic) -> None:
        """Take the latest spill shares and grants of a leader. They age until the next ones."""
        ...


class ControlLink:
    """See the module. Call `start` before the process registers. The process runs `background`."""

    def __init__(
        self,
        role: Controlled,
        identity: Identity,
        options: ServiceOptions,
        redis: RedisLink,
        trust: Trust,
        networks: Networks,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.availability = Availability.SERVING
        self._role = role
        self._identity = identity
        self._reason = ""
        self._registration: Registration | None = None
        self._is_leaving = False
        """True once a signal has begun the drain of the process."""
        self._has_changed = asyncio.Event()
        self._initial = initial_content(options.config)
        self.receiver = Receiver(
            redis,
            options.config.mesh.name,
            identity,
            Fence(role.refusal),
            ControlDialer(trust, clock, networks),
            state_dir=options.state_dir,
            on_change=self._apply,
            clock=clock,
            report=role.report,
            observations=role.observations,
            shadows=role.shadows,
            on_confirmed=role.on_confirmed,
            on_leader=role.on_leader,
            on_life=role.on_life,
            on_regions=role.on_regions,
        )
        telemetry.export(self.receiver, metrics)
        metrics.gauge(
            "control_cordoned",
            "1 while the control plane keeps the process out of use (cordon or drain), else 0.",
            lambda: float(self.availability is not Availability.SERVING),
        )

    @property
    def cordon_reason(self) -> str:
        """Why the control plane keeps the process out of use. Empty: it does not."""
        return "" if self.availability is Availability.SERVING else self._reason

    @property
    def content(self) -> Content:
        """The content in force. Without any snapshot: the initial content."""
        in_force = self.receiver.in_force
        return self._initial if in_force is None else in_force.content

    async def start(self, registration: Registration) -> None:
        """Take the snapshot that is known, before the process serves. `registration` gets the state for the lease."""
        self._registration = registration
        await self.receiver.start()
        self._show()

    def background(self, server: MeshServer) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the tasks that run while the process serves."""
        yield "snapshots", self.receiver.run()
        yield "availability", self._keep_health(server)

    def on_life_changed(self) -> None:
        """Show the state of the life in the lease, and report it to the leader, both at once."""
        self._show()
        self.receiver.report_now()

    def leave(self) -> None:
        """Note that a signal drains the process: its lease says so until the end."""
        self._is_leaving = True
        self._show()

    def _apply(self, published: Published) -> None:
        identity = self._identity
        before = self.availability
        now, self._reason = availability_of(published.content, identity.process_id, identity.boot_id)
        if now is not before and not self._is_leaving:
            self._change(before, now)
        self._role.on_snapshot(published)
        self._show()

    def _change(self, before: Availability, now: Availability) -> None:
        self.availability = now
        log.warning(
            "availability changed",
            extra={"was": before.value, "is": now.value, "why": self._reason or "released"},
        )
        if before is Availability.DRAINING:
            self._role.end_drain()
        self._role.set_cordoned(now is not Availability.SERVING)
        if now is Availability.DRAINING:
            self._role.begin_drain()
        self._has_changed.set()

    def _show(self) -> None:
        """Put the state into the lease. A state is announced, the name of a snapshot waits for the next renewal."""
        registration, current = self._registration, self.receiver.current
        if registration is None:
            return
        registration.note(snapshot="" if current is None else str(current.name))
        is_avoided = self.availability is Availability.DRAINING or (
            self.availability is Availability.CORDONED and self._role.takes_cordon_by_lease
        )
        state = Availability.DRAINING if self._is_leaving else self.availability
        if state is not Availability.SERVING:
            registration.update(state=state.value, draining=self._is_leaving or is_avoided)
            return
        life = self._role.life_state
        # A replica that is held says `draining` for the processes of release 0.1.0.
        registration.update(state=life.value, draining=life is not LifeState.SERVING)

    async def _keep_health(self, server: MeshServer) -> None:
        """Report NOT_SERVING while the process drains, or is cordoned and has callers that read no leases: clients."""
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            is_cordoned = self.availability is Availability.CORDONED
            is_aside = self.availability is Availability.DRAINING or (
                is_cordoned and not self._role.takes_cordon_by_lease
            )
            await server.set_aside(self._reason if is_aside else "")
