"""Outboxes: rows that wait to be written to one peer, merged into one message per write. Pure.

A sender never awaits its peer. It adds rows here, and the stream's single writer takes all rows that came during the last
write. An outbox is bounded, which is the backpressure of a stream. It is stuck after `STUCK_S` over the soft limit, or at
once over the hard limit. A stream with a stuck outbox must be dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.attach.frames import PAIR_BYTES
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.deadlines import remaining_ms

STUCK_S = 2.0
"""An outbox that stays full for this long shows a peer that does not read. The stream is then dropped."""

SOFT_BYTES = 4 << 20
HARD_BYTES = 16 << 20
ROW_BYTES = 64
"""Size that one row counts, in addition to its variable part."""

TAKE_BYTES = 4 << 20
"""Bytes of prompts in one message; further prompts go with the next. gRPC ends a stream at a message that is too large."""

MESSAGE_BYTES_MAX = 2 * HARD_BYTES
"""Largest message: the rows of a full outbox, and the longest prompt that a configuration allows after TAKE_BYTES."""


def _nothing() -> None:
    return None


class Outbox:
    """Counts the waiting rows, and finds a peer that stopped reading.

    Rows are urgent or lazy (docs/decisions/0008). `on_ready` is called when the first urgent row is added. `on_lazy` is
    called when an empty outbox gets a lazy row. The writer of the stream sets both, to wake at once or after its coalescing
    window.
    """

    __slots__ = ("_full_since_s", "_left_bytes", "is_urgent", "on_lazy", "on_ready", "waiting_bytes")

    def __init__(self) -> None:
        self.on_ready: Callable[[], None] = _nothing
        self.on_lazy: Callable[[], None] = _nothing
        self.is_urgent = False
        """True while an urgent row waits."""
        self.waiting_bytes = 0
        self._left_bytes = 0
        """Those of `waiting_bytes` that did not fit into the last message. They do not show that the peer reads slowly."""
        self._full_since_s: float | None = None

    def is_full(self) -> bool:
        """True while more than the soft limit waits. Optional rows should not be added then."""
        return self.waiting_bytes > SOFT_BYTES

    def is_stuck(self, now_s: float) -> bool:
        """True if the stream must be dropped: full for STUCK_S, or over the hard limit."""
        if self.waiting_bytes <= SOFT_BYTES:
            self._full_since_s = None
            return False
        if self._full_since_s is None:
            self._full_since_s = now_s
        return self.waiting_bytes - self._left_bytes > HARD_BYTES or now_s - self._full_since_s >= STUCK_S

    def _add(self, variable_bytes: int = 0) -> None:
        self.waiting_bytes += ROW_BYTES + variable_bytes
        if not self.is_urgent:
            self.is_urgent = True
            self.on_ready()

    def _add_lazy(self, variable_bytes: int = 0) -> None:
        was_empty = not self.waiting_bytes
        self.waiting_bytes += ROW_BYTES + variable_bytes
        if was_empty:
            self.on_lazy()

    def _taken(self) -> None:
        self.waiting_bytes = self._left_bytes = 0
        self.is_urgent = False
        self._full_since_s = None


class UpwardOutbox(Outbox):
    """Collects one AttachRequest. Cancels precede submits. The cancel of an unsent submit removes both."""

    __slots__ = (
        "_adopts",
        "_cancels",
        "_closed",
        "_contradictions",
        "_credits",
        "_handoffs",
        "_hello",
        "_last_slot",
        "_submits",
    )

    def __init__(self, hello: pb.Hello | None = None) -> None:
        super().__init__()
        self._hello = hello
        self._last_slot = 0
        self._cancels: dict[int, pb.Cancel.Reason.ValueType] = {}
        self._contradictions: list[pb.Contradiction] = []
        self._adopts: dict[int, pb.Adopt] = {}
        self._submits: dict[int, tuple[pb.Submit, float, float | None]] = {}
        self._handoffs: dict[int, pb.Handoff] = {}
        self._credits: dict[int, int] = {}
        self._closed: dict[int, None] = {}

    def new_slot(self) -> int:
        """Return the next slot number of this stream. Slots must be submitted in the order they were drawn."""
        self._last_slot += 1
        return self._last_slot

    def submit(self, submit: pb.Submit, deadline_s: float, ttft_deadline_s: float | None = None) -> None:
        """Add `submit`, which the outbox owns from now on.

        `deadline_s`, `ttft_deadline_s`: on the clock of `take`, which fills in the remaining milliseconds (deadline
        propagation).
        """
        self._submits[submit.slot] = (submit, deadline_s, ttft_deadline_s)
        self._add(len(submit.token_ids) + len(submit.block_hashes))

    def adopt(self, adopt: pb.Adopt) -> None:
        """Add `adopt`."""
        self._adopts[adopt.slot] = adopt
        self._add()

    def contradict(self, contradiction: pb.Contradiction) -> None:
        """Add `contradiction`. A blocked writer adds at most STUCK_S to the age that it states."""
        self._contradictions.append(contradiction)
        self._add()

    def handoff(self, handoff: pb.Handoff) -> None:
        """Add `handoff`."""
        self._handoffs[handoff.slot] = handoff
        self._add(len(handoff.context_phase_params))

    def credit(self, slot: int, position: int) -> None:
        """Raise the flow-control window of `slot` to `position`, and open a closed one. Only the highest value is sent."""
        self._closed.pop(slot, None)
        known = self._credits.get(slot)
        if known is None:
            self._credits[slot] = position
            self._add()
        elif position > known:
            self._credits[slot] = position

    def close_window(self, slot: int) -> None:
        """Report that the flow-control window of the client of `slot` is closed."""
        if slot not in self._closed:
            self._closed[slot] = None
            self._add_lazy()

    def is_waiting(self, slot: int) -> bool:
        """Return True if the submit or adopt of `slot` has not been sent."""
        return slot in self._submits or slot in self._adopts

    def cancel(self, slot: int, reason: pb.Cancel.Reason.ValueType) -> bool:
        """Cancel `slot`. Return True if its submit or adopt was still waiting; then nothing is sent for the slot."""
        self._handoffs.pop(slot, None)
        self._credits.pop(slot, None)
        self._closed.pop(slot, None)
        if self._submits.pop(slot, None) is not None or self._adopts.pop(slot, None) is not None:
            return True
        self._cancels[slot] = reason
        if reason == pb.Cancel.REASON_TRANSFERRED:
            self._add_lazy()
        else:
            self._add()
        return False

    def take(self, now_s: float) -> pb.AttachRequest | None:
        """Return the waiting rows as one message, or None. It has all rows, but prompts up to TAKE_BYTES only.

        The remaining rows stay urgent. They go with later messages, in the order of the slots.
        """
        if not self.waiting_bytes and self._hello is None:
            return None
        self._taken()
        message = pb.AttachRequest()
        if self._hello is not None:
            message.hello.CopyFrom(self._hello)
            self._hello = None
        for slot, reason in self._cancels.items():
            message.cancels.add(slot=slot, reason=reason)
        self._cancels.clear()
        message.contradictions.extend(self._contradictions)
        self._contradictions.clear()
        size = 0
        for slot, (submit, deadline_s, ttft_deadline_s) in self._submits.items():
            if size >= TAKE_BYTES:
                self._take_before(slot, message)
                return message
            size += len(submit.token_ids) + len(submit.block_hashes)
            submit.budget.remaining_ms = remaining_ms(deadline_s, now_s)
            if ttft_deadline_s is not None:
                submit.budget.ttft_remaining_ms = remaining_ms(ttft_deadline_s, now_s)
            message.submits.append(submit)
        message.adopts.extend(self._adopts.values())
        message.handoffs.extend(self._handoffs.values())
        message.credit_slots.extend(self._credits.keys())
        message.credit_positions.extend(self._credits.values())
        message.closed_slots.extend(self._closed)
        for waiting in (self._adopts, self._submits, self._handoffs, self._credits, self._closed):
            waiting.clear()
        return message

    def _take_before(self, first: int, message: pb.AttachRequest) -> None:
        """Move the rows of slots below `first` into `message`, which has their submits. The other rows stay.

        INVARIANT: slots are opened in ascending order, and no row of a slot precedes its submit or adopt.
        """
        message.adopts.extend(row for slot, row in self._adopts.items() if slot < first)
        message.handoffs.extend(row for slot, row in self._handoffs.items() if slot < first)
        for slot, position in self._credits.items():
            if slot < first:
                message.credit_slots.append(slot)
                message.credit_positions.append(position)
        message.closed_slots.extend(slot for slot in self._closed if slot < first)
        self._submits = {slot: row for slot, row in self._submits.items() if slot >= first}
        self._adopts = {slot: row for slot, row in self._adopts.items() if slot >= first}
        self._handoffs = {slot: row for slot, row in self._handoffs.items() if slot >= first}
        self._credits = {slot: position for slot, position in self._credits.items() if slot >= first}
        self._closed = {slot: None for slot in self._closed if slot >= first}
        kinds = (self._submits, self._adopts, self._handoffs, self._credits, self._closed)
        rows = sum(len(kind) for kind in kinds)
        size = sum(len(each.token_ids) + len(each.block_hashes) for each, _, _ in self._submits.values())
        size += sum(len(each.context_phase_params) for each in self._handoffs.values())
        self.waiting_bytes = self._left_bytes = ROW_BYTES * rows + size
        self.is_urgent = True


class DownwardOutbox(Outbox):
    """Collects one AttachResponse."""

    __slots__ = (
        "_alternative_counts",
        "_alternatives",
        "_computed",
        "_counts",
        "_hello",
        "_logprobs",
        "_message",
        "_positions",
        "_slots",
        "_tokens",
    )

    def __init__(self, hello: pb.Hello | None = None) -> None:
        super().__init__()
        self._hello = hello
        self._message = pb.AttachResponse()
        self._computed: dict[int, int] = {}
        # The columns of the frame are lists. An append to a protobuf field takes three times the CPU (measured by hand).
        self._slots: list[int] = []
        self._positions: list[int] = []
        self._counts: list[int] = []
        self._tokens: list[bytes] = []
        self._logprobs: list[bytes] | None = None
        """Log-probabilities of the waiting rows, NaN for rows without them. None while no row has any."""
        self._alternatives: list[bytes] = []
        self._alternative_counts: list[int] = []
        """Alternatives for each token of the waiting rows. Empty while no row has any."""

    def tokens(
        self, slot: int, position: int, token_ids: bytes, logprobs: bytes = b"", alternatives: bytes = b""
    ) -> None:
        """Add a row of the step frame: tokens at [position, position + len(token_ids) / 4) of `slot`."""
        size = len(token_ids)
        count = size >> 2
        self._slots.append(slot)
        self._positions.append(position)
        self._counts.append(count)
        self._tokens.append(token_ids)
        if logprobs:
            if self._logprobs is None:
                self._logprobs = [_NAN * (len(row) >> 2) for row in self._tokens[:-1]]
            self._logprobs.append(logprobs)
        elif self._logprobs is not None:
            self._logprobs.append(_NAN * count)
        self.waiting_bytes += ROW_BYTES + size + len(logprobs) + len(alternatives)
        if alternatives or self._alternative_counts:
            missing = len(self._slots) - 1 - len(self._alternative_counts)
            self._alternative_counts += [0] * missing + [len(alternatives) // (count * PAIR_BYTES)]
            self._alternatives.append(alternatives)
        if not self.is_urgent:
            self.is_urgent = True
            self.on_ready()

    def accept(self, slot: int, *, urgent: bool = True) -> None:
        """Add an acceptance. `urgent`: the caller proceeds only with it."""
        self._message.acceptances.add(slot=slot)
        if urgent:
            self._add()
        else:
            self._add_lazy()

    def placement(self, row: pb.Placement) -> None:
        """Add a placement."""
        self._message.placements.append(row)
        self._add_lazy(64 * len(row.candidates))

    def start(self, slot: int, queue_us: int) -> None:
        """Add a start."""
        self._message.starts.add(slot=slot, queue_us=queue_us)
        self._add_lazy()

    def first_token(self, row: pb.FirstToken) -> None:
        """Add a first token."""
        self._message.first_tokens.append(row)
        self._add(len(row.context_phase_params))

    def transfer(self, slot: int, transfer_us: int) -> None:
        """Add a transfer."""
        self._message.transfers.add(slot=slot, transfer_us=transfer_us)
        self._add_lazy()

    def computed(self, slot: int, position: int) -> None:
        """Report that the engine computed [.., position) of `slot`. Only the last waiting value is sent."""
        is_new = slot not in self._computed
        self._computed[slot] = position
        if is_new:
            self._add_lazy()

    def finish(self, slot: int, end_position: int, reason: pb.Finish.Reason.ValueType) -> None:
        """Add a finish."""
        self._message.finishes.add(slot=slot, end_position=end_position, reason=reason)
        self._add()

    def fail(
        self,
        slot: int,
        code: pb.Failure.Code.ValueType,
        message: str,
        *,
        replica: str = "",
        untouched: bool = False,
        contestable: bool = False,
    ) -> None:
        """Add a failure. See Failure in attach.proto."""
        self._message.failures.add(
            slot=slot,
            code=code,
            message=message[:512],
            replica=replica,
            untouched=untouched,
            contestable=contestable,
        )
        self._add(len(message))

    def refuse(
        self,
        slot: int,
        reason: pb.Refusal.Reason.ValueType,
        message: str,
        *,
        retry_after_ms: int = 0,
        field: str = "",
        estimate_ms: int = 0,
        evicted: bool = False,
        replica: str = "",
    ) -> None:
        """Add a refusal. See Refusal in attach.proto."""
        self._message.refusals.add(
            slot=slot,
            reason=reason,
            message=message[:512],
            retry_after_ms=retry_after_ms,
            field=field,
            estimate_ms=estimate_ms,
            evicted=evicted,
            replica=replica,
        )
        self._add(len(message))

    def load(self, report: pb.LoadReport) -> None:
        """Set the load report. A later report replaces one that still waits."""
        self._message.load_report.CopyFrom(report)
        self._add_lazy()

    def take(self, now_s: float) -> pb.AttachResponse | None:
        """Return all waiting rows as one message, or None. The outbox is empty afterwards."""
        if not self.waiting_bytes and self._hello is None:
            return None
        self._taken()
        message, self._message = self._message, pb.AttachResponse()
        if self._hello is not None:
            message.hello.CopyFrom(self._hello)
            self._hello = None
        if self._computed:
            message.computed_slots.extend(self._computed.keys())
            message.computed_positions.extend(self._computed.values())
            self._computed.clear()
        if self._tokens:
            frame = message.frame
            frame.slots.extend(self._slots)
            frame.positions.extend(self._positions)
            frame.counts.extend(self._counts)
            frame.token_ids = b"".join(self._tokens)
            for column in (self._slots, self._positions, self._counts, self._tokens):
                column.clear()
            if self._logprobs is not None:
                frame.logprobs = b"".join(self._logprobs)
                self._logprobs = None
            if self._alternative_counts:
                frame.alternatives = b"".join(self._alternatives)
                frame.alternative_counts.extend(self._alternative_counts)
                self._alternatives.clear()
                self._alternative_counts.clear()
        return message


_NAN = b"\x00\x00\xc0\x7f"
