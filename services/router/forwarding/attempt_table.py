"""What the router holds: all attempts by identity, and when to look at which. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvmesh.deadline_heap import DeadlineHeap
from services.router.forwarding.attempt import Attempt, Stage
from services.router.forwarding.failed_replicas import FailedReplicas
from services.router.forwarding.work_reports import WorkReports
from services.router.queue.release_queue import ReleaseQueue

CLOSED_ORDER: Final = 1e6
"""Added to the order in the queue of a request whose client does not read: more than any order is apart from another."""

Record = Callable[[Attempt, str, float], None]
"""Hears of each attempt that ended: the attempt, how, when."""


class AttemptTable:
    """Keeps the attempts. Every way an attempt ends goes through `end`, which takes it out of everything."""

    def __init__(self, queue: ReleaseQueue[Attempt], work: WorkReports, record: Record) -> None:
        self.queue = queue
        self.open: set[Attempt] = set()
        self.latest: dict[str, Attempt] = {}
        """Request id -> its highest attempt."""
        self.deadlines: DeadlineHeap[Attempt] = DeadlineHeap()
        self.failed_replicas = FailedReplicas()
        self.detached_count = 0
        self.is_news = False
        """True if something changed that may let a waiting request go."""
        self._work = work
        self._record = record

    def add(self, item: Attempt) -> None:
        """Hold `item` from now on."""
        self.open.add(item)
        if item.session is not None:
            item.session.slots[item.slot] = item

    def set_window(self, item: Attempt, *, is_closed: bool) -> None:
        """The window of its client closed or opened. While it is closed, others of its tenant and priority go first."""
        item.is_window_closed = is_closed
        is_queued = item.stage is Stage.QUEUED
        if is_queued:
            self.queue.remove(item)
        item.ticket.order += CLOSED_ORDER if is_closed else -CLOSED_ORDER
        if is_queued:
            self.queue.add(item)
            self.is_news = True

    def end(self, item: Attempt, now_s: float, outcome: str) -> None:
        """Hold `item` no more. Reports and records the end; sends nothing."""
        if item.stage is Stage.ENDED:
            return
        self._work.settle(item, now_s)
        if item.stage is Stage.QUEUED:
            self.queue.remove(item)
        elif item.outcome.was_taken:
            self.queue.settle_output(item, item.next_position - item.submitted.start_position)
        else:
            self.queue.refund(item)
        item.detach_decode()
        item.detach_prefill()
        if item.is_detached:
            self.detached_count -= 1
        item.detach_session()
        item.stage = Stage.ENDED
        item.message = None
        is_first_end, item.outcome.name = not item.outcome.name, item.outcome.name or outcome
        self.open.discard(item)
        self.deadlines.forget(item)
        if self.latest.get(item.submitted.request_id) is item:
            del self.latest[item.submitted.request_id]
        self.is_news = True
        if is_first_end:
            self._record(item, outcome, now_s)

    def keep_detached(self, item: Attempt, until_s: float) -> None:
        """Its frontend's stream broke: keep it for whoever adopts it."""
        item.detach_session()
        item.expire_s = until_s
        self.detached_count += 1
        self.deadlines.by(item, until_s)

    def hold_handoff(self, item: Attempt, now_s: float, until_s: float, outcome: str) -> None:
        """Keep only its handoff until then; it has ended for everybody else."""
        prefill, prefill_slot = item.prefill.replica, item.prefill.slot
        if prefill is not None:
            prefill.left(item)  # its handoff tells nothing more of the replica
        item.prefill.replica, item.prefill.slot = None, 0
        self.end(item, now_s, outcome)
        item.prefill.replica, item.prefill.slot, item.stage = prefill, prefill_slot, Stage.HELD_HANDOFF
        item.expire_s = until_s
        self.open.add(item)
        self.deadlines.by(item, until_s)

    def assert_consistent(self) -> None:
        """Raise AssertionError if an attempt is somewhere it should not be, or not where it should."""
        self.queue.assert_consistent()
        self._work.reservations.assert_consistent()
        assert set(self.queue) == {item for item in self.open if item.stage is Stage.QUEUED}
        assert self.detached_count == sum(item.is_detached for item in self.open), "orphans are miscounted"
        for request_id, item in self.latest.items():
            assert item in self.open and item.submitted.request_id == request_id, item
            assert item.stage not in (Stage.ENDED, Stage.HELD_HANDOFF), item
        for item in self.open:
            _check(item)


def _check(item: Attempt) -> None:
    stage = item.stage
    assert stage is not Stage.ENDED, item
    assert item.routing.reservation is None or item.routing.is_dispatched, item
    assert (item.session is None) == (item.outbox is None), item
    if item.session is not None:
        assert item.session.slots.get(item.slot) is item, item
    if stage in (Stage.QUEUED, Stage.RESERVING, Stage.PREFILLING):
        assert item.message is not None and item.session is not None, item
    has_decode = stage not in (Stage.QUEUED, Stage.HELD_HANDOFF)
    assert (item.decode.replica is not None) == has_decode == bool(item.decode.slot), item
    if item.decode.replica is not None:
        assert item.decode.replica.slots.get(item.decode.slot) is item, item
    if stage in (Stage.PREFILLING, Stage.HELD_HANDOFF):
        assert item.prefill.slot, item
    if item.prefill.slot:
        assert item.prefill.replica is not None, item
        assert item.prefill.replica.slots.get(item.prefill.slot) is item, item
        assert stage in (Stage.PREFILLING, Stage.TRANSFERRING, Stage.GENERATING, Stage.HELD_HANDOFF), item
