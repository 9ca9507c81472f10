"""Shadow traffic of a frontend process: the tap, the links to the pools of copies, the lane of leases.

Effects only; `traffic` decides. No exception of the tap reaches a user's request: it is counted, and logged once by text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

import grpc

from kvmesh.attach.dialing import Dialer
from kvmesh.attach.link_manager import LinkManager
from kvmesh.attach.v1 import attach_pb2
from kvmesh.clock import Clock
from kvmesh.control.v1 import shadow_pb2 as pb
from kvmesh.membership.member import Member
from kvmesh.snapshot.content import Content
from kvmesh.tasks import persist
from kvmesh.timer import Timer
from services.frontend.requests.request import LiveRequest
from services.frontend.routers import Router, RouterHost
from services.frontend.shadow.lease_store import LeaseStore
from services.frontend.shadow.traffic import ShadowTraffic, in_flight_max

log = logging.getLogger(__name__)

SWEEP_S: Final = 0.2
"""Time between two sweeps while a shadow is in force."""

PAUSE_S: Final = 0.25

Tap = Callable[[LiveRequest], None]


class _Routers(RouterHost):
    """The routers of the pools of copies. A link closes once its pool gets no copies any more."""

    def may_close(self, peer: Router, now_s: float, *, is_replaced: bool) -> bool:
        return not peer.slots or not peer.link.is_up


class Shadowing:
    """See the module. `set_tap` puts the tap into the path of users' requests, or takes it out (None)."""

    def __init__(
        self,
        traffic: ShadowTraffic,
        leases: LeaseStore,
        clock: Clock,
        set_tap: Callable[[Tap | None], None],
        *,
        hello: attach_pb2.Hello,
        open_channel: Callable[[str], grpc.aio.Channel],
        explain: Callable[[str], Awaitable[str]] | None = None,
        dialer: Dialer | None = None,
        decode_slots: int,
    ) -> None:
        """`decode_slots`: slots of one decode replica. The other arguments are as of `router_links`."""
        self.traffic = traffic
        self.fault_total = 0
        """Exceptions that the tap caught."""
        self._leases = leases
        self._clock = clock
        self._set_tap = set_tap
        self._decode_slots = decode_slots
        self._members: list[Member] = []
        self._frontends = 1
        self._is_due = False
        """True while a `pump` is scheduled."""
        self._changed = asyncio.Event()
        """Set when a lease may be wanted, or when the shadow has changed."""
        self._logged = ""
        host = _Routers(
            traffic.core, hello, self._is_served, clock, open_channel, explain, dialer or Dialer(clock)
        )
        self.links: LinkManager[Router] = LinkManager(host, clock, "router")
        self._timer = Timer(traffic.core, clock, self._note_fault)
        traffic.core.on_event = self._timer.update
        traffic.on_wake = self._wake

    def on_snapshot(self, content: Content) -> None:
        """Put `content` in force. Copies of a shadow that it lacks are cancelled at once."""
        try:
            self.traffic.take(content, self._clock.now_s())
        except Exception as error:  # noqa: BLE001  # a bug here must not keep users from the snapshot
            self._note_fault(error)
        self._set_tap(self._tap if self.traffic.shadow is not None else None)
        self._apply_members()
        self._changed.set()

    def on_members(self, members: list[Member], frontends: int) -> None:
        """Take a new view of the mesh's members, with the number of frontends."""
        self._members, self._frontends = members, frontends
        self._apply_members()

    def report(self) -> Sequence[pb.ShadowReport]:
        """Return the counts that changed since the last report."""
        return self.traffic.report()

    def resend(self) -> None:
        """Report everything again: the stream to the leader is new."""
        if self.traffic.tally is not None:
            self.traffic.tally.resend()

    def background(self) -> Iterable[tuple[str, Coroutine[Any, Any, None]]]:
        """Return the tasks, with their names."""
        yield "shadow-links", self.links.run()
        yield "shadow-sweep", persist(self._sweep, "shadow-sweep", pause_s=PAUSE_S)
        yield "shadow-leases", persist(self._lease, "shadow-leases", pause_s=PAUSE_S)

    def close(self) -> None:
        """Stop the timer."""
        self._set_tap(None)
        self._timer.close()

    def _tap(self, request: LiveRequest) -> None:
        try:
            self.traffic.offer(request, self._clock.now_s())
        except Exception as error:  # noqa: BLE001  # nothing of a copy may reach the user's request
            self._note_fault(error)

    def _wake(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._is_due = False
        self._guarded(self.traffic.pump)
        self._changed.set()

    def _guarded(self, work: Callable[[float], None]) -> None:
        try:
            work(self._clock.now_s())
        except Exception as error:  # noqa: BLE001  # a bug with one copy must not end the task
            self._note_fault(error)
        self._timer.update()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            if self.traffic.shadow is not None or not self.traffic.is_idle:
                self._guarded(self.traffic.sweep)
            self._changed.set()

    async def _lease(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            shadow, ledger = self.traffic.last, self.traffic.ledger
            if shadow is None or (request := ledger.request(self._clock.now_s())) is None:
                continue
            answer = None
            try:
                answer = await self._leases.lease(shadow, request)
            finally:
                ledger.on_answer(answer, self._clock.now_s())
            self._wake()

    def _is_served(self, member: Member) -> bool:
        shadow = self.traffic.shadow
        return shadow is not None and member.pool in shadow.pools

    def _apply_members(self) -> None:
        shadow = self.traffic.shadow
        if shadow is not None:
            replicas = sum(
                member.role == "decode" and member.pool == shadow.to_pool and not member.draining
                for member in self._members
            )
            slots = replicas * self._decode_slots
            self.traffic.in_flight_max = in_flight_max(slots, self._frontends)
        self.links.update(self._members)

    def _note_fault(self, error: Exception) -> None:
        self.fault_total += 1
        text = repr(error)
        if text != self._logged:
            self._logged = text
            log.error("bug in shadow traffic; users' requests go on", exc_info=error)
