"""The caller's end of an Attach stream in tests. It checks the guarantees of the protocol for each slot."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh import blocks
from kvmesh.attach import frames
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.rules import check_computed
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2

HELLO = pb.Hello(process_id="router-0", boot_id="b", protocol_version=1)


@dataclass(slots=True)
class SlotView:
    """The caller's state of one slot."""

    next_position: int
    ids: list[int] = field(default_factory=list)
    """Tokens from the position at which the slot was opened."""
    logprobs: list[float] = field(default_factory=list)
    credit: int = 1 << 30
    computed: int = 0
    """One past the last reported position that was computed beyond the window."""
    is_accepted: bool = False
    is_started: bool = False
    is_transferred: bool = False
    is_cancelled: bool = False
    first: pb.FirstToken | None = None
    finish: pb.Finish | None = None
    failure: pb.Failure | None = None
    refusal: pb.Refusal | None = None

    def is_over(self) -> bool:
        """True if the slot ended."""
        return (self.finish or self.failure or self.refusal) is not None


class Reader:
    """Reads one outbox. AssertionError for a row that is repeated, has a gap, or is beyond the window or the end."""

    def __init__(self, outbox: DownwardOutbox) -> None:
        self.outbox = outbox
        self.slots: dict[int, SlotView] = {}
        self.loads: list[pb.LoadReport] = []
        self.frame_total = 0

    def open(self, number: int, position: int, credit: int = 1 << 30) -> SlotView:
        """Expect the slot `number`, which starts at `position`."""
        assert number not in self.slots
        view = self.slots[number] = SlotView(position, credit=credit)
        return view

    def read(self, now_s: float) -> None:
        """Take the waiting rows and check them."""
        message = self.outbox.take(now_s)
        if message is None:
            return
        if message.HasField("load_report"):
            self.loads.append(message.load_report)
        check_computed(message)
        for slot, position in zip(message.computed_slots, message.computed_positions, strict=True):
            view = self._live(slot)
            assert position > view.computed, f"{position} was told behind {view.computed}"
            view.computed = position
        for row in message.acceptances:
            view = self._live(row.slot)
            assert not view.is_accepted, row
            view.is_accepted = True
        for start in message.starts:
            view = self._live(start.slot)
            assert view.is_accepted and not view.is_started, start
            view.is_started = True
        for first in message.first_tokens:
            view = self._live(first.slot)
            assert view.first is None and view.is_started, first
            view.first = first
            self._tokens(view, first.position, [first.token_id], [])
        for transfer in message.transfers:
            view = self._live(transfer.slot)
            assert not view.is_transferred, transfer
            view.is_transferred = True
        self.frame_total += bool(message.frame.slots)
        for tokens in frames.rows(message.frame):
            ids = frames.unpack_ids(tokens.token_ids)
            self._tokens(
                self._live(tokens.slot), tokens.position, ids, frames.unpack_logprobs(tokens.logprobs)
            )
        self._endings(message)

    def _endings(self, message: pb.AttachResponse) -> None:
        for finish in message.finishes:
            view = self._live(finish.slot)
            view.finish = finish
            if finish.reason in (pb.Finish.REASON_END_TOKEN, pb.Finish.REASON_LENGTH):
                assert finish.end_position == view.next_position, (finish, view)
        for failure in message.failures:
            self._live(failure.slot).failure = failure
        for refusal in message.refusals:
            self._live(refusal.slot).refusal = refusal

    def _live(self, number: int) -> SlotView:
        view = self.slots[number]
        assert not view.is_over(), f"slot {number} was told something after its end: {view}"
        return view

    @staticmethod
    def _tokens(view: SlotView, position: int, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        assert position == view.next_position, f"position {position} came, {view.next_position} was next"
        view.next_position += len(ids)
        view.ids.extend(ids)
        view.logprobs.extend(logprobs)
        assert view.next_position <= view.credit, f"{view.next_position} is beyond the credit {view.credit}"


def submit(
    slot: int,
    prompt: Sequence[int],
    phase: pb.Phase.ValueType,
    *,
    request_id: str = "",
    attempt: int = 1,
    start: int = 0,
    output: int = 8,
    remaining_ms: int = 60_000,
    ttft_ms: int | None = None,
    credit: int = 1 << 30,
    end_token_id: int = -1,
    priority: int = 0,
    resumed: bool = False,
    shadow: bool = False,
    logprobs: bool = False,
    block_tokens: int = 4,
    model_version: str = "v1",
    priority_class: int | None = None,
    tenant: str = "",
    weight: float = 0.0,
    headroom_permille: int = 0,
    estimate_s: float = 0.0,
    vocabulary_size: int = 0,
    purpose: budget_pb2.Purpose.ValueType = budget_pb2.PURPOSE_UNSPECIFIED,
    further_end_token_ids: Sequence[int] = (),
    guide: pb.Guide | None = None,
) -> pb.Submit:
    """Return a submit that is right in every field."""
    token_ids = frames.pack_ids(prompt)
    budget = budget_pb2.Budget(
        remaining_ms=remaining_ms,
        max_output_tokens=output,
        attempt=attempt,
        attempts_max=8,
        priority=priority,
        shadow=shadow,
        band=priority_class,
        tenant=tenant,
        weight=weight,
        kv_head_room_permille=headroom_permille,
        purpose=purpose,
    )
    if ttft_ms is not None:
        budget.ttft_remaining_ms = ttft_ms
    return pb.Submit(
        slot=slot,
        request_id=request_id or secrets.token_hex(16),
        attempt=attempt,
        start_position=start,
        token_ids=token_ids,
        block_hashes=blocks.pack(blocks.chain(token_ids, block_tokens, "v1")),
        block_tokens=block_tokens,
        sampling=pb.Sampling(temperature=0.0, top_p=1.0, seed=1, guide=guide),
        budget=budget,
        phase=phase,
        credit_position=credit,
        model_version=model_version,
        end_token_id=end_token_id,
        further_end_token_ids=further_end_token_ids,
        resumed=resumed,
        logprobs=logprobs,
        prefill_estimate_us=round(estimate_s * 1e6),
        vocabulary_size=vocabulary_size,
    )
