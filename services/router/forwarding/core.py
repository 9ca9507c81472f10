"""The router's core: joins admission, dispatcher, the answers of replicas and timeouts.

Pure: no I/O, no clock. Events come in through sessions (frontends), replicas (sinks of their links) and `on_timer`.
Effects leave through outboxes and through the callbacks `publish`, `record` and `on_change`. The shell reads
`next_wake_s` after every event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from kvmesh.attach.caller_session import AttachedCore, CallerSession
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.deadlines import earliest
from kvmesh.replica.load_heartbeat import LoadHeartbeat
from services.router.forwarding.admission import Admission, ForwardingLimits
from services.router.forwarding.answers import Answers
from services.router.forwarding.attempt import Attempt, Stage
from services.router.forwarding.attempt_table import AttemptTable, Record
from services.router.forwarding.completion import Completion
from services.router.forwarding.dispatcher import Dispatcher, Forecast, Released
from services.router.forwarding.eligible_replicas import EligibleReplicas
from services.router.forwarding.readiness import Readiness
from services.router.forwarding.replicas import Replica
from services.router.forwarding.rows import as_us
from services.router.forwarding.timeouts import Timeouts
from services.router.forwarding.work_reports import WorkReports
from services.router.placement.policy import DispatchEvent, PlacementPolicy, ReplicaLost
from services.router.queue.release_queue import ReleaseQueue
from services.router.regions.callers import Callers


def _discard_event(event: DispatchEvent) -> None:
    """Discard the event: there is no peer router."""


def _discard_record(attempt: Attempt, outcome: str, now_s: float) -> None:
    """Discard the record."""


class ForwardingCore(AttachedCore[Attempt]):
    """An Attachable (see kvmesh.attach.server). Owns all attempts, replicas and sessions of the router."""

    def __init__(
        self,
        router: str,
        model_version: str,
        block_tokens: int,
        policy: PlacementPolicy,
        limits: ForwardingLimits,
        *,
        publish: Callable[[DispatchEvent], None] = _discard_event,
        record: Record = _discard_record,
        forecast: Forecast | None = None,
        on_release: Released | None = None,
        callers: Callers | None = None,
    ) -> None:
        """`publish` takes every dispatch, start and finish, for the peer routers. `record` takes every attempt that ended.

        `forecast`: estimates for deadlines; None: no request is refused by an estimate. `on_release` takes every attempt at
        its first release. `callers`: callers by home region; None: a mesh without regions.
        """
        self.router = router
        self.policy = policy
        self.on_change: Callable[[], None] = lambda: None
        """Called after every event: the time to read `next_wake_s`."""
        self.replicas: dict[str, Replica[Attempt]] = {}
        self.sessions: list[CallerSession[Attempt]] = []
        self.queue: ReleaseQueue[Attempt] = ReleaseQueue(limits.queue_max_requests, limits.queue_max_tokens)
        self.work = WorkReports(router, policy, self.queue, publish, block_tokens)
        self.attempts = AttemptTable(self.queue, self.work, record)
        self.eligible = EligibleReplicas(self.replicas)
        completion = Completion(self.attempts, limits.detached_s)
        self.dispatcher = Dispatcher(
            self.attempts, self.work, policy, self.eligible, self.replicas, completion, forecast, on_release
        )
        self.answers = Answers(self.attempts, self.work, policy, self.dispatcher, completion, block_tokens)
        self.timeouts = Timeouts(self.attempts, self.dispatcher, completion)
        self.admission = Admission(
            *(self.attempts, self.work, self.dispatcher, self.replicas, limits, model_version, block_tokens),
            callers=callers,
        )
        self.readiness = Readiness(self.eligible)
        self.ejection_total = 0
        self.contradiction_total = 0
        self._heartbeat = LoadHeartbeat()
        self._now_s = 0.0

    def __repr__(self) -> str:
        return f"ForwardingCore({self.router}, {len(self.attempts.open)} attempts, {len(self.queue)} queued)"

    # Replicas

    def add_replica(
        self, name: str, role: Literal["prefill", "decode"], *, address: str = "", kv_address: str = ""
    ) -> Replica[Attempt]:
        """Return a new replica; the caller connects a link to it. An earlier replica of that name must be removed."""
        assert name not in self.replicas, f"{name} is there already"
        replica = Replica[Attempt](self, name, role, address=address, kv_address=kv_address)
        self.replicas[name] = replica
        return replica

    def retire_replica(self, replica: Replica[Attempt]) -> None:
        """Retire `replica`: a newer process has its name. The old process serves its attempts until its stream ends."""
        replica.is_retired = True
        for attempt in replica.slots.values():  # not work of the newer process
            placement = attempt.routing.placement
            if placement is not None and replica.name == (placement.prefill or placement.decode):
                self.attempts.is_dispatch_due |= self.work.settle(attempt, self._now_s)
        self.policy.observe(ReplicaLost(replica.name))
        if self.replicas.get(replica.name) is replica:
            del self.replicas[replica.name]
        self.eligible.changed()

    def remove_replica(self, replica: Replica[Attempt], now_s: float) -> None:
        """Remove `replica`. Its stream counts as lost: its attempts are rescheduled or fail.

        Outlier ejection does not count this loss as a failure.
        """
        replica.on_lost(None, "removed", now_s)
        if self.replicas.get(replica.name) is replica:
            del self.replicas[replica.name]

    # Attachable

    def open_session(self, peer: pb.Hello, outbox: DownwardOutbox, now_s: float) -> CallerSession[Attempt]:
        """See kvmesh.attach.server.Attachable."""
        session = CallerSession[Attempt](self, peer.process_id, outbox, peer.region)
        self.sessions.append(session)
        self._heartbeat.has_listener = True
        self.check_readiness()
        outbox.load(self.load_report())
        return session

    def close_session(self, session: CallerSession[Attempt], now_s: float) -> None:
        """Handle a lost stream: running attempts become detached streams, all others end."""
        self.sessions.remove(session)
        self._heartbeat.has_listener = bool(self.sessions)
        self.admission.close_session(session, now_s)

    def cancel(self, slot: Attempt, reason: pb.Cancel.Reason.ValueType, now_s: float) -> None:
        """See AttachedCore."""
        self.admission.cancel(slot, reason, now_s)

    def adopt(self, session: CallerSession[Attempt], adopt: pb.Adopt, now_s: float) -> None:
        """See AttachedCore."""
        self.admission.adopt(session, adopt, now_s)

    def submit(self, session: CallerSession[Attempt], submit: pb.Submit, now_s: float) -> None:
        """See AttachedCore."""
        self.admission.submit(session, submit, now_s)

    def contradict(self, contradiction: pb.Contradiction, now_s: float) -> None:
        """Count a verdict against its replica: a frontend reports that a second replica served the request."""
        self.contradiction_total += 1
        replica = self.replicas.get(contradiction.replica)
        if replica is not None:
            replica.contradicted(now_s - contradiction.age_ms / 1000, now_s)

    def grant(self, slot: Attempt, position: int, now_s: float) -> None:
        """Forward the client's flow-control window to decode."""
        if position <= slot.window_end and not slot.is_window_closed:
            return
        slot.window_end = max(position, slot.window_end)
        if slot.is_window_closed:
            self.attempts.set_window(slot, is_closed=False)
        if slot.decode.replica is not None:
            slot.decode.replica.outbox.credit(slot.decode.slot, slot.window_end)

    def close_window(self, slot: Attempt, now_s: float) -> None:
        """Report to decode that the client's flow-control window is closed."""
        if not slot.is_window_closed:
            self.attempts.set_window(slot, is_closed=True)
            if slot.decode.replica is not None:
                slot.decode.replica.outbox.close_window(slot.decode.slot)

    def after_message(self, now_s: float) -> None:
        """Move the time forward. The shell calls `after_event` once the core has taken the whole event."""
        self._now_s = max(self._now_s, now_s)

    # Timer and effects

    def after_event(self, now_s: float | None = None) -> None:
        """Dispatch waiting attempts and notify the shell. Called once after each event."""
        if now_s is not None:
            self.after_message(now_s)
        self.dispatcher.dispatch_waiting(self._now_s)
        if self.readiness.may_have_changed():
            self.check_readiness()
        self.on_change()

    def next_wake_s(self) -> float | None:
        """Return when `on_timer` is to be called, or None."""
        return earliest(
            self.attempts.deadlines.next_s(), self.dispatcher.next_wake_s(), self._heartbeat.next_s()
        )

    def on_timer(self, now_s: float) -> None:
        """Handle due deadlines, dispatch waiting attempts, and send the load heartbeat."""
        self._now_s = max(self._now_s, now_s)
        for attempt in self.attempts.deadlines.due(now_s):
            self.timeouts.check(attempt, now_s)
        self.dispatcher.dispatch_waiting(now_s)
        if self._heartbeat.take(now_s):
            self.check_readiness()
            report = self.load_report()
            for session in self.sessions:
                if not session.outbox.is_full():
                    session.outbox.load(report)

    def load_report(self) -> pb.LoadReport:
        """Return the load report. Frontends get one each second, and their failure detector notices its absence."""
        return pb.LoadReport(
            queued_request_count=len(self.queue),
            running_request_count=self.placed_count,
            draining=self.admission.is_draining,
            can_place=self.readiness.can_place,
            cordoned=self.readiness.is_cordoned,
            engine_ready=True,
            queue_delay_us=self.queue_delay_us(),
            placeable_decode_count=self.eligible.placeable_decode_count(self._now_s),
            features=self._features(),
            step_p95_us=max(
                (one.load.step_p95_us(self._now_s) for one in self.replicas.values() if one.role == "decode"),
                default=0,
            ),
        )

    def _features(self) -> list[str]:
        """Return the features that all listed replicas offer: any of them may run a part of a request."""
        offered = [one.features for one in self.replicas.values() if one.is_listed]
        return sorted(frozenset.intersection(*offered)) if offered else []

    def queue_delay_us(self) -> int:
        """Return the estimated wait, in us, of a default-class request of a new tenant. 0: no wait, or unknown."""
        ahead = self.queue.ahead_of_newcomer()
        return as_us(self.dispatcher.queue_delay.wait_s(ahead, self._now_s) or 0.0)

    def longest_wait_us(self, now_s: float) -> int:
        """Return the longest time that a user's attempt has waited for a replica, in us.

        Sheddable requests and shadow traffic are left out.
        """
        users = (each.submitted for each in self.queue if not each.submitted.is_sheddable)
        return as_us(max((now_s - each.arrived_s for each in users), default=0.0))

    def drain(self) -> None:
        """Refuse new attempts from now on. Takeovers are still accepted."""
        self.admission.is_draining = True
        self.check_readiness()

    def undrain(self) -> None:
        """Take new attempts again, after a drain by the control plane."""
        self.admission.is_draining = False
        self.check_readiness()

    def check_readiness(self) -> None:
        """Compute whether new requests can be placed. A change is reported to the frontends at once."""
        if self.readiness.check(self._now_s, is_draining=self.admission.is_draining):
            self._heartbeat.touch()

    def live_request_count(self) -> int:
        """Return the number of attempts of frontends."""
        return sum(len(session.slots) for session in self.sessions)

    def is_idle(self) -> bool:
        """True if no frontend's stream has an attempt."""
        return not any(session.slots for session in self.sessions)

    def can_be_taken_over(self) -> bool:
        """True if another router can take over every stream here without recomputing anything."""
        return all(
            attempt.stage is Stage.GENERATING for one in self.sessions for attempt in one.slots.values()
        )

    @property
    def placed_count(self) -> int:
        """Attempts that were placed and have not ended."""
        return sum(attempt.stage not in (Stage.QUEUED, Stage.HELD_HANDOFF) for attempt in self.attempts.open)

    def assert_consistent(self) -> None:
        """Raise AssertionError if a count or an index disagrees with the attempts."""
        self.attempts.assert_consistent()
        self.eligible.assert_consistent()
        for replica in self.replicas.values():
            probe = replica.ejection.probe
            if probe is not None:
                assert isinstance(probe, Attempt), replica
                assert replica in (probe.decode.replica, probe.prefill.replica), replica
            for slot, attempt in replica.slots.items():
                assert attempt in self.attempts.open, f"{replica} holds {attempt}"
                mine = attempt.decode.slot if attempt.decode.replica is replica else attempt.prefill.slot
                assert slot == mine, f"{replica} knows {attempt} as {slot}"
        for session in self.sessions:
            assert all(attempt.session is session for attempt in session.slots.values())
            assert all(attempt in self.attempts.open for attempt in session.slots.values())
