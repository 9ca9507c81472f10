"""One attached replica: its slots, load and outlier ejection, and the reader of its answers. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from kvmesh.attach import frames
from kvmesh.attach.outbox import DownwardOutbox, UpwardOutbox
from kvmesh.attach.rules import check_computed
from kvmesh.attach.token_log import Gap, admit
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.outlier_ejection import OutlierEjection
from services.router.forwarding.replica_load import ReplicaLoad
from services.router.placement.policy import LoadReported

log = logging.getLogger(__name__)

KV_EVENTS: Final = "kv_events"
"""Capability of an engine that reports each change of its cache (kvmesh.triton.capabilities)."""


class ReplicaLink(Protocol):
    """A stream to a replica. `outbox` takes requests at any time; after each loss of the stream it is a new outbox."""

    outbox: UpwardOutbox


class ForwardedSlot(Protocol):
    """An attempt as the reader of frames needs it: the way to its frontend. `slot`: its number on that stream."""

    slot: int
    outbox: DownwardOutbox | None
    next_position: int


SlotT = TypeVar("SlotT", bound=ForwardedSlot)


class Eligibility(Protocol):
    """Receives the changes that decide whether replicas may get new requests."""

    def changed(self) -> None: ...
    def trust_changed(self) -> None: ...


class AnswerTaker(Protocol[SlotT]):
    """Takes the answers of a replica about its slots. `takers`: the handler of each field of AttachResponse."""

    @property
    def takers(self) -> Mapping[str, Callable[[SlotT, Replica[SlotT], Any, float], None]]: ...
    def on_gap(self, slot: SlotT, replica: Replica[SlotT], message: str, now_s: float, /) -> None: ...
    def on_load(self, seen: LoadReported, /) -> None: ...
    def on_lost(
        self, replica: Replica[SlotT], slots: Sequence[SlotT], reason: str, now_s: float, /
    ) -> None: ...


class ReplicaOwner(Protocol[SlotT]):
    """The router's core, as far as a replica calls it."""

    ejection_total: int

    @property
    def answers(self) -> AnswerTaker[SlotT]: ...
    @property
    def eligible(self) -> Eligibility: ...
    def after_event(self, now_s: float) -> None: ...


@dataclass(slots=True)
class HandoffHistory:
    """The handoffs of a replica so far. By them `reports.blame` decides whether prefill or decode lost a handoff."""

    last_given_s: float = float("-inf")
    """Time of the last KV transfer that a decode reported from this prefill."""
    lost: dict[str, float] = field(default_factory=dict)
    """Prefills with handoffs that this decode lost since its last KV transfer, with the time of the first loss."""


class _Flag:
    """A flag that decides about new requests at a replica. A change is reported to the eligible replicas."""

    def __set_name__(self, owner: type[Replica[Any]], name: str) -> None:
        self._name = name

    def __get__(self, replica: Replica[Any], owner: type[Replica[Any]]) -> bool:
        return bool(replica.__dict__[self._name])

    def __set__(self, replica: Replica[Any], value: bool) -> None:
        if replica.__dict__.get(self._name) != value:
            replica.__dict__[self._name] = value
            replica.eligibility_changed()


class Replica(Generic[SlotT]):
    """A replica, and the Sink of its link (kvmesh.attach.client). `connect` the link before the first event.

    `slots`: its attempts by their number in the present stream. A lost lease clears `is_listed`: the replica gets no new
    attempts, its stream stays.
    """

    is_up = _Flag()
    is_listed = _Flag()
    is_draining = _Flag()
    """True while its lease says that it drains, or the snapshot of this router says that it is out of use."""
    is_held = _Flag()
    """True while it is warmed up before it serves, or quarantined: by its last load report, before any by its lease."""
    is_retired = _Flag()
    """A newer process has the name. This one serves its attempts; its reports say nothing about the name any more."""
    is_ready = _Flag()
    """True if its last load report says that its engine is ready and that it takes new work; or before any report."""

    def __init__(
        self,
        core: ReplicaOwner[SlotT],
        name: str,
        role: Literal["prefill", "decode"],
        *,
        address: str = "",
        kv_address: str = "",
    ) -> None:
        self._core = core
        self.name = name
        self.role = role
        self.address = address
        self.kv_address = kv_address
        self.slots: dict[int, SlotT] = {}
        self.load = ReplicaLoad(name)
        self.last_seen_s = 0.0
        """Time of the last message of the present stream."""
        self.is_up = False
        self.is_listed = True
        self.is_draining = False
        self.is_held = False
        self._was_held = False
        """True if it was held since the last report that it serves."""
        self.is_retired = False
        self.is_ready = True
        self.features: frozenset[str] = frozenset()
        """Features of its engine, by its lease."""
        self.has_kv_events = True
        """False if the lease does not list them: the index then believes what was dispatched there."""
        self.down_since_s: float | None = None
        self.open_failures = 0
        """Consecutive failures to open its stream."""
        self.ejection = OutlierEjection()
        self.moved_s = float("-inf")
        """Time at which a prompt was last moved to a shorter queue."""
        self.handoffs = HandoffHistory()
        self.computed_s = float("-inf")
        """Time at which this decode last finished a prompt that it ran itself."""
        self._link: ReplicaLink | None = None

    def __repr__(self) -> str:
        return f"Replica({self.name}, {'up' if self.is_up else 'down'}, {len(self.slots)} slots)"

    def connect(self, link: ReplicaLink) -> None:
        """Set the link; this replica is its sink."""
        self._link = link

    @property
    def outbox(self) -> UpwardOutbox:
        """The outbox of the present stream."""
        assert self._link is not None, f"{self.name} has no link"
        return self._link.outbox

    def take_capabilities(self, capabilities: Iterable[str]) -> None:
        """Take the capabilities of its lease."""
        self.features = frozenset(capabilities)
        self.has_kv_events = KV_EVENTS in self.features

    def hold(self, is_held: bool) -> None:
        """Note whether its lease says that it is held. A load report, which comes over its stream, is newer."""
        if self.load.report is None:
            self.is_held = is_held
            self._was_held |= is_held

    def is_in_service(self) -> bool:
        """Return True if it may get new requests, now or once its stream is up."""
        return self.is_listed and not self.is_draining and not self.is_held and not self.is_retired

    def is_placeable(self) -> bool:
        """Return True if it may get new requests, apart from outlier ejection."""
        return self.is_up and self.is_in_service() and self.is_ready

    def eligibility_changed(self) -> None:
        """Report that `is_placeable` or the state object changed."""
        self._core.eligible.changed()

    def _trust_changed(self) -> None:
        self._core.eligible.trust_changed()

    # Outlier ejection: a circuit breaker per replica.

    def failed(self, sent_s: float, now_s: float, why: str) -> None:
        """Count a failure that the replica caused, of an attempt that was sent at `sent_s`."""
        if self.ejection.on_failure(sent_s, now_s):
            self._ejected(now_s, why)

    def contradicted(self, verdict_s: float, now_s: float) -> None:
        """Count a verdict of `verdict_s` that a second replica contradicted: the request was served there."""
        if self.ejection.on_contradiction(verdict_s, now_s):
            self._ejected(now_s, "a second replica contradicted its verdicts")

    def _ejected(self, now_s: float, why: str) -> None:
        self._trust_changed()
        self._core.ejection_total += 1
        for_s = (self.ejection.until_s or now_s) - now_s
        log.warning("replica ejected", extra={"replica": self.name, "for_s": round(for_s, 3), "why": why})

    def answered_well(self, sent_s: float) -> None:
        """Count a good start of an attempt that was sent at `sent_s`."""
        if self.ejection.on_answer(sent_s):
            self._trust_changed()
            log.info("replica ejection ended", extra={"replica": self.name})

    def ended_well(self, sent_s: float) -> None:
        """Count a good end of an attempt that was sent at `sent_s`."""
        if self.ejection.on_success(sent_s):
            self._trust_changed()
            log.info("replica ejection ended", extra={"replica": self.name})

    def on_sent(self, attempt: SlotT, now_s: float) -> None:
        """Note that `attempt` is placed here. It may be the half-open probe."""
        if self.ejection.on_sent(attempt, now_s):
            self._trust_changed()

    def on_left(self, attempt: SlotT) -> None:
        """Note that `attempt` is not here any more."""
        if self.ejection.on_left(attempt):
            self._trust_changed()

    def forget(self, slot: int, blocks: int) -> None:
        """Remove a slot that is over, and give its KV `blocks` back."""
        attempt = self.slots.pop(slot, None)
        if attempt is not None:
            self.on_left(attempt)
            self.load.release(slot, blocks)

    # Sink.

    def on_attached(self, link: ReplicaLink, peer: pb.Hello, now_s: float) -> None:
        """Take a new stream. Called by the link."""
        self.is_up = True
        self.last_seen_s = now_s
        self.open_failures = 0
        self.down_since_s = None
        self._core.after_event(now_s)

    def on_response(self, link: ReplicaLink, message: pb.AttachResponse, now_s: float) -> None:
        """Take one message, in the protocol's order. Raises FrameError."""
        self.last_seen_s = now_s
        if message.computed_slots:
            self._on_computed(message)
        slots, takers = self.slots, self._core.answers.takers
        for column, value in message.ListFields():  # set fields by number: the protocol's order
            take = takers.get(column.name)
            if take is not None:
                for row in value:
                    if (attempt := slots.get(row.slot)) is not None:
                        take(attempt, self, row, now_s)
            elif column.name == "frame":
                self._on_frame(value, now_s)
            elif column.name == "load_report":
                self._on_load(value, now_s)
        self._core.after_event(now_s)

    def on_lost(self, link: ReplicaLink | None, reason: str, now_s: float) -> None:
        """Take the loss of the stream: every slot of it is void."""
        if self.is_up or self.down_since_s is None:
            self.down_since_s = now_s
        if self.is_up and link is not None:
            self.failed(now_s, now_s, reason)
        elif not self.is_up:
            self.open_failures += 1
        self.is_up, self.is_ready = False, True
        self.load.report = None
        lost = list(self.slots.values())
        if lost:
            log.warning("replica lost", extra={"replica": self.name, "requests": len(lost), "why": reason})
        self._core.answers.on_lost(self, lost, reason, now_s)
        assert not self.slots, f"{self} kept slots of a lost stream"
        self.load.reset()
        self.eligibility_changed()
        self._core.after_event(now_s)

    def _on_frame(self, frame: pb.StepFrame, now_s: float) -> None:
        """Forward the rows of a step frame. The hottest loop of the router: it reads columns and builds no rows."""
        rows = frames.rows(frame)  # checks the columns; nothing is iterated here
        if frame.alternatives:
            self._on_rows(rows, now_s)
            return
        slots, tokens, logprobs = self.slots, frame.token_ids, frame.logprobs
        at = 0
        for slot, position, count in zip(frame.slots, frame.positions, frame.counts, strict=True):
            end = at + 4 * count
            attempt = slots.get(slot)
            if attempt is not None and attempt.outbox is not None:
                if position == attempt.next_position:
                    attempt.next_position = position + count
                    attempt.outbox.tokens(attempt.slot, position, tokens[at:end], logprobs[at:end])
                else:
                    row = frames.Row(slot, position, count, tokens[at:end], logprobs[at:end])
                    self._on_odd_row(attempt, row, now_s)
            at = end

    def _on_rows(self, rows: Iterator[frames.Row], now_s: float) -> None:
        """Forward the rows of a step frame with alternatives, which is rare."""
        for row in rows:
            attempt = self.slots.get(row.slot)
            if attempt is not None and attempt.outbox is not None:
                self._on_odd_row(attempt, row, now_s)

    def _on_computed(self, message: pb.AttachResponse) -> None:
        """Forward how far the engine computed beyond the flow-control window. Raises FrameError."""
        check_computed(message)
        for slot, position in zip(message.computed_slots, message.computed_positions, strict=True):
            attempt = self.slots.get(slot)
            if attempt is not None and attempt.outbox is not None and self.role == "decode":
                attempt.outbox.computed(attempt.slot, position)

    def _on_odd_row(self, attempt: SlotT, row: frames.Row, now_s: float) -> None:
        """Forward the new tokens of a row that overlaps; fail the attempt if tokens are missing."""
        try:
            rest = admit(row, attempt.next_position)
        except Gap as gap:
            self._core.answers.on_gap(attempt, self, str(gap), now_s)
            return
        if rest is not None and attempt.outbox is not None:
            attempt.next_position = rest.position + rest.count
            attempt.outbox.tokens(
                attempt.slot, rest.position, rest.token_ids, rest.logprobs, rest.alternatives
            )

    def _on_load(self, report: pb.LoadReport, now_s: float) -> None:
        self.is_ready = report.engine_ready and not report.draining and not report.cordoned
        self.is_held = report.held
        is_fresh, self._was_held = self._was_held and not report.held, report.held
        was_aggregated = self.load.state.is_aggregated
        if self.load.take(report, now_s):  # the restarted engine starts clean
            self.ejection = OutlierEjection(now_s)
            self._trust_changed()
        elif self.load.state.is_aggregated != was_aggregated:
            self._trust_changed()
        if not self.is_retired:
            self._core.answers.on_load(
                LoadReported(
                    self.name,
                    report.queued_request_count,
                    report.running_request_count,
                    now_s,
                    slow_start_age_s=report.slow_start_age_ms / 1000,
                    is_fresh=is_fresh,
                    believed_blocks_max=0 if self.has_kv_events else report.block_total_count,
                    engine_boot_id=report.engine_boot_id,
                    is_engine_ready=report.engine_ready,
                )
            )
