"""What the router holds: all attempts by identity, when to look at which, and what the policy was told of them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.deadline_heap import DeadlineHeap
from services.router.forwarding.attempt import Attempt, Stage
from services.router.forwarding.failed_replicas import FailedReplicas
from services.router.forwarding.replicas import Replica
from services.router.placement.policy import (
    DISPATCH_LIFE_S,
    Dispatched,
    Finished,
    Hit,
    Note,
    PlacementPolicy,
    Started,
)
from services.router.queue.release_queue import ReleaseQueue
from services.router.queue.replica_reservation import ReplicaReservation

CLOSED_ORDER: Final = 1e6
"""Added to the order in the queue of a request whose client does not read: more than any order is apart from another."""

Record = Callable[[Attempt, str, float], None]
"""Hears of each attempt that ended: the attempt, how, when."""


class Holdings:
    """Keeps the attempts. Every way an attempt ends goes through `end`, which takes it out of everything."""

    def __init__(
        self,
        router: str,
        policy: PlacementPolicy,
        queue: ReleaseQueue[Attempt],
        note: Callable[[Note], None],
        record: Record,
    ) -> None:
        self.router = router
        self.policy = policy
        self.queue = queue
        self.shares = ReplicaReservation()
        self.items: set[Attempt] = set()
        self.live: dict[str, Attempt] = {}
        """Request id -> its highest attempt."""
        self.timetable: DeadlineHeap[Attempt] = DeadlineHeap()
        self.failed_places = FailedReplicas()
        self.orphan_count = 0
        self.is_news = False
        """True if something changed that may let a waiting request go."""
        self._note = note
        self._record = record

    def add(self, item: Attempt) -> None:
        """Hold `item` from now on."""
        self.items.add(item)
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
        """Hold `item` no more. Tells nobody but the policy and the record: sends nothing."""
        if item.stage is Stage.ENDED:
            return
        self.settle(item, now_s)
        if item.stage is Stage.QUEUED:
            self.queue.remove(item)
        elif item.outcome.was_taken:
            self.queue.settle_output(item, item.next_position - item.submitted.start_position)
        else:
            self.queue.refund(item)
        self.detach_decode(item)
        self.detach_prefill(item)
        if item.is_orphan:
            self.orphan_count -= 1
        self.detach_session(item)
        item.stage = Stage.ENDED
        item.message = None
        is_first_end, item.outcome.name = not item.outcome.name, item.outcome.name or outcome
        self.items.discard(item)
        self.timetable.forget(item)
        if self.live.get(item.submitted.request_id) is item:
            del self.live[item.submitted.request_id]
        self.is_news = True
        if is_first_end:
            self._record(item, outcome, now_s)

    def orphan(self, item: Attempt, until_s: float) -> None:
        """Its frontend's stream broke: keep it for whoever adopts it."""
        self.detach_session(item)
        item.expire_s = until_s
        self.orphan_count += 1
        self.timetable.by(item, until_s)

    def linger(self, item: Attempt, now_s: float, until_s: float, outcome: str) -> None:
        """Keep only its handoff until then; it has ended for everybody else."""
        prefill, prefill_slot = item.prefill.replica, item.prefill.slot
        if prefill is not None:
            prefill.left(item)  # its handoff tells nothing more of the replica
        item.prefill.replica, item.prefill.slot = None, 0
        self.end(item, now_s, outcome)
        item.prefill.replica, item.prefill.slot, item.stage = prefill, prefill_slot, Stage.LINGERING
        item.expire_s = until_s
        self.items.add(item)
        self.timetable.by(item, until_s)

    def detach_session(self, item: Attempt) -> None:
        """Nobody reads it any more."""
        if item.session is not None:
            item.session.slots.pop(item.slot, None)
        item.session = item.outbox = None

    def detach_decode(self, item: Attempt) -> None:
        """Decode holds it no more, or will not be heard about it."""
        decode = item.decode.replica
        if decode is not None:
            decode.forget(item.decode.slot, item.decode.blocks)
            item.decode.replica, item.decode.slot = None, 0

    def detach_prefill(self, item: Attempt) -> None:
        """Prefill holds it no more, or will not be heard about it."""
        if item.prefill.replica is not None:
            item.prefill.replica.slots.pop(item.prefill.slot, None)
            item.prefill.replica.left(item)  # also one that waits for decode's word: it may be the trial
            item.prefill.replica, item.prefill.slot = None, 0

    def detach(self, item: Attempt, replica: Replica) -> None:
        """`replica`, its prefill or its decode, holds it no more."""
        if replica is item.prefill.replica:
            self.detach_prefill(item)
        else:
            self.detach_decode(item)

    def cancel(self, item: Attempt, reason: pb.Cancel.Reason.ValueType) -> None:
        """Tell whoever has it that it is not wanted any more."""
        self.cancel_decode(item, reason)
        self.cancel_prefill(item, reason)

    def cancel_decode(self, item: Attempt, reason: pb.Cancel.Reason.ValueType) -> None:
        """Tell decode that it is not wanted any more."""
        if item.decode.replica is not None:
            item.decode.replica.outbox.cancel(item.decode.slot, reason)
            self.detach_decode(item)

    def cancel_prefill(self, item: Attempt, reason: pb.Cancel.Reason.ValueType) -> None:
        """Tell prefill, if it has it, that it is not wanted any more."""
        if item.prefill.replica is not None:
            if item.prefill.slot:
                item.prefill.replica.outbox.cancel(item.prefill.slot, reason)
            self.detach_prefill(item)

    # What the policy is told.

    def dispatched(self, item: Attempt, now_s: float) -> None:
        """It was sent to the replica that runs its prompt."""
        placement = item.routing.placement
        assert placement is not None, item
        item.routing.is_dispatched = True
        if placement.prefill is not None:
            tenant = (item.submitted.tenant, item.submitted.priority_class)
            item.routing.share = self.shares.dispatch(
                tenant,
                item.submitted.weight,
                placement.prefill,
                placement.prefill_s,
                item.submitted.token_count,
                now_s,
            )
        self._tell(
            Dispatched(
                self.router,
                item.submitted.request_id,
                placement.prefill or placement.decode,
                item.hashes,
                placement.prefill_s,
                now_s,
                now_s + DISPATCH_LIFE_S + 10 * placement.prefill_s,
                item.submitted.precedence,
                item.submitted.token_count,
            )
        )

    def started(self, item: Attempt, now_s: float) -> None:
        """Its engine has it."""
        item.outcome.was_taken = True
        self.is_news = True
        if item.routing.share is not None:
            self.shares.start(item.routing.share, now_s)
        if item.routing.is_dispatched:
            self._tell(Started(self.router, item.submitted.request_id, now_s))

    def settle(self, item: Attempt, now_s: float, hit: Hit | None = None) -> None:
        """Its prompt was computed, or never will be."""
        if item.routing.is_dispatched:
            item.routing.is_dispatched = False
            self.is_news = True
            if item.routing.share is not None:
                alone_s = self.shares.end(item.routing.share, now_s)
                item.routing.share = None
                if hit is not None and hit.prefill_s > alone_s:
                    # The rest of it the engine was busy with the prompts before.
                    hit = replace(hit, prefill_s=alone_s)
            if hit is not None:
                self.queue.settle_prefill(item, hit.computed_tokens)
            self._tell(Finished(self.router, item.submitted.request_id, now_s, hit))

    def _tell(self, event: Note) -> None:
        self.policy.observe(event)
        self._note(event)

    def assert_consistent(self) -> None:
        """Raise AssertionError if an attempt is somewhere it should not be, or not where it should."""
        self.queue.assert_consistent()
        self.shares.assert_consistent()
        assert set(self.queue) == {item for item in self.items if item.stage is Stage.QUEUED}
        assert self.orphan_count == sum(item.is_orphan for item in self.items), "orphans are miscounted"
        for request_id, item in self.live.items():
            assert item in self.items and item.submitted.request_id == request_id, item
            assert item.stage not in (Stage.ENDED, Stage.LINGERING), item
        for item in self.items:
            _check(item)


def _check(item: Attempt) -> None:
    stage = item.stage
    assert stage is not Stage.ENDED, item
    assert item.routing.share is None or item.routing.is_dispatched, item
    assert (item.session is None) == (item.outbox is None), item
    if item.session is not None:
        assert item.session.slots.get(item.slot) is item, item
    if stage in (Stage.QUEUED, Stage.RESERVING, Stage.PREFILLING):
        assert item.message is not None and item.session is not None, item
    has_decode = stage not in (Stage.QUEUED, Stage.LINGERING)
    assert (item.decode.replica is not None) == has_decode == bool(item.decode.slot), item
    if item.decode.replica is not None:
        assert item.decode.replica.slots.get(item.decode.slot) is item, item
    if stage in (Stage.PREFILLING, Stage.LINGERING):
        assert item.prefill.slot, item
    if item.prefill.slot:
        assert item.prefill.replica is not None, item
        assert item.prefill.replica.slots.get(item.prefill.slot) is item, item
        assert stage in (Stage.PREFILLING, Stage.TRANSFERRING, Stage.GENERATING, Stage.LINGERING), item
