"""One attached replica as the router sees it: its slots, its load, and the reader of what it answers. Pure."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final, Literal, Protocol

from kvmesh.attach import frames
from kvmesh.attach.outbox import UpwardOutbox
from kvmesh.attach.rules import check_computed
from kvmesh.attach.token_log import Gap, admit
from kvmesh.attach.v1 import attach_pb2 as pb
from services.router.forwarding.attempt import Attempt, Stage
from services.router.forwarding.outlier_ejection import OutlierEjection
from services.router.placement.policy import LoadSeen, ReplicaState

if TYPE_CHECKING:
    from services.router.forwarding.core import ForwardingCore


log = logging.getLogger(__name__)

STEPS_KEPT: Final = 64
"""Reports of the engine's step that the slow ones are looked for in."""

STEPS_KEPT_S: Final = 60.0
"""How long they are: an older one tells of a load that is gone."""

REPORT_FRESH_S: Final = 3.0
"""A load report comes each second; after this silence the replica is lost."""


class Link(Protocol):
    """A stream to a replica. `outbox` takes requests at any time and is a new one after each loss."""

    outbox: UpwardOutbox


class _Flag:
    """Something that decides whether a replica may be sent new requests. Who keeps those that may hears of a change."""

    def __set_name__(self, owner: type[Replica], name: str) -> None:
        self._name = name

    def __get__(self, replica: Replica, owner: type[Replica]) -> bool:
        return bool(replica.__dict__[self._name])

    def __set__(self, replica: Replica, value: bool) -> None:
        if replica.__dict__.get(self._name) != value:
            replica.__dict__[self._name] = value
            replica.placeable_changed()


class Replica:
    """A Sink of its link (see kvmesh.attach.client). `connect` the link before the first event.

    `slots`: attempts by our number of them in the present stream. A lost lease (`is_listed`) masks it for new
    placements and leaves its streams alone.
    """

    is_up = _Flag()
    is_listed = _Flag()
    is_draining = _Flag()
    is_retired = _Flag()
    """A newer process has the name: this one serves what it has, and tells nothing about the name any more."""
    is_ready = _Flag()
    """What it said last about its engine; True before."""

    def __init__(
        self,
        relay: ForwardingCore,
        name: str,
        role: Literal["prefill", "decode"],
        *,
        address: str = "",
        kv_address: str = "",
    ) -> None:
        self._relay = relay
        self.name = name
        self.role = role
        self.address = address
        self.kv_address = kv_address
        self.slots: dict[int, Attempt] = {}
        self.state = ReplicaState(name)
        self.report: pb.LoadReport | None = None
        self.reported_s = 0.0
        self.heard_s = 0.0
        """When its present stream last brought something."""
        self.is_up = False
        self.is_listed = True
        self.is_draining = False
        self.is_retired = False
        self.is_ready = True
        self.down_since_s: float | None = None
        self.open_failures = 0
        """Times in a row that its stream could not be opened."""
        self.ejection = OutlierEjection()
        self.left_s = float("-inf")
        """When a prompt last left it for a shorter queue."""
        self.gave_s = float("-inf")
        """When a decode last said that it has KV blocks of this prefill."""
        self.lost_handoffs: dict[str, float] = {}
        """Prefills whose handoffs this decode lost since it last got one, and when it lost the first of each."""
        self.computed_s = float("-inf")
        """When this decode last had computed a prompt of its own."""
        self._engine_boot_id = ""
        self._unanswered: dict[int, int] = {}
        """KV blocks of submits that decode has not answered, by slot: no report counts them yet."""
        self._steps_us: deque[tuple[float, int]] = deque(maxlen=STEPS_KEPT)
        """When each was told, and what it was."""
        self._link: Link | None = None

    def __repr__(self) -> str:
        return f"Replica({self.name}, {'up' if self.is_up else 'down'}, {len(self.slots)} slots)"

    def connect(self, link: Link) -> None:
        """Set the stream whose sink this is."""
        self._link = link

    @property
    def outbox(self) -> UpwardOutbox:
        """The way to the replica."""
        assert self._link is not None, f"{self.name} has no link"
        return self._link.outbox

    def is_here(self) -> bool:
        """True if it may be sent new requests, now or as soon as its stream is up."""
        return self.is_listed and not self.is_draining and not self.is_retired

    def is_placeable(self) -> bool:
        """True if it may be sent new requests, whether it is trusted with them or not."""
        return self.is_up and self.is_here() and self.is_ready

    def placeable_changed(self) -> None:
        """Another answer of `is_placeable`, or another state."""
        self._relay.releases.roster.changed()

    def _trust_changed(self) -> None:
        self._relay.releases.roster.trust_changed()

    def step_p95_us(self, now_s: float) -> int:
        """Return the engine's step that 95 of 100 reports of the last minute keep; 0 if none told."""
        told = self._steps_us
        while told and now_s - told[0][0] > STEPS_KEPT_S:
            told.popleft()
        steps = sorted(step_us for _, step_us in told)
        return steps[(95 * len(steps) - 1) // 100] if steps else 0

    def is_at_work(self, now_s: float) -> bool:
        """True if it just said that its engine runs requests."""
        report = self.report
        return (
            report is not None
            and report.running_request_count > 0
            and now_s - self.reported_s < REPORT_FRESH_S
        )

    def load(self) -> int:
        """Return how many prompts it has, as it said or as we know."""
        ours = sum(item.stage is Stage.PREFILLING for item in self.slots.values())
        if self.report is None:
            return ours
        return max(ours, self.report.queued_request_count + self.report.running_request_count)

    # Whether it is trusted.

    def failed(self, sent_s: float, now_s: float, why: str) -> None:
        """It failed something of its own doing that was sent to it at `sent_s`."""
        if self.ejection.on_failure(sent_s, now_s):
            self._ejected(now_s, why)

    def contradicted(self, verdict_s: float, now_s: float) -> None:
        """Another replica served what this one called invalid at `verdict_s`."""
        if self.ejection.on_contradiction(verdict_s, now_s):
            self._ejected(now_s, "its verdicts were contradicted")

    def _ejected(self, now_s: float, why: str) -> None:
        self._trust_changed()
        self._relay.ejection_total += 1
        for_s = (self.ejection.until_s or now_s) - now_s
        log.warning("replica ejected", extra={"replica": self.name, "for_s": round(for_s, 3), "why": why})

    def answered_well(self, sent_s: float) -> None:
        """It began well what was sent to it at `sent_s`."""
        if self.ejection.on_answer(sent_s):
            self._trust_changed()
            log.info("replica readmitted", extra={"replica": self.name})

    def ended_well(self, sent_s: float) -> None:
        """It ended well what was sent to it at `sent_s`."""
        if self.ejection.on_success(sent_s):
            self._trust_changed()
            log.info("replica readmitted", extra={"replica": self.name})

    def sent(self, item: Attempt, now_s: float) -> None:
        """`item` is placed here."""
        if self.ejection.sent(item, now_s):
            self._trust_changed()

    def left(self, item: Attempt) -> None:
        """`item` is not here any more."""
        if self.ejection.left(item):
            self._trust_changed()

    # Blocks at decode, between two load reports.

    def reserve(self, slot: int, blocks: int) -> None:
        """A submit that needs `blocks` is on its way."""
        self._unanswered[slot] = blocks
        self.state.block_reserved += blocks
        self.state.block_own += blocks

    def answered(self, slot: int) -> None:
        """It was accepted or refused: the next report counts it, or does not."""
        self._unanswered.pop(slot, None)

    def is_unanswered(self, slot: int) -> bool:
        """True if a submit to decode was neither accepted nor refused."""
        return slot in self._unanswered

    def forget(self, slot: int, blocks: int) -> None:
        """A slot is over; its `blocks` come back."""
        item = self.slots.pop(slot, None)
        if item is not None:
            self.left(item)
            self.answered(slot)
            self.state.block_reserved = max(0, self.state.block_reserved - blocks)
            self.state.block_own = max(0, self.state.block_own - blocks)

    # Sink.

    def on_attached(self, link: Link, peer: pb.Hello, now_s: float) -> None:
        """The stream is up."""
        self.is_up = True
        self.heard_s = now_s
        self.open_failures = 0
        self.down_since_s = None
        self._relay.after_event(now_s)

    def on_response(self, link: Link, message: pb.AttachResponse, now_s: float) -> None:
        """Take one message, in the protocol's order. Raises FrameError."""
        self.heard_s = now_s
        if message.computed_slots:
            self._on_computed(message)
        slots, takers = self.slots, self._relay.answers.takers
        for field, value in message.ListFields():  # what is there, by number: the protocol's order
            take = takers.get(field.name)
            if take is not None:
                for row in value:
                    if (item := slots.get(row.slot)) is not None:
                        take(item, self, row, now_s)
            elif field.name == "frame":
                self._on_frame(value, now_s)
            elif field.name == "load_report":
                self._on_load(value, now_s)
        self._relay.after_event(now_s)

    def on_lost(self, link: Link | None, reason: str, now_s: float) -> None:
        """Every slot of the stream is void."""
        if self.is_up or self.down_since_s is None:
            self.down_since_s = now_s
        if self.is_up and link is not None:
            self.failed(now_s, now_s, reason)
        elif not self.is_up:
            self.open_failures += 1
        self.is_up, self.is_ready = False, True
        self.report = None
        lost = list(self.slots.values())
        self._relay.answers.on_lost(self, lost, reason, now_s)
        assert not self.slots and not self._unanswered, f"{self} kept slots of a lost stream"
        self.state = ReplicaState(self.name)
        self.placeable_changed()
        self._relay.after_event(now_s)

    def _on_frame(self, frame: pb.StepFrame, now_s: float) -> None:
        """Pass the rows on. The hottest loop of the router: rows are looked at by their columns."""
        frames.rows(frame)  # checks the columns; nothing is iterated here
        slots, tokens, logprobs = self.slots, frame.token_ids, frame.logprobs
        at = 0
        for slot, position, count in zip(frame.slots, frame.positions, frame.counts, strict=True):
            end = at + 4 * count
            item = slots.get(slot)
            if item is not None and item.outbox is not None:
                if position == item.next_position:
                    item.next_position = position + count
                    item.outbox.tokens(item.slot, position, tokens[at:end], logprobs[at:end])
                else:
                    row = frames.Row(slot, position, count, tokens[at:end], logprobs[at:end])
                    self._on_odd_row(item, row, now_s)
            at = end

    def _on_computed(self, message: pb.AttachResponse) -> None:
        """Pass on what the engine computed beyond the credit. Raises FrameError."""
        check_computed(message)
        for slot, position in zip(message.computed_slots, message.computed_positions, strict=True):
            item = self.slots.get(slot)
            if item is not None and item.outbox is not None and item.decode.replica is self:
                item.outbox.computed(item.slot, position)

    def _on_odd_row(self, item: Attempt, row: frames.Row, now_s: float) -> None:
        """Drop what is known already; tokens missing in between end the attempt."""
        try:
            rest = admit(row, item.next_position)
        except Gap as gap:
            self._relay.answers.on_gap(item, self, str(gap), now_s)
            return
        if rest is not None and item.outbox is not None:
            item.next_position = rest.position + rest.count
            item.outbox.tokens(item.slot, rest.position, rest.token_ids, rest.logprobs)

    def _on_load(self, report: pb.LoadReport, now_s: float) -> None:
        self.report = report
        self.is_ready = report.engine_ready and not report.draining
        self.reported_s = now_s
        if report.engine_boot_id and report.engine_boot_id != self._engine_boot_id:
            if self._engine_boot_id:
                self.ejection = OutlierEjection(now_s)
                self._trust_changed()
            self._engine_boot_id = report.engine_boot_id
        state = self.state
        state.block_total = report.block_total_count
        state.block_reserved = report.block_reserved_count + sum(self._unanswered.values())
        state.queued_requests = report.queued_request_count
        state.running_requests = report.running_request_count
        state.reported_at_s = now_s
        state.is_stale = False
        if report.step_us:
            self._steps_us.append((now_s, report.step_us))
        if not self.is_retired:
            self._relay.answers.on_load(
                LoadSeen(self.name, report.queued_request_count, report.running_request_count, now_s)
            )
