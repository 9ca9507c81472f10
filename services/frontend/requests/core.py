"""The frontend's core: all admitted requests, all routers, and the messages between them.

Pure and synchronous. The core is the sink of every router's link, has one timer, and never awaits. A simulation wires the
core to routers without sockets. Cancellation propagation starts here: a client that leaves ends its request everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Final, Protocol, TypeVar

from kvmesh.attach import frames
from kvmesh.attach.rules import check_computed
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.deadlines import earliest
from kvmesh.errors import MeshError
from kvmesh.pools import DEFAULT_POOL
from kvmesh.regions.names import split
from kvmesh.snapshot.content import Content
from services.frontend.requests import answers, cross_check, faults, timers
from services.frontend.requests.admitted import AdmittedRequests
from services.frontend.requests.closed_windows import ClosedWindows
from services.frontend.requests.feasibility import PRIORITY_CLASS_TOLD, FirstTokens, Outlook
from services.frontend.requests.observations import Observations
from services.frontend.requests.output import Output
from services.frontend.requests.pool_choice import ANY_VERSION, ChosenPool, PoolChoice
from services.frontend.requests.region_choice import RegionChoice, RegionSettings
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.request_spec import RequestSpec
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from services.frontend.requests.router_peers import Peer, Peers, RouterLink
from services.frontend.requests.verdicts import Verdict, Verdicts

log = logging.getLogger(__name__)

_BUG: Final = "bug in a request"

NO_REGIONS: Final = RegionSettings()
"""A mesh without regions."""


class _Slotted(Protocol):
    @property
    def slot(self) -> int: ...


_Row = TypeVar("_Row", bound=_Slotted)


class Observer(Protocol):
    """Counts requests. Called once per request, when the client's side ends."""

    def on_end(self, request: LiveRequest) -> None:
        """`request.outcome` is set."""
        ...


class FrontendCore:
    """Implements `Hub` for its requests, `Sink` for its links and `TimedCore` for its timer.

    `limit`: most admitted requests. `jitter` returns a random number in [0, 1). `on_event` is called after each event that
    may have changed the next wake time. The owner of the timer sets `on_event`. `boot_id` names the process in
    observations. `regions`: those of the configuration.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        limit: int,
        retries: RetryBudget,
        jitter: Callable[[], float],
        observer: Observer | None = None,
        boot_id: str = "",
        regions: RegionSettings = NO_REGIONS,
    ) -> None:
        self.admitted = AdmittedRequests(limit)
        self.closed_windows = ClosedWindows()
        self.peers: Peers[LiveRequest] = Peers()
        self.pools = PoolChoice(self.peers, on_diverted=self._on_diverted)
        self.regions = RegionChoice(self.peers, self.pools, regions)
        self.observations = Observations(boot_id)
        self.retries = retries
        self.verdicts: Verdicts[LiveRequest] = Verdicts()
        self.is_draining = False
        self.on_event: Callable[[], None] = lambda: None
        self.on_idle: Callable[[], None] = lambda: None
        """Called when the last request ended at routers and replicas too."""
        self._limits = limits
        self._jitter = jitter
        self._observer = observer
        self._first_tokens: dict[str, FirstTokens] = {}
        """By pool."""
        self._unrouted: dict[LiveRequest, None] = {}

    # Clients.

    def check_capacity(self, now_s: float) -> None:
        """Raise MeshError (DRAINING, LIVE_REQUESTS_FULL) if admission control would refuse a request now."""
        self._check_draining()
        self.admitted.check_capacity(now_s)

    def capacity_to_read(self, now_s: float) -> AbstractContextManager[None]:
        """Return a context that holds a slot while a request is read. Raises MeshError (DRAINING, LIVE_REQUESTS_FULL)."""
        self._check_draining()
        return self.admitted.capacity_to_read(now_s)

    def submit(
        self, spec: RequestSpec, output: Output, on_ready: Callable[[], None], now_s: float
    ) -> LiveRequest:
        """Start a request. `on_ready` is called from now on, even before `submit` returns. Raises MeshError."""
        self._check_draining()
        self.admitted.check_capacity(now_s)
        request = LiveRequest(spec, output, self, self._limits)
        request.on_ready = on_ready
        self.supersede(spec.request_id, spec.execution.epoch, now_s)
        self.admitted.admit(request, now_s)
        self.retries.on_request(now_s)
        self.observations.on_start(request)
        self._guard(request, lambda each: each.start(now_s), now_s)
        self.on_event()
        return request

    def supersede(self, request_id: str, epoch: int, now_s: float, owner: str = "") -> None:
        """End earlier executions of a request at this frontend: execution `epoch` runs and may take over their attempts.

        `owner`: name of execution `epoch`. An execution of this frontend with that name started without its number, and
        gets the number now.
        """
        for request in self.admitted.executions(request_id):
            if request.spec.execution.epoch >= epoch:
                continue
            if owner and request.spec.execution.owner == owner:
                request.renumber(epoch)
            else:
                self._guard(request, lambda each: each.yield_to(faults.superseded(), now_s), now_s)
        self.on_event()

    def hand_over(self, requests: Iterable[LiveRequest], now_s: float) -> None:
        """End `requests` for their clients, which continue at another frontend and take over the running attempts there."""
        for request in requests:
            self._guard(
                request, lambda each: each.yield_to(faults.draining(len(each.progress.ids)), now_s), now_s
            )
        self.on_event()

    def outlook(
        self,
        affinity: str,
        priority_class: int,
        prompt_tokens: int,
        now_s: float,
        chosen: ChosenPool = ANY_VERSION,
    ) -> Outlook:
        """Return the last report of the router for `affinity` in the pool `chosen`, with the pool's first-token times.

        This frontend measures the first-token times. Without a router all times are unknown.
        """
        peer = self.peers.choose(chosen.pool, affinity, model_version=chosen.model_version)
        if peer is None:
            return Outlook()
        queue_delay_s = peer.queue_delay_s if priority_class <= PRIORITY_CLASS_TOLD else 0.0
        first_tokens = self._first_tokens.get(chosen.pool)
        first_s = first_tokens.expected_s(prompt_tokens, now_s) if first_tokens is not None else 0.0
        return Outlook(queue_delay_s, peer.step_s, first_s)

    def deliver(self, request: LiveRequest, position: int, now_s: float) -> None:
        """Note that the client's transport took the output of `request` below `position`."""
        request.on_delivered(position, now_s)

    def leave(self, request: LiveRequest, now_s: float, *, was_deadline: bool = False) -> None:
        """End `request`: its client is gone. Idempotent."""
        request.on_client_gone(now_s, was_deadline=was_deadline)
        self.on_event()

    def take_snapshot(self, content: Content) -> None:
        """Put `content` in force: it chooses the pools of new requests. Admitted requests stay where they are."""
        self.pools.take(content)
        self.regions.take(content.regions)
        self.observations.take_rollout(content.running_rollout)

    def router_wait_s(self, now_s: float) -> float:
        """Return the longest wait for a router of a request that another pool may serve; 0 without one."""
        return max((each.router_wait_s(now_s) for each in self._unrouted), default=0.0)

    def allow_diversions(self, now_s: float) -> None:
        """Let requests leave a pool without a router, also those that wait for one."""
        self.pools.may_divert = True
        self._continue_unrouted(now_s)
        self.on_event()

    # Routers.

    def add_router(
        self, link: RouterLink, pool: str = DEFAULT_POOL, model_version: str = "", region: str = ""
    ) -> Peer[LiveRequest]:
        """Add a link to a router of `pool`; the link's events must come to the sink methods below.

        `pool` is the bare name, `region` is empty for the own one.
        """
        return self.peers.add(link, pool, model_version, region)

    def remove_router(self, name: str) -> None:
        """Forget a router after its link was lost and closed."""
        self.peers.remove(name)

    def on_attached(self, link: RouterLink, peer: pb.Hello, now_s: float) -> None:
        """Handle a router that came up: requests that wait for a router continue."""
        self._continue_unrouted(now_s)
        self.on_event()

    def _continue_unrouted(self, now_s: float) -> None:
        waiting, self._unrouted = self._unrouted, {}
        for request in waiting:
            self._guard(request, lambda each: each.on_router_up(now_s), now_s)

    def on_response(self, link: RouterLink, message: pb.AttachResponse, now_s: float) -> None:
        """Take the rows of one message, in the order of the protocol. Raises FrameError."""
        peer = self.peers.get(link.name)
        if peer is None:
            return
        if message.computed_slots:
            check_computed(message)
            for slot, position in zip(message.computed_slots, message.computed_positions, strict=True):
                if slot in peer.slots:
                    peer.slots[slot].on_computed(position)
        for field, value in message.ListFields():  # set fields by number: the protocol's order
            take = answers.TAKERS.get(field.name)
            if take is not None:
                rows = frames.rows(value) if field.name == "frame" else value
                self._each(peer.slots, rows, take, now_s)
            elif field.name == "load_report":
                self._take_report(peer, value, now_s)
        self.on_event()

    def _take_report(self, peer: Peer[LiveRequest], report: pb.LoadReport, now_s: float) -> None:
        peer.queue_delay_s, peer.step_s = report.queue_delay_us / 1e6, report.step_p95_us / 1e6
        could_place = peer.can_place
        peer.can_place = report.can_place or not report.HasField("can_place")
        peer.features = frozenset(report.features)
        if peer.can_place and not could_place:
            self._continue_unrouted(now_s)
        elif not peer.can_place:
            self._leave_pool(peer, now_s)

    def _leave_pool(self, peer: Peer[LiveRequest], now_s: float) -> None:
        """Move the requests that wait at the router `peer`, if its pool cannot place any more, each if another pool can."""
        if self.pools.can_place(peer.pool, peer.model_version):
            return
        for request in [each for each in peer.slots.values() if each.may_leave_router]:
            self._guard(request, lambda each: each.leave_router(now_s), now_s)

    def on_lost(self, link: RouterLink, reason: str, now_s: float) -> None:
        """Handle a broken stream to a router: its slots are void, their requests continue through other routers."""
        peer = self.peers.get(link.name)
        if peer is None:
            return
        peer.can_place, peer.features = True, None  # unknown until the next report
        if not peer.slots:
            return
        log.warning("router lost", extra={"router": link.name, "slots": len(peer.slots), "why": reason})
        requests = list(peer.slots.values())
        peer.slots.clear()
        for request in requests:
            self._guard(request, lambda each: each.on_link_lost(now_s), now_s)
        self.on_event()

    # Time.

    def next_wake_s(self) -> float | None:
        """Return the time of the next call of `on_timer`."""
        return earliest(
            self.admitted.deadlines.next_s(), self.closed_windows.next_s if self._has_clients() else None
        )

    def on_timer(self, now_s: float) -> None:
        """Fire the timers that are due, and look for closed windows."""
        for request in self.admitted.deadlines.due(now_s):
            self._guard(request, lambda each: timers.fire(each, now_s), now_s)
            self.admitted.schedule(request)
        if self._has_clients() and self.closed_windows.next_s <= now_s:
            self.closed_windows.check(self.admitted.serving, self.admitted.attended, now_s)

    def _has_clients(self) -> bool:
        return bool(self.admitted.serving) or self.admitted.has_handlers

    # Services for the requests (Hub).

    def choose(self, spec: RequestSpec, avoid: str = "") -> Peer[LiveRequest] | None:
        return self.peers.choose(spec.pool, spec.affinity, avoid, model_version=spec.model_version)

    def has_other(self, spec: RequestSpec, name: str) -> bool:
        return self.peers.has_other(spec.pool, name)

    def _on_diverted(self, pool: str) -> None:
        self.observations.on_diverted(pool)

    def note_unplaceable(self, spec: RequestSpec, name: str) -> None:
        peer = self.peers.get(name)
        if peer is not None and (self.pools.has_several or self.regions.has_others):
            peer.can_place = False

    def moved(self, request: LiveRequest, before: RequestSpec, fault: str, now_s: float) -> None:
        if request.spec.region == before.region:
            self.pools.diverted[before.pool] += 1
        else:
            self.regions.note_move(request.spec, before.model_version)
        self.observations.on_moved(request, fault, now_s)
        log.info(
            "request moved to another pool",
            extra={
                "request_id": request.spec.request_id,
                "pool": before.pool,
                "to": request.spec.pool,
                "why": fault,
            },
        )

    def await_router(self, request: LiveRequest) -> None:
        self._unrouted[request] = None

    def schedule(self, request: LiveRequest) -> None:
        self.admitted.schedule(request)

    def take_retry(self, request: LiveRequest, now_s: float) -> bool:
        return self.retries.take(now_s, is_sheddable=request.spec.caller.service_class.is_sheddable)

    def take_spare_retry(self, now_s: float) -> bool:
        return self.retries.take_spare(now_s)

    def contradict(self, spec: RequestSpec, verdict: Verdict, now_s: float) -> None:
        log.warning("verdict contradicted", extra={"replica": verdict.replica, "fault": verdict.fault})
        age_ms = round(1000 * max(0.0, now_s - verdict.at_s))
        region, replica = split(verdict.replica)
        peers = self.peers.of_pool(spec.pool) if region == spec.region else self.peers.of_region(region)
        for peer in peers:
            if peer.link.is_up:
                peer.link.outbox.contradict(pb.Contradiction(replica=replica, age_ms=age_ms))

    def jitter(self) -> float:
        return self._jitter()

    def on_end(self, request: LiveRequest, now_s: float) -> None:
        cross_check.close(request)
        self.admitted.end(request, now_s)
        first_s = request.progress.first_token_s
        if first_s is not None and len(request.attempts) == 1 and not request.spec.execution.received_ids:
            seconds = first_s - request.spec.timing.arrived_s - request.attempts[0].queue_s
            first_tokens = self._first_tokens.setdefault(request.spec.pool, FirstTokens())
            first_tokens.observe(request.spec.prompt_tokens, seconds, now_s)
        self.observations.on_end(request)
        if self._observer is not None and not request.must_reread:
            self._observer.on_end(request)

    def forget(self, request: LiveRequest) -> None:
        self._unrouted.pop(request, None)
        self.admitted.forget(request)
        if not self.admitted.serving and not self.admitted.leaving:
            self.on_idle()

    # Checks.

    def assert_consistent(self) -> None:
        """Raise AssertionError if the tables disagree. For tests, after every event."""
        cross_check.assert_consistent(self.verdicts)
        known = self.admitted.serving | self.admitted.leaving
        assert len(self.admitted) <= self.admitted.limit
        for peer in self.peers:
            for request in peer.slots.values():
                assert request.spec.pool == peer.pool, f"{request} of pool {request.spec.pool} is at {peer}"
        assert self._unrouted.keys() <= known, "a request that is gone waits for a router"
        slots: dict[LiveRequest, int] = {}
        for peer in self.peers:
            assert peer.link.is_up or not peer.slots, f"{peer} is down"
            for request in peer.slots.values():
                slots[request] = slots.get(request, 0) + 1
        assert slots.keys() <= known, "a slot of a request that is gone"
        assert max(slots.values(), default=0) <= 1, "a request with two slots"
        for request in known:
            wake_s, at_s = timers.wake_s(request), self.admitted.deadlines.at_s(request)
            assert wake_s is not None and at_s is not None and at_s <= wake_s, f"{request} sleeps"
            assert (request.outcome is not None) == (request in self.admitted.leaving)

    def _check_draining(self) -> None:
        if self.is_draining:
            raise MeshError(
                "DRAINING", "the frontend is shutting down; use another frontend", retry_after_s=0.1
            )

    def _each(
        self,
        slots: Mapping[int, LiveRequest],
        rows: Iterable[_Row],
        take: Callable[[LiveRequest, _Row, float], None],
        now_s: float,
    ) -> None:
        """Give each row to the request of its slot; a bug in its handler ends that request and no other."""
        for row in rows:
            request = slots.get(row.slot)
            if request is None:
                continue
            try:
                take(request, row, now_s)
            except frames.FrameError:
                raise
            except Exception:
                log.exception(_BUG, extra={"request_id": request.spec.request_id})
                request.on_bug(now_s)

    def _guard(self, request: LiveRequest, action: Callable[[LiveRequest], None], now_s: float) -> None:
        """Run `action` on `request`; a bug in `action` ends that request and no other."""
        try:
            action(request)
        except Exception:
            log.exception(_BUG, extra={"request_id": request.spec.request_id})
            request.on_bug(now_s)
