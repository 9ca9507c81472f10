"""The attempt table: all attempts of the router, by identity, and the deadline of each. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvmesh.deadline_heap import DeadlineHeap
from services.router.forwarding.attempt import Attempt, Stage
from services.router.forwarding.failed_replicas import FailedReplicas
from services.router.forwarding.work_reports import WorkReports
from services.router.queue.release_queue import ReleaseQueue

CLOSED_ORDER: Final = 1e6
"""Added to the queue order of a request with a closed window. Larger than the distance of any two orders."""

Record = Callable[[Attempt, str, float], None]
"""Records an attempt that ended: the attempt, its outcome, the time."""


class AttemptTable:
    """The open attempts. Every attempt ends through `end`, which removes it from queue, streams, deadlines and table."""

    def __init__(self, queue: ReleaseQueue[Attempt], work: WorkReports, record: Record) -> None:
        self.queue = queue
        self.open: set[Attempt] = set()
        self.latest: dict[str, Attempt] = {}
        """By request id: its highest attempt."""
        self.deadlines: DeadlineHeap[Attempt] = DeadlineHeap()
        self.failed_replicas = FailedReplicas()
        self.detached_count = 0
        self.is_dispatch_due = False
        """True if something changed that may let the dispatcher release a waiting request."""
        self._work = work
        self._record = record

    def add(self, attempt: Attempt) -> None:
        """Add `attempt` to the table and to its frontend's stream."""
        self.open.add(attempt)
        if attempt.session is not None:
            attempt.session.slots[attempt.slot] = attempt

    def set_window(self, attempt: Attempt, *, is_closed: bool) -> None:
        """Note that the client's flow-control window closed or opened.

        While it is closed, other requests of the same tenant and priority go first.
        """
        attempt.is_window_closed = is_closed
        is_queued = attempt.stage is Stage.QUEUED
        if is_queued:
            self.queue.remove(attempt)
        attempt.ticket.order += CLOSED_ORDER if is_closed else -CLOSED_ORDER
        if is_queued:
            self.queue.add(attempt)
            self.is_dispatch_due = True

    def end(self, attempt: Attempt, now_s: float, outcome: str) -> None:
        """Remove `attempt`, and report and record its end. Nothing is sent to the frontend."""
        if attempt.stage is Stage.ENDED:
            return
        self._work.settle(attempt, now_s)
        self._work.generated(attempt, now_s)
        if attempt.stage is Stage.QUEUED:
            self.queue.remove(attempt)
        elif attempt.outcome.was_taken:
            self.queue.settle_output(attempt, attempt.next_position - attempt.submitted.start_position)
        else:
            self.queue.refund(attempt)
        attempt.detach_decode()
        attempt.detach_prefill()
        if attempt.charge is not None:
            attempt.charge.end(was_taken=attempt.outcome.was_taken)
            attempt.charge = None
        if attempt.is_detached:
            self.detached_count -= 1
        attempt.detach_session()
        attempt.stage = Stage.ENDED
        attempt.message = None
        is_first_end, attempt.outcome.name = not attempt.outcome.name, attempt.outcome.name or outcome
        self.open.discard(attempt)
        self.deadlines.forget(attempt)
        if self.latest.get(attempt.submitted.request_id) is attempt:
            del self.latest[attempt.submitted.request_id]
        self.is_dispatch_due = True
        if is_first_end:
            self._record(attempt, outcome, now_s)

    def keep_detached(self, attempt: Attempt, until_s: float) -> None:
        """Keep a detached stream until `until_s`: its frontend's stream broke, and a takeover may follow."""
        attempt.detach_session()
        attempt.expire_s = until_s
        self.detached_count += 1
        self.deadlines.by(attempt, until_s)

    def hold_handoff(self, attempt: Attempt, now_s: float, until_s: float, outcome: str) -> None:
        """End `attempt`, but keep its handoff until `until_s`: decode may still be pulling it."""
        leg = attempt.prefill
        prefill, slot = leg.replica, leg.slot
        if prefill is not None:
            prefill.on_left(attempt)  # a held handoff says nothing about the health of the replica
        leg.replica, leg.slot = None, 0
        self.end(attempt, now_s, outcome)
        leg.replica, leg.slot, attempt.stage = prefill, slot, Stage.HELD_HANDOFF
        attempt.expire_s = until_s
        self.open.add(attempt)
        self.deadlines.by(attempt, until_s)

    def assert_consistent(self) -> None:
        """Raise AssertionError if the table, the queue and the streams disagree about an attempt."""
        self.queue.assert_consistent()
        self._work.reservations.assert_consistent()
        assert set(self.queue) == {attempt for attempt in self.open if attempt.stage is Stage.QUEUED}
        assert self.detached_count == sum(attempt.is_detached for attempt in self.open), (
            "detached attempts are miscounted"
        )
        for request_id, attempt in self.latest.items():
            assert attempt in self.open and attempt.submitted.request_id == request_id, attempt
            assert attempt.stage not in (Stage.ENDED, Stage.HELD_HANDOFF), attempt
        for attempt in self.open:
            _check(attempt)


def _check(attempt: Attempt) -> None:
    stage, decode, prefill = attempt.stage, attempt.decode, attempt.prefill
    assert stage is not Stage.ENDED, attempt
    assert attempt.routing.reservation is None or attempt.routing.is_dispatched, attempt
    assert (attempt.session is None) == (attempt.outbox is None), attempt
    if attempt.session is not None:
        assert attempt.session.slots.get(attempt.slot) is attempt, attempt
    if stage in (Stage.QUEUED, Stage.RESERVING, Stage.PREFILLING):
        assert attempt.message is not None and attempt.session is not None, attempt
    has_decode = stage not in (Stage.QUEUED, Stage.HELD_HANDOFF)
    assert (decode.replica is not None) == has_decode == bool(decode.slot), attempt
    if decode.replica is not None:
        assert decode.replica.slots.get(decode.slot) is attempt, attempt
    if stage in (Stage.PREFILLING, Stage.HELD_HANDOFF):
        assert prefill.slot, attempt
    if prefill.slot:
        assert prefill.replica is not None, attempt
        assert prefill.replica.slots.get(prefill.slot) is attempt, attempt
        assert stage in (Stage.PREFILLING, Stage.TRANSFERRING, Stage.GENERATING, Stage.HELD_HANDOFF), attempt
