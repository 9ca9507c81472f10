"""Outboxes: waiting rows become one message in the right order, and a peer that does not read is found."""

import random

import pytest

from kvmesh.attach import outbox as ob
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.deadlines import REMAINING_MS_MAX


def _submit(slot: int) -> pb.Submit:
    return pb.Submit(slot=slot, request_id="0" * 32, token_ids=b"1234")


def test_hello_goes_first_and_once() -> None:
    """The first message carries hello even if no other row waits. Later messages do not."""
    outbox = ob.UpwardOutbox(pb.Hello(process_id="a", boot_id="b", protocol_version=1))
    first = outbox.take(0.0)
    assert first is not None and first.hello.process_id == "a"
    assert outbox.take(0.0) is None
    outbox.credit(1, 5)
    second = outbox.take(0.0)
    assert second is not None and not second.HasField("hello")


def test_remaining_time_is_filled_in_when_the_message_is_made() -> None:
    """Time in the outbox is subtracted from the budget, which stays between 0 and its maximum."""
    outbox = ob.UpwardOutbox()
    for slot, deadline_s in ((1, 12.0), (2, 5.0), (3, 1e9)):
        outbox.submit(_submit(slot), deadline_s, deadline_s - 1)
    message = outbox.take(10.0)
    assert message is not None
    assert [submit.budget.remaining_ms for submit in message.submits] == [2000, 0, REMAINING_MS_MAX]
    assert message.submits[0].budget.ttft_remaining_ms == 1000


def test_cancel_of_an_unsent_submit_removes_both() -> None:
    """The peer never sees a request that was cancelled before it was sent."""
    outbox = ob.UpwardOutbox()
    outbox.submit(_submit(outbox.new_slot()), 5.0)
    assert outbox.cancel(1, pb.Cancel.REASON_CLIENT)
    message = outbox.take(0.0)
    assert message is not None and not message.submits and not message.cancels


def test_cancel_of_a_sent_submit_is_sent_and_drops_the_waiting_rows_of_the_slot() -> None:
    """Handoffs and credits of a cancelled slot are not sent after its cancel."""
    outbox = ob.UpwardOutbox()
    outbox.submit(_submit(outbox.new_slot()), 5.0)
    outbox.take(0.0)
    outbox.handoff(pb.Handoff(slot=1, context_phase_params=b"x"))
    outbox.credit(1, 9)
    assert not outbox.cancel(1, pb.Cancel.REASON_CLIENT)
    message = outbox.take(0.0)
    assert message is not None
    assert [cancel.slot for cancel in message.cancels] == [1]
    assert not message.handoffs and not message.credit_slots


def test_credits_of_one_slot_merge_to_the_highest() -> None:
    """Only the highest waiting credit of a slot is sent."""
    outbox = ob.UpwardOutbox()
    for position in (5, 9, 7):
        outbox.credit(3, position)
    message = outbox.take(0.0)
    assert message is not None
    assert (list(message.credit_slots), list(message.credit_positions)) == ([3], [9])


def test_a_window_is_closed_once_and_a_credit_opens_it() -> None:
    """Both rows follow the submit of their slot. The later of the two holds."""
    outbox = ob.UpwardOutbox()
    outbox.close_window(3)
    outbox.close_window(3)
    assert outbox.waiting_bytes == ob.ROW_BYTES and not outbox.is_urgent
    outbox.close_window(4)
    outbox.credit(4, 9)
    outbox.credit(5, 9)
    outbox.close_window(5)
    message = outbox.take(0.0)
    assert message is not None
    assert (list(message.closed_slots), list(message.credit_slots)) == ([3, 5], [4, 5])
    outbox.close_window(6)
    outbox.cancel(6, pb.Cancel.REASON_CLIENT)
    message = outbox.take(0.0)
    assert message is not None and not message.closed_slots


def test_computed_positions_of_one_slot_merge_and_are_lazy() -> None:
    """Each slot has one row, with the last value. The writer is not woken at once."""
    outbox = ob.DownwardOutbox()
    for position in (40, 72):
        outbox.computed(3, position)
    outbox.computed(5, 33)
    assert outbox.waiting_bytes == 2 * ob.ROW_BYTES and not outbox.is_urgent
    message = outbox.take(0.0)
    assert message is not None
    assert (list(message.computed_slots), list(message.computed_positions)) == ([3, 5], [72, 33])
    assert outbox.take(0.0) is None


def test_on_ready_is_called_once_per_message() -> None:
    """The writer is woken when the outbox fills, not for each row."""
    outbox, calls = ob.DownwardOutbox(), []
    outbox.on_ready = lambda: calls.append(1)
    outbox.accept(1)
    outbox.accept(2)
    assert len(calls) == 1
    outbox.take(0.0)
    outbox.accept(3)
    assert len(calls) == 2


def test_lazy_rows_do_not_wake_the_writer_at_once() -> None:
    """A lazy row requests one later write. An urgent row after it still wakes the writer, and both leave together."""
    outbox, calls = ob.DownwardOutbox(), list[str]()
    outbox.on_ready = lambda: calls.append("now")
    outbox.on_lazy = lambda: calls.append("later")
    outbox.start(1, 5)
    outbox.transfer(1, 5)
    assert (calls, outbox.is_urgent) == (["later"], False)
    outbox.tokens(1, 0, b"1234")
    assert (calls, outbox.is_urgent) == (["later", "now"], True)
    message = outbox.take(0.0)
    assert message is not None and message.starts and message.transfers and message.frame.slots
    outbox.accept(2, urgent=False)
    assert (calls, outbox.is_urgent) == (["later", "now", "later"], False)


def test_an_outbox_that_stays_full_is_stuck() -> None:
    """A full outbox is tolerated until the time limit. Over the hard limit it is stuck at once."""
    outbox = ob.DownwardOutbox()
    chunk = b"\0" * (ob.SOFT_BYTES + 4)
    outbox.tokens(1, 0, chunk)
    assert outbox.is_full()
    assert not outbox.is_stuck(100.0)
    assert not outbox.is_stuck(100.0 + ob.STUCK_S - 0.01)
    assert outbox.is_stuck(100.0 + ob.STUCK_S)
    outbox.take(200.0)
    assert not outbox.is_stuck(200.0) and not outbox.is_full()
    for _ in range(5):
        outbox.tokens(1, 0, chunk)
    assert outbox.is_stuck(300.0)


@pytest.mark.parametrize("seed", range(50))
def test_many_waiting_prompts_leave_in_several_messages(seed: int) -> None:
    """No message is too large, and slots open in ascending order. No row is lost, repeated, or ahead of its slot."""
    draw, outbox = random.Random(seed), ob.UpwardOutbox()
    opened: list[int] = []
    credited: dict[int, int] = {}
    cancelled: set[int] = set()
    sizes = (4, 400_000, 3_000_000)
    for _ in range(draw.randint(1, 40)):
        slot = outbox.new_slot()
        opened.append(slot)
        if draw.random() < 0.3:
            outbox.adopt(pb.Adopt(slot=slot, request_id="0" * 32))
        else:
            prompt = b"\0" * draw.choice(sizes)
            outbox.submit(pb.Submit(slot=slot, request_id="0" * 32, token_ids=prompt), 5.0)
        if draw.random() < 0.3:
            credited[slot] = draw.randint(1, 99)
            outbox.credit(slot, credited[slot])
    last, seen, granted = 0, list[int](), dict[int, int]()
    while (message := outbox.take(0.0)) is not None:
        assert message.ByteSize() < ob.TAKE_BYTES + max(sizes) + 10_000
        new = sorted([row.slot for row in message.adopts] + [row.slot for row in message.submits])
        assert all(slot > last for slot in new)
        seen += new
        last = max([last, *new])
        for slot, position in zip(message.credit_slots, message.credit_positions, strict=True):
            assert slot in seen and slot not in granted
            granted[slot] = position
        assert outbox.is_urgent == bool(outbox.waiting_bytes)
        assert not outbox.is_stuck(1e6 * len(seen)), "a peer gets time to read the sent rows"
        for slot in opened:
            if slot not in seen and slot not in cancelled and draw.random() < 0.05:
                assert outbox.cancel(slot, pb.Cancel.REASON_CLIENT)
                cancelled.add(slot)
    assert seen == [slot for slot in opened if slot not in cancelled]
    assert granted == {slot: position for slot, position in credited.items() if slot not in cancelled}


def test_a_peer_that_takes_none_of_the_remaining_rows_is_stuck() -> None:
    """Many waiting rows are no fault of the peer. A message that it does not read is its fault."""
    outbox = ob.UpwardOutbox()
    for _ in range(30):
        slot = outbox.new_slot()
        outbox.submit(pb.Submit(slot=slot, token_ids=b"\0" * (1 << 20)), 5.0)
    outbox.take(0.0)
    assert outbox.waiting_bytes > ob.HARD_BYTES and not outbox.is_stuck(0.0)
    assert not outbox.is_stuck(ob.STUCK_S - 0.01)
    assert outbox.is_stuck(ob.STUCK_S)
    outbox.take(ob.STUCK_S)
    assert not outbox.is_stuck(ob.STUCK_S)


def test_contradictions_go_once_and_wake_the_writer() -> None:
    """Each is one row of the next message, even if some prompts do not fit into that message."""
    outbox, woken = ob.UpwardOutbox(), list[int]()
    outbox.on_ready = lambda: woken.append(1)
    rows = [pb.Contradiction(replica=f"decode-{number}", age_ms=number) for number in range(2)]
    for row in rows:
        outbox.contradict(row)
    for _ in range(2):
        prompt = b"\0" * ob.TAKE_BYTES
        outbox.submit(pb.Submit(slot=outbox.new_slot(), request_id="0" * 32, token_ids=prompt), 5.0)
    first, second = outbox.take(0.0), outbox.take(0.0)
    assert woken and first is not None and second is not None
    assert list(first.contradictions) == rows and not second.contradictions
    assert outbox.take(0.0) is None
