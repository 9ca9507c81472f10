"""Answers of a decode replica, case by case."""

from __future__ import annotations

import pytest

from kvmesh.attach.caller_session import CallerSession
from kvmesh.attach.frames import FrameError
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.triton.capabilities import Capabilities, ModelFacts
from kvmesh.triton.errors import CallError, EngineBusy, EngineError, EngineLost, HandoffLost, InvalidRequest
from services.decode.core import DecodeCore
from services.decode.generation import COMPUTED_STRIDE
from services.decode.limits import DecodeLimits
from services.decode.records import CallRecord
from services.decode.slot import DecodeSlot
from tests.unit.triton.fake_engine import FOREIGN, VOCABULARY, FakeEngine, expected, facts, next_token
from tests.unit.triton.reader import HELLO, Reader, SlotView, submit

GENERATION, LOCAL = pb.PHASE_GENERATION_ONLY, pb.PHASE_CONTEXT_AND_GENERATION
PROMPT = [3, 1, 4, 1, 5, 9]
LIMITS = DecodeLimits(slots_max=4, detached_s=3.0, slow_reader_s=30.0, coalesce_max_s=0.0)


class Replica:
    """A decode core with one router and an engine that moves by hand."""

    def __init__(
        self, limits: DecodeLimits = LIMITS, model: ModelFacts | None = None, *, hides_end_token: bool = False
    ) -> None:
        self.now_s = 50.0
        self.records: list[CallRecord] = []
        self.core = DecodeCore(
            "decode-0", model or facts(), limits, lambda address, _: address == "kv:1", self.records.append
        )
        self.engine = FakeEngine(self.core.sink, hides_end_token=hides_end_token)
        self.core.connect(self.engine)
        self.engine.report(self.now_s)
        self.session, self.reader = self.attach()

    def attach(self) -> tuple[CallerSession[DecodeSlot], Reader]:
        """Open another stream."""
        outbox = DownwardOutbox()
        return self.core.open_session(HELLO, outbox, self.now_s), Reader(outbox)

    def submit(self, slot: int, phase: pb.Phase.ValueType, **changes: object) -> SlotView:
        """Submit and read the answer."""
        message = submit(slot, PROMPT, phase, **changes)  # type: ignore[arg-type]  # fields by name
        start = message.start_position + (phase == GENERATION)
        view = self.reader.open(slot, start)
        self.send(submits=[message])
        return view

    def hand_over(self, slot: int, address: str = "kv:1", handoff: bytes = b"h") -> None:
        """Deliver a handoff that the engine knows."""
        self.engine.held[handoff] = next_token(PROMPT)
        row = pb.Handoff(slot=slot, context_phase_params=handoff, first_token_count=1, kv_address=address)
        self.send(handoffs=[row])

    def send(self, **parts: object) -> None:
        """Send one message and read the answer."""
        self.session.on_request(pb.AttachRequest(**parts), self.now_s)  # type: ignore[arg-type]  # fields by name
        self.read()

    def step(self, times: int = 1, seconds: float = 0.02) -> None:
        """Let the engine make steps."""
        for _ in range(times):
            self.pass_time(seconds)
            self.engine.step(self.now_s)
            self.pass_time(0.0)

    def pass_time(self, seconds: float) -> None:
        """Move the clock, with its timers, and read."""
        end_s = self.now_s + seconds
        while (at_s := self.core.next_wake_s()) is not None and at_s <= end_s:
            self.now_s = max(self.now_s, at_s)
            self.core.on_timer(self.now_s)
        self.now_s = end_s
        self.read()

    def read(self) -> None:
        """Read the first stream and check the counts."""
        self.reader.read(self.now_s)
        self.core.assert_consistent()

    def is_empty(self) -> bool:
        """True if no KV block, no call and no unfinished slot is held."""
        return (
            not self.core.slot_table.reservations.reserved
            and not self.engine.live
            and not self.core.slot_table.held_count()
        )


def test_local_request_answers_first_token_then_frames_then_finish() -> None:
    """The first token is a separate row, never in a frame. The KV blocks are free as soon as the engine has finished."""
    replica = Replica()
    view = replica.submit(1, LOCAL, output=5)
    assert view.is_accepted and view.is_started
    assert replica.core.slot_table.reservations.reserved == 3  # 6 + 5 tokens in blocks of 4
    replica.step()
    assert view.first is not None and view.first.position == 0 and replica.reader.frame_total == 0
    assert (view.first.cached_token_count, view.first.computed_token_count) == (0, 6)
    replica.step(4)
    assert view.ids == expected(PROMPT, 5, -1)
    assert view.finish == pb.Finish(slot=1, end_position=5, reason=pb.Finish.REASON_LENGTH)
    assert replica.is_empty()
    assert [record.outcome for record in replica.records] == ["length"]


def test_end_token_ends_a_request() -> None:
    """The end token is the log's last token, and the finish has its reason."""
    ids = expected(PROMPT, 6, -1)
    replica = Replica()
    view = replica.submit(1, LOCAL, output=6, end_token_id=ids[3])
    replica.step(6)
    assert view.finish is not None and view.finish.reason == pb.Finish.REASON_END_TOKEN
    assert view.ids == ids[: ids.index(ids[3]) + 1]


@pytest.mark.parametrize(
    ("phase", "made"), [(LOCAL, 0), (LOCAL, 1), (LOCAL, 3), (GENERATION, 1), (GENERATION, 3)]
)
def test_an_answer_without_its_end_token_ends_well(phase: pb.Phase.ValueType, made: int) -> None:
    """TensorRT's kernels never output the end token. So a final answer below the limit is the end, even an empty one."""
    ids = expected(PROMPT, 6, -1)
    assert ids[made] not in ids[:made]
    replica = Replica(hides_end_token=True)
    view = replica.submit(1, phase, output=6, end_token_id=ids[made])
    if phase == GENERATION:
        replica.hand_over(1)
    replica.step(6)
    assert view.failure is None
    assert view.finish == pb.Finish(slot=1, end_position=made, reason=pb.Finish.REASON_END_TOKEN)
    assert view.ids == ids[phase == GENERATION : made]
    assert replica.is_empty()
    assert [record.outcome for record in replica.records] == ["end_token"]


def test_an_engine_that_ends_before_the_handoffs_token_has_failed() -> None:
    """The token of the handoff is part of every answer. Without it the engine continued from another prompt."""
    replica = Replica()
    view = replica.submit(1, GENERATION, output=6)
    replica.hand_over(1)
    (call_id,) = replica.engine.live
    replica.engine.cancel(call_id)
    replica.core.sink.on_end(call_id, replica.now_s)
    replica.read()
    assert view.failure is not None and view.failure.code == pb.Failure.CODE_ENGINE_ERROR
    assert "0 of 1" in view.failure.message
    assert replica.is_empty()


def test_a_late_end_of_a_stopped_call_is_ignored() -> None:
    """The engine ends a stopped call like a complete one. The end reaches only a slot that waits for it."""
    replica = Replica()
    view = replica.submit(1, LOCAL, output=6)
    replica.step(2)
    (call_id,) = replica.engine.live
    replica.send(cancels=[pb.Cancel(slot=1, reason=pb.Cancel.REASON_CLIENT)])
    replica.core.sink.on_end(call_id, replica.now_s)
    replica.read()
    assert view.finish is None and view.failure is None and replica.is_empty()
    assert [record.outcome for record in replica.records] == ["cancelled"]


def test_generation_after_a_handoff_drops_the_repeated_first_token() -> None:
    """The caller has the first token from prefill. Frames begin after it, and the log begins with it."""
    replica = Replica()
    view = replica.submit(1, GENERATION, output=5)
    assert view.is_accepted and not replica.engine.live
    replica.hand_over(1)
    replica.step(5)
    assert view.is_started and view.is_transferred and view.first is None
    assert view.ids == expected(PROMPT, 5, -1)[1:]
    assert view.finish == pb.Finish(slot=1, end_position=5, reason=pb.Finish.REASON_LENGTH)
    assert replica.is_empty()


@pytest.mark.parametrize("address", ["", "kv:evil"])
def test_kv_comes_only_from_registered_prefills(address: str) -> None:
    """A handoff with any other address is refused, and that address is not dialled."""
    replica = Replica()
    view = replica.submit(1, GENERATION)
    replica.hand_over(1, address)
    assert view.failure is not None and view.failure.code == pb.Failure.CODE_HANDOFF_LOST
    assert not view.failure.untouched and replica.engine.started_total == 0 and replica.is_empty()


def test_registered_source_is_passed_to_the_engine() -> None:
    """The engine gets the only address from which it may pull."""
    replica = Replica()
    replica.submit(1, GENERATION)
    replica.hand_over(1)
    assert [run.call.kv_peer for run in replica.engine.live.values()] == ["kv:1"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"output": 0}, "budget.max_output_tokens"),
        ({"output": 123}, "budget.max_output_tokens"),
        ({"block_tokens": 8}, "block_tokens"),
    ],
)
def test_values_out_of_range_are_refused_by_name(changes: dict[str, object], field: str) -> None:
    """A refusal names the field, and no slot is held."""
    replica = Replica()
    view = replica.submit(1, LOCAL, **changes)
    assert view.refusal is not None
    assert (view.refusal.reason, view.refusal.field) == (pb.Refusal.REASON_INVALID, field)
    assert not replica.core.slot_table.slots


def test_phases_of_other_roles_are_refused() -> None:
    """A prefill phase is refused, and a handoff for an engine without disaggregated prefill."""
    view = Replica().submit(1, pb.PHASE_CONTEXT_ONLY)
    assert view.refusal is not None and view.refusal.field == "phase"
    aggregated = facts(capabilities=Capabilities())
    view = Replica(model=aggregated).submit(1, GENERATION)
    assert view.refusal is not None and view.refusal.reason == pb.Refusal.REASON_DRAINING
    assert "takes no handoffs" in view.refusal.message


def test_a_phase_of_a_newer_router_is_refused() -> None:
    """An unknown number is refused like any phase that does not run here."""
    view = Replica().submit(1, 99)  # type: ignore[arg-type]
    assert view.refusal is not None and view.refusal.field == "phase" and "UNKNOWN" in view.refusal.message


def test_other_versions_past_deadlines_and_dead_engines_are_refused() -> None:
    """Each has its own reason, before a slot is held."""
    replica = Replica()
    stale = replica.submit(1, LOCAL, model_version="v2")
    late = replica.submit(2, LOCAL, remaining_ms=0)
    replica.core.sink.on_ready(False, replica.now_s)
    dead = replica.submit(3, LOCAL)
    replica.core.sink.on_ready(True, replica.now_s)
    replica.core.drain()
    draining = replica.submit(4, LOCAL)
    reasons = [view.refusal.reason for view in (stale, late, dead, draining) if view.refusal]
    assert reasons == [
        pb.Refusal.REASON_STALE_SNAPSHOT,
        pb.Refusal.REASON_DEADLINE,
        pb.Refusal.REASON_DRAINING,
        pb.Refusal.REASON_DRAINING,
    ]


def test_full_slots_and_full_kv_are_refused_with_a_time() -> None:
    """A refusal names the full resource and, once the drain rate is known, the retry delay."""
    replica = Replica()
    for slot in range(1, 5):
        replica.submit(slot, GENERATION)
    full = replica.submit(5, GENERATION)
    assert full.refusal is not None and full.refusal.reason == pb.Refusal.REASON_QUEUE_FULL
    assert full.refusal.message == "slots full: 4/4" and not full.refusal.retry_after_ms
    replica.send(cancels=[pb.Cancel(slot=1)])
    replica.submit(6, GENERATION)
    full = replica.submit(7, GENERATION)
    assert full.refusal is not None and full.refusal.retry_after_ms > 0
    replica = Replica(model=facts(kv_blocks=32))
    replica.submit(1, GENERATION, output=110)
    full = replica.submit(2, GENERATION, output=8)
    assert full.refusal is not None and full.refusal.reason == pb.Refusal.REASON_KV_FULL
    assert full.refusal.message == "KV full: 4 blocks needed, 3/32 free"


def test_a_higher_attempt_ends_a_lower_one_on_another_stream() -> None:
    """It ends on any stream. An equal or lower attempt is refused (fencing)."""
    replica = Replica()
    view = replica.submit(1, LOCAL, request_id="a" * 32, attempt=2)
    replica.step()
    session, reader = replica.attach()
    for slot, attempt in ((1, 1), (2, 2), (3, 3)):
        reader.open(slot, 0)
        message = submit(slot, PROMPT, LOCAL, request_id="a" * 32, attempt=attempt)
        session.on_request(pb.AttachRequest(submits=[message]), replica.now_s)
    replica.read()
    reader.read(replica.now_s)
    for slot in (1, 2):
        refusal = reader.slots[slot].refusal
        assert refusal is not None and refusal.reason == pb.Refusal.REASON_SUPERSEDED
    assert reader.slots[3].is_accepted and len(replica.engine.live) == 1
    assert view.finish is not None and view.finish.reason == pb.Finish.REASON_SUPERSEDED


def test_a_detached_stream_is_taken_over_without_recomputing() -> None:
    """The engine continues without a reader. The new reader gets all tokens from its position, in frames."""
    replica = Replica()
    replica.submit(1, LOCAL, request_id="a" * 32, output=12)
    replica.step(3)
    replica.session.on_closed(replica.now_s)
    replica.session, replica.reader = replica.attach()
    replica.step(3)
    assert replica.core.slot_table.detached_count() == 1
    view = replica.reader.open(7, 2)
    row = pb.Adopt(slot=7, request_id="a" * 32, attempt=1, position=2, credit_position=100)
    replica.send(adopts=[row])
    assert view.is_accepted and view.ids == expected(PROMPT, 12, -1)[2:6]
    replica.step(6)
    assert view.ids == expected(PROMPT, 12, -1)[2:] and view.finish is not None
    assert replica.engine.started_total == 1 and replica.core.takeover_total == 1


def test_detached_and_pending_slots_end_with_their_time() -> None:
    """A slot that waits for a handoff ends with its stream, a running one 3 s later. KV blocks and engine are free."""
    replica = Replica()
    replica.submit(1, LOCAL, output=100)
    replica.submit(2, GENERATION, output=8)
    replica.session.on_closed(replica.now_s)
    assert len(replica.core.slot_table.slots) == 1 and len(replica.engine.live) == 1
    replica.pass_time(2.9)
    assert not replica.is_empty()
    replica.pass_time(0.2)
    assert replica.is_empty() and not replica.core.slot_table.slots


def test_an_open_stream_gets_a_finish_when_its_slot_is_taken_over() -> None:
    """The slot moves. The old reader gets a finish, and the new one the tokens."""
    replica = Replica()
    old = replica.submit(1, LOCAL, request_id="a" * 32)
    replica.step(2)
    session, reader = replica.attach()
    new = reader.open(1, 1)
    row = pb.Adopt(slot=1, request_id="a" * 32, attempt=1, position=1, credit_position=100)
    session.on_request(pb.AttachRequest(adopts=[row]), replica.now_s)
    replica.step(6)
    reader.read(replica.now_s)
    assert old.finish is not None and old.finish.reason == pb.Finish.REASON_ADOPTED
    assert new.ids == expected(PROMPT, 8, -1)[1:] and new.finish is not None


@pytest.mark.parametrize(("first", "second", "wins"), [(2, 1, 1), (2, 0, 1), (1, 2, 2), (1, 1, 2), (0, 0, 2)])
def test_a_late_takeover_does_not_take_the_slot_from_a_newer_one(first: int, second: int, wins: int) -> None:
    """A lower number than that of the last takeover is refused, and the reader keeps the slot."""
    replica = Replica()
    replica.submit(1, LOCAL, request_id="a" * 32)
    replica.step(2)
    views = []
    for slot, adoption in ((2, first), (3, second)):
        views.append(replica.reader.open(slot, 1))
        row = pb.Adopt(slot=slot, request_id="a" * 32, attempt=1, position=1, credit_position=100)
        row.adoption = adoption
        replica.send(adopts=[row])
    replica.step(6)
    winner, loser = views[wins - 1], views[2 - wins]
    assert winner.ids == expected(PROMPT, 8, -1)[1:] and winner.finish is not None
    if wins == 1:
        assert loser.refusal is not None and loser.refusal.reason == pb.Refusal.REASON_SUPERSEDED
    else:
        assert loser.finish is not None and loser.finish.reason == pb.Finish.REASON_ADOPTED


def test_a_finished_log_can_be_taken_over_for_some_time() -> None:
    """Its finish row may have been lost with its stream."""
    replica = Replica()
    replica.submit(1, LOCAL, request_id="a" * 32, output=4)
    replica.step(4)
    assert replica.is_empty() and len(replica.core.slot_table.slots) == 1
    replica.pass_time(2.0)
    view = replica.reader.open(2, 0)
    replica.send(adopts=[pb.Adopt(slot=2, request_id="a" * 32, attempt=1, credit_position=100)])
    assert view.ids == expected(PROMPT, 4, -1) and view.finish is not None
    replica.pass_time(3.1)
    assert not replica.core.slot_table.slots
    gone = replica.reader.open(3, 0)
    replica.send(adopts=[pb.Adopt(slot=3, request_id="a" * 32, attempt=1)])
    assert gone.refusal is not None and gone.refusal.reason == pb.Refusal.REASON_UNKNOWN_REQUEST


def test_takeovers_of_slots_that_do_not_run_are_refused() -> None:
    """Another attempt, a slot that waits for its handoff, and an impossible position are refused."""
    replica = Replica()
    replica.submit(1, LOCAL, request_id="a" * 32)
    replica.submit(2, GENERATION, request_id="b" * 32)
    replica.step()
    for slot, request, attempt, position in ((3, "a", 2, 0), (4, "b", 1, 0), (5, "a", 1, 5)):
        view = replica.reader.open(slot, 0)
        replica.send(
            adopts=[pb.Adopt(slot=slot, request_id=request * 32, attempt=attempt, position=position)]
        )
        assert view.refusal is not None


def test_the_window_bounds_sending_but_not_generating() -> None:
    """With a closed window the engine still finishes, and its KV blocks are free. The rest is sent as the window grows."""
    replica = Replica()
    view = replica.submit(1, LOCAL, output=8, credit=3)
    view.credit = 3
    replica.step(8)
    assert len(view.ids) == 3 and view.finish is None
    assert not replica.core.slot_table.reservations.reserved
    view.credit = 5
    replica.send(credit_slots=[1], credit_positions=[5])
    assert len(view.ids) == 5 and view.finish is None
    replica.send(credit_slots=[1], credit_positions=[4])
    assert len(view.ids) == 5
    view.credit = 8
    replica.send(credit_slots=[1], credit_positions=[8])
    assert view.ids == expected(PROMPT, 8, -1) and view.finish is not None


def test_a_slow_reader_ends_after_its_time_and_a_growing_window_resets_it() -> None:
    """The limit is 30 s without a larger window, not 30 s of slow reading."""
    replica = Replica()
    view = replica.submit(1, LOCAL, output=100, credit=1, remaining_ms=3_600_000)
    replica.step(3)
    for credit in (2, 3):
        replica.pass_time(9.0)
        replica.step()
        replica.pass_time(9.0)
        replica.step()
        replica.send(credit_slots=[1], credit_positions=[credit])
    for _ in range(4):
        replica.pass_time(7.0)
        assert view.finish is None
        replica.step()
    replica.pass_time(3.0)
    assert view.finish == pb.Finish(slot=1, end_position=3, reason=pb.Finish.REASON_SLOW_READER)
    assert replica.is_empty()


def test_a_reader_with_a_closed_window_gets_the_computed_position() -> None:
    """At least every COMPUTED_STRIDE tokens, after a takeover, and the last position when the engine ends or is stopped."""
    replica = Replica()
    view = replica.submit(1, LOCAL, output=100, credit=3, remaining_ms=3_600_000)
    for made in range(1, 81):
        replica.step()
        assert made - COMPUTED_STRIDE < max(view.computed, 3) <= max(made, 3)
    assert len(view.ids) == 3
    replica.session.on_closed(replica.now_s)
    replica.session, replica.reader = replica.attach()
    view = replica.reader.open(1, 2)
    (request_id,) = replica.core.slot_table.slots
    row = pb.Adopt(slot=1, request_id=request_id, attempt=1, position=2, credit_position=5)
    replica.send(adopts=[row])
    assert view.computed == 80
    replica.step(20)
    assert view.computed == 100 and len(view.ids) == 3 and view.finish is None

    cut = replica.submit(2, LOCAL, output=100, credit=1, remaining_ms=3_600_000)
    replica.step(7)
    assert cut.computed == 0
    for _ in range(4):
        replica.pass_time(7.0)
        replica.step()
    replica.pass_time(3.0)
    assert cut.finish == pb.Finish(slot=2, end_position=1, reason=pb.Finish.REASON_SLOW_READER)
    assert cut.computed == 11


def test_a_reader_with_an_open_window_gets_no_computed_position() -> None:
    """The tokens themselves show that position."""
    replica = Replica()
    view = replica.submit(1, LOCAL, output=100)
    replica.step(100)
    assert view.finish is not None and view.computed == 0


def half_closed(replica: Replica) -> list[SlotView]:
    """Fill the 4 slots, and close the windows of the first two, the second one first. All have sent one token."""
    views = [replica.submit(slot, LOCAL, credit=1) for slot in range(1, 5)]
    replica.step(2)
    replica.send(closed_slots=[2])
    replica.pass_time(0.5)
    replica.send(closed_slots=[1, 2])
    assert not any(view.is_over() for view in views)
    return views


def test_above_half_of_the_slots_the_longest_closed_window_ends() -> None:
    """Two of four slots may wait for their clients. The third closed window ends the slot that closed first."""
    replica = Replica()
    views = half_closed(replica)
    replica.send(closed_slots=[4])
    assert [view.is_over() for view in views] == [False, True, False, False]
    assert views[1].finish == pb.Finish(slot=2, end_position=1, reason=pb.Finish.REASON_SLOW_READER)
    assert replica.core.slow_reader_cuts == {"time": 0, "share": 1}
    assert replica.submit(5, LOCAL).is_accepted, "its slot is free"


def test_the_tenant_with_the_most_closed_windows_loses_one() -> None:
    """It loses its longest closed one, although another tenant has a longer closed one. So no tenant can end all others."""
    replica = Replica()
    tenants = {1: "quiet", 2: "busy", 3: "busy", 4: "busy"}
    views = {slot: replica.submit(slot, LOCAL, credit=1, tenant=name) for slot, name in tenants.items()}
    replica.step(2)
    for slot in (1, 2, 3):
        replica.send(closed_slots=[slot])
    assert [slot for slot, view in views.items() if view.is_over()] == [2]
    replica.send(closed_slots=[4])
    assert [slot for slot, view in views.items() if view.is_over()] == [2, 3]


def test_an_engine_with_fewer_sequences_than_slots_sets_the_limit() -> None:
    """Further calls wait in its queue behind unread ones. So half of its sequences are kept free for others, too."""
    replica = Replica(model=facts(max_sequences=2))
    views = [replica.submit(slot, LOCAL, credit=1) for slot in range(1, 4)]
    replica.send(closed_slots=[1])
    assert not any(view.is_over() for view in views)
    replica.send(closed_slots=[3])
    assert [view.is_over() for view in views] == [True, False, False]


def test_a_window_that_opened_again_is_the_last_to_end() -> None:
    """Any credit row opens a window, even without a larger position. Closed again, it is the latest closed window."""
    replica = Replica()
    views = half_closed(replica)
    replica.send(credit_slots=[2], credit_positions=[1])
    replica.send(closed_slots=[3])
    assert not any(view.is_over() for view in views)
    replica.send(closed_slots=[2])
    assert [view.is_over() for view in views] == [True, False, False, False]


def test_a_silent_stream_does_not_count_as_slow_readers() -> None:
    """In a partition between router and decode no credit comes for any slot. No slot ends before the slow-reader time."""
    replica = Replica()
    views = [replica.submit(slot, LOCAL, credit=1) for slot in range(1, 5)]
    replica.step(8)
    assert all(slot.blocked_s is not None for slot in replica.core.slot_table.slots.values())
    replica.pass_time(29.0)
    assert not any(view.is_over() for view in views)
    replica.pass_time(1.5)
    assert replica.core.slow_reader_cuts == {"time": 4, "share": 0}


def test_a_takeover_resets_the_state_of_the_window() -> None:
    """The state of a client's window ends with its stream. A pending slot can end like a running one."""
    replica = Replica()
    half_closed(replica)
    replica.session.on_closed(replica.now_s)
    assert not len(replica.core.slot_table.closed_windows)
    replica.session, replica.reader = replica.attach()
    view = replica.reader.open(1, 1)
    adopted = next(iter(replica.core.slot_table.slots.values()))
    replica.send(adopts=[pb.Adopt(slot=1, request_id=adopted.submitted.request_id, attempt=1, position=1)])
    assert view.is_accepted and not len(replica.core.slot_table.closed_windows)
    replica.pass_time(3.1)  # the other detached slots are gone
    pending = [replica.submit(slot, GENERATION) for slot in (2, 3, 4)]
    replica.send(closed_slots=[2, 3, 4])
    assert [one.is_over() for one in (view, *pending)] == [False, True, False, False]


def test_deadlines_end_a_slot_in_every_phase() -> None:
    """Pending, before the first token, or later: it is cancelled in the engine, and keeps the generated tokens."""
    replica = Replica()
    pending = replica.submit(1, GENERATION, remaining_ms=1000)
    waiting = replica.submit(2, LOCAL, remaining_ms=5000, ttft_ms=1000)
    replica.pass_time(1.0)
    for view in (pending, waiting):
        assert view.finish is not None and view.finish.reason == pb.Finish.REASON_DEADLINE
    assert replica.is_empty()
    running = replica.submit(3, LOCAL, output=100, remaining_ms=1000, ttft_ms=500)
    replica.step(20)
    replica.pass_time(1.0)
    assert running.finish == pb.Finish(slot=3, end_position=20, reason=pb.Finish.REASON_DEADLINE)
    assert replica.is_empty() and [record.outcome for record in replica.records] == ["cancelled"] * 2


def test_a_silent_engine_is_found() -> None:
    """After 30 s to the first token, or 10 s between two, the slot fails as stalled, and the call is cancelled."""
    replica = Replica()
    first = replica.submit(1, LOCAL, remaining_ms=600_000)
    replica.pass_time(29.9)
    assert not first.is_over()
    replica.pass_time(0.2)
    assert first.failure is not None and first.failure.code == pb.Failure.CODE_STALLED
    second = replica.submit(2, LOCAL, remaining_ms=600_000)
    replica.step(2)
    replica.pass_time(10.1)
    assert second.failure is not None and second.failure.code == pb.Failure.CODE_STALLED
    assert not second.failure.untouched and replica.is_empty()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineLost("x"), pb.Failure.CODE_ENGINE_LOST),
        (EngineBusy("x"), pb.Failure.CODE_ENGINE_ERROR),
        (EngineError("x"), pb.Failure.CODE_ENGINE_ERROR),
        (HandoffLost("x"), pb.Failure.CODE_HANDOFF_LOST),
        (InvalidRequest("x"), pb.Failure.CODE_INVALID),
    ],
)
def test_engine_errors_become_failures(error: CallError, code: pb.Failure.Code.ValueType) -> None:
    """Each type has its code. A local slot without a token is untouched, a slot with tokens is not."""
    replica = Replica()
    fresh, running = replica.submit(1, LOCAL), replica.submit(2, LOCAL)
    replica.engine.step(replica.now_s, chosen=lambda call_id: call_id == 2)
    for call_id in (1, 2):
        replica.engine.fail(call_id, error, replica.now_s)
    replica.read()
    assert fresh.failure is not None and (fresh.failure.code, fresh.failure.untouched) == (code, True)
    assert running.failure is not None and (running.failure.code, running.failure.untouched) == (code, False)
    assert running.failure.replica == "decode-0" and replica.is_empty()


def test_cancel_frees_everything_in_every_phase() -> None:
    """Pending, running and unknown slots. No more rows follow for them."""
    replica = Replica()
    replica.submit(1, GENERATION)
    replica.submit(2, LOCAL)
    replica.step(2)
    replica.send(cancels=[pb.Cancel(slot=slot, reason=pb.Cancel.REASON_CLIENT) for slot in (1, 2, 99)])
    assert replica.is_empty() and not replica.core.slot_table.slots
    replica.hand_over(1)
    assert not replica.engine.live


def test_logprobs_reach_the_caller_that_requested_them() -> None:
    """They are in the row of the first token and in the frames."""
    replica = Replica()
    asked, silent = replica.submit(1, LOCAL, logprobs=True), replica.submit(2, LOCAL)
    replica.step(8)
    assert asked.first is not None and asked.first.logprob == -0.5
    assert asked.logprobs == [-0.5] * 7
    assert silent.first is not None and not silent.first.HasField("logprob")


def test_slots_of_adopts_and_submits_share_their_numbers() -> None:
    """One message may hold both. A repeated number ends the stream."""
    replica = Replica()
    replica.reader.open(2, 0)
    replica.reader.open(1, 0)
    adopt = pb.Adopt(slot=2, request_id="f" * 32, attempt=1)
    replica.send(adopts=[adopt], submits=[submit(1, PROMPT, LOCAL)])
    with pytest.raises(FrameError, match="never used twice"):
        replica.session.on_request(pb.AttachRequest(submits=[submit(2, PROMPT, LOCAL)]), replica.now_s)
    with pytest.raises(FrameError, match="adopt and a submit"):
        adopt = pb.Adopt(slot=3, request_id="f" * 32, attempt=1)
        both = pb.AttachRequest(adopts=[adopt], submits=[submit(3, PROMPT, LOCAL)])
        replica.session.on_request(both, replica.now_s)


def test_malformed_handoffs_and_credits_end_the_stream() -> None:
    """Empty or huge handoffs, impossible counts, and columns that disagree break the protocol."""
    replica = Replica()
    replica.submit(1, GENERATION, output=4)
    for row in (
        pb.Handoff(slot=1, kv_address="kv:1"),
        pb.Handoff(slot=1, context_phase_params=b"x" * ((1 << 20) + 1), kv_address="kv:1"),
        pb.Handoff(slot=1, context_phase_params=b"x", first_token_count=5, kv_address="kv:1"),
    ):
        with pytest.raises(FrameError):
            replica.session.on_request(pb.AttachRequest(handoffs=[row]), replica.now_s)
    with pytest.raises(FrameError, match="credit columns"):
        replica.session.on_request(pb.AttachRequest(credit_slots=[1]), replica.now_s)


def test_frames_collect_one_step_and_never_mix_two() -> None:
    """A frame waits for the other slots of the step. A second report of a slot first sends the collected frame."""
    replica = Replica(DecodeLimits(coalesce_max_s=1.0))
    ahead, behind = replica.submit(1, LOCAL, output=20), replica.submit(2, LOCAL, output=20)
    replica.engine.step(replica.now_s)
    replica.read()
    for made, sent in ((2, 1), (3, 2)):
        replica.engine.step(replica.now_s, chosen=lambda call_id: call_id == 1)
        replica.read()
        assert replica.core.slot_table.slots[_only(replica, 1)].log.end == made and len(ahead.ids) == sent
    replica.engine.step(replica.now_s, chosen=lambda call_id: call_id == 2)
    replica.read()
    assert (len(ahead.ids), len(behind.ids)) == (3, 2)
    assert replica.reader.frame_total == 2


def _only(replica: Replica, number: int) -> str:
    return replica.session.slots[number].submitted.request_id


def test_the_load_report_is_correct_and_follows_changes() -> None:
    """It is sent at the start, 50 ms after a change, and every second."""
    replica = Replica()
    replica.read()
    assert len(replica.reader.loads) == 1 and replica.reader.loads[0].engine_ready
    replica.submit(1, GENERATION)
    replica.submit(2, LOCAL)
    replica.pass_time(0.06)
    load = replica.reader.loads[-1]
    assert (load.queued_request_count, load.running_request_count) == (1, 1)
    assert (load.block_reserved_count, load.block_total_count) == (8, 64)
    count = len(replica.reader.loads)
    for _ in range(2):
        replica.pass_time(1.02)
    assert len(replica.reader.loads) == count + 2


def test_drain_waits_for_running_slots() -> None:
    """A draining replica is idle when only finished logs are left."""
    replica = Replica()
    replica.submit(1, LOCAL)
    replica.core.drain()
    assert not replica.core.is_idle()
    replica.step(8)
    assert replica.core.is_idle()


@pytest.mark.parametrize("phase", [GENERATION, LOCAL])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_the_first_token_outside_the_vocabulary_ends_the_slot(phase: pb.Phase.ValueType, at: int) -> None:
    """The tokens before it are sent. The engine call is stopped, and no slot is held."""
    replica = Replica()
    replica.engine.lie = lambda _: (FOREIGN, at)
    view = replica.submit(1, phase, vocabulary_size=VOCABULARY)
    if phase == GENERATION:
        replica.hand_over(1)
    for _ in range(3):
        replica.step(3)
    assert view.failure is not None and view.failure.code == pb.Failure.CODE_INVALID_TOKEN
    assert view.ids == expected(PROMPT, 8, -1)[phase == GENERATION : at]
    assert replica.is_empty() and not replica.engine.live


def test_a_caller_without_a_vocabulary_gets_every_id() -> None:
    """A frontend of the previous release checks the ids itself."""
    replica = Replica()
    replica.engine.lie = lambda _: (FOREIGN, 2)
    view = replica.submit(1, LOCAL)
    for _ in range(4):
        replica.step(3)
    assert view.finish is not None and view.ids[2] == VOCABULARY


def test_a_cordon_is_reported_and_refuses_nothing() -> None:
    """Routers leave the replica alone. A submit that was on its way is taken."""
    replica = Replica()
    replica.core.set_cordoned(True)
    assert replica.core.load_report(replica.now_s).cordoned
    assert replica.submit(1, LOCAL).refusal is None and replica.core.live_request_count() == 1
    replica.core.set_cordoned(False)
    assert not replica.core.load_report(replica.now_s).cordoned


def test_a_drain_by_the_control_plane_ends() -> None:
    """The running slot goes on, new ones are refused meanwhile, and taken afterwards; routers are told at once."""
    replica = Replica()
    running = replica.submit(1, LOCAL, output=3)
    replica.core.drain()
    refused = replica.submit(2, LOCAL)
    assert refused.refusal is not None and refused.refusal.reason == pb.Refusal.REASON_DRAINING
    replica.step(3)
    assert running.finish is not None and replica.core.is_idle()
    replica.core.undrain()
    replica.pass_time(0.06)
    assert not replica.reader.loads[-1].draining
    assert replica.submit(3, LOCAL).refusal is None


def test_a_step_is_sent_at_its_end() -> None:
    """An engine with step frames tells the end of a step. A slot that is not in the step delays the others no more."""
    replica = Replica()
    for number in (1, 2):
        replica.submit(number, LOCAL, output=6)
    replica.step(2)
    call_id, _ = replica.engine.live
    sent = replica.reader.frame_total
    replica.core.sink.on_tokens(call_id, (7,), (), replica.now_s)
    replica.read()
    assert replica.reader.frame_total == sent
    for _ in range(2):
        replica.core.sink.on_step(replica.now_s)
        replica.read()
    assert replica.reader.frame_total == sent + 1
