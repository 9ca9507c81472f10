"""The state machine of a step stream, beside a model of the engine: random schedules, and each kind of bad row."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvmesh.triton.errors import CallError, EngineBusy, EngineError, EngineLost, EngineStalled
from kvmesh.triton.port import CallKind, EngineCall
from kvmesh.triton.step_frames import ErrorRow, FinalRow, FirstRow, StepFrame, TokenRow
from kvmesh.triton.step_slots import CLOSING_S, HELD_FRAMES_MAX, StepSlots
from tests.unit.triton.contract import Recorder

TOKENS = 6


def frame(
    number: int,
    *,
    tokens: list[TokenRow] | None = None,
    first: list[FirstRow] | None = None,
    final: list[FinalRow] | None = None,
    errors: list[ErrorRow] | None = None,
) -> StepFrame:
    return StepFrame(number, False, first or [], tokens or [], final or [], errors or [])


def row(slot: int, position: int, *ids: int) -> TokenRow:
    return TokenRow(slot, position, ids, (), b"")


def call(name: str, timeout_s: float = 60.0) -> EngineCall:
    return EngineCall(CallKind.CONTEXT_AND_GENERATION, name, bytes(4), TOKENS, timeout_s=timeout_s)


class Rig:
    """A machine, its sink, and what it asks its shell for."""

    def __init__(self) -> None:
        self.sink = Recorder()
        self.cancelled: list[int] = []
        self.released: list[bytes] = []
        self.slots = StepSlots(self.sink, self.cancelled.append, self.released.append)


class Engine:
    """The engine's end of a step stream: makes frames, and frees a slot with its final row."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.made: dict[int, int] = {}
        """Tokens that were made, by open slot."""
        self.cancelled: set[int] = set()
        self.handoffs: dict[bytes, int] = {}
        self.number = 0

    def step(self) -> StepFrame:
        """Return the next frame: tokens of most slots, and ends."""
        self.number += 1
        made = frame(self.number)
        for slot in list(self.made):
            if slot in self.cancelled and self.chance.random() < 0.7:
                made.final.append(FinalRow(slot, False))
                del self.made[slot]
                continue
            if self.chance.random() < 0.3:
                continue
            at = self.made[slot]
            if not at:
                handoff = b"%d" % slot if self.chance.random() < 0.5 else b""
                if handoff:
                    self.handoffs[handoff] = slot
                made.first.append(FirstRow(slot, 0, handoff))
            count = min(TOKENS - at, self.chance.choice((1, 1, 1, 3)))
            made.tokens.append(row(slot, at, *(slot * 100 + at + one for one in range(count))))
            self.made[slot] = at + count
            if self.chance.random() < 0.05:
                made.errors.append(ErrorRow(slot, "engine fault: injected"))
                del self.made[slot]
            elif at + count == TOKENS:
                made.final.append(FinalRow(slot, True))
                del self.made[slot]
        return made


def test_random_schedules_keep_every_call_whole() -> None:
    """Submits, cancels, losses, renewals with overtaking and repeated frames, refusals: each call has one end or was
    cancelled, its tokens are those of the engine, no slot is left on either side, and each handoff has one owner.
    """
    for seed in range(60):
        run_schedule(random.Random(seed))


def run_schedule(chance: random.Random) -> None:
    rig, engine, now_s = Rig(), Engine(chance), 0.0
    slots, on_way, live, gone = rig.slots, list[StepFrame](), dict[int, int](), set[int]()
    slot_of: dict[int, int] = {}

    def deliver(one: StepFrame) -> None:
        slots.take(one, now_s)
        for _ in range(chance.random() < 0.1):
            slots.take(one, now_s)

    for call_id in range(1, 80):
        now_s += 0.01
        action = chance.random()
        if action < 0.5:
            number = slots.submit(call_id, call(f"r{call_id}"), now_s)
            slot_of[call_id] = number
            if chance.random() < 0.1:
                assert slots.refuse(f"r{call_id}", EngineBusy("full"), now_s)
            else:
                engine.made[number] = 0
                live[call_id] = number
        elif action < 0.65 and live:
            gone_id = chance.choice(list(live))
            slot = slots.cancel(gone_id, now_s)
            if slot is not None:
                gone.add(gone_id)
                engine.cancelled.add(slot)
        elif action < 0.68:
            slots.lose(EngineLost("lost"), now_s)
            engine.made.clear()
            engine.number, on_way = 0, []
            engine.handoffs.clear()
        on_way += [engine.step() for _ in range(chance.randrange(3))]
        if chance.random() < 0.3:  # two requests of a renewed stream
            chance.shuffle(on_way)
        while on_way and chance.random() < 0.8:
            deliver(on_way.pop(0))
        slots.assert_consistent()
        engine.cancelled |= set(rig.cancelled)
    while engine.made or on_way:
        if engine.made:
            on_way.append(engine.step())
        deliver(on_way.pop(0))
    slots.assert_consistent()
    assert not len(slots), slots
    for call_id, number in slot_of.items():
        heard = rig.sink.heard(call_id)
        assert heard.is_over() != (call_id in gone), (call_id, heard)
        assert heard.ids == [number * 100 + at for at in range(len(heard.ids))]
        if heard.events[-1:] == ["end"]:
            assert len(heard.ids) == TOKENS
    kept = {heard.first.context_phase_params for heard in rig.sink.calls.values() if heard.first is not None}
    for handoff in engine.handoffs:
        assert (handoff in kept) + rig.released.count(handoff) == 1


def opened(rig: Rig, *names: str) -> list[int]:
    """Submit calls with ids 1, 2 and so on, and give each a first token."""
    numbers = [rig.slots.submit(index, call(name), 0.0) for index, name in enumerate(names, 1)]
    rig.slots.take(frame(1, tokens=[row(number, 0, 7) for number in numbers]), 0.0)
    return numbers


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (lambda slot: row(slot, 2, 8), "position 2: allowed are 0..1"),
        (lambda slot: row(slot, 1), "row of 0 tokens: allowed are 1 or more"),
    ],
    ids=["gap", "empty"],
)
def test_a_bad_row_fails_its_call_alone(bad: Callable[[int], TokenRow], text: str) -> None:
    """A gap and an empty row fail the call with a typed error, the engine is told, and the other slot goes on."""
    rig = Rig()
    first, second = opened(rig, "a", "b")
    rig.slots.take(frame(2, tokens=[bad(first), row(second, 1, 9)]), 0.0)
    error = rig.sink.heard(1).error
    assert type(error) is EngineError and text in str(error)
    assert rig.cancelled == [first]
    assert rig.sink.heard(2).ids == [7, 9]
    rig.slots.take(frame(3, tokens=[row(first, 2, 8)], final=[FinalRow(first, False)]), 0.0)
    assert len(rig.slots) == 1 and rig.sink.heard(1).events[-1] == "error"


def test_what_is_known_is_dropped() -> None:
    """Tokens behind the position, in part or in whole, a second first row and a second end change nothing."""
    rig = Rig()
    (slot,) = opened(rig, "a")
    rows = [row(slot, 0, 7), row(slot, 0, 7, 8, 9), row(slot, 1, 8, 9)]
    rig.slots.take(frame(2, first=[FirstRow(slot, 5, b"late")], tokens=rows), 0.0)
    assert rig.sink.heard(1).ids == [7, 8, 9]
    rig.slots.take(frame(3, final=[FinalRow(slot, True), FinalRow(slot, True)]), 0.0)
    rig.slots.take(frame(4, tokens=[row(slot, 3, 1)], final=[FinalRow(slot, True)]), 0.0)
    assert rig.sink.heard(1).events == ["first", "tokens", "tokens", "end"]


def test_unknown_slots_are_ignored() -> None:
    """Rows of slots that were never opened, or have ended, touch no other call."""
    rig = Rig()
    (slot,) = opened(rig, "a")
    rows = frame(
        2,
        first=[FirstRow(99, 0, b"x")],
        tokens=[row(99, 0, 1), row(slot, 1, 8)],
        final=[FinalRow(99, True)],
        errors=[ErrorRow(98, "engine fault: none")],
    )
    rig.slots.take(rows, 0.0)
    assert rig.sink.heard(1).ids == [7, 8] and set(rig.sink.calls) == {1}
    assert not rig.released and not rig.cancelled


def test_a_frame_waits_for_its_predecessors_up_to_a_limit() -> None:
    """Frames that overtake a missing one are held in their order. Too many held frames end the stream."""
    rig = Rig()
    (slot,) = opened(rig, "a")
    rig.slots.take(frame(3, tokens=[row(slot, 2, 9)]), 0.0)
    assert rig.sink.heard(1).ids == [7]
    rig.slots.take(frame(2, tokens=[row(slot, 1, 8)]), 0.0)
    assert rig.sink.heard(1).ids == [7, 8, 9]
    with pytest.raises(EngineError, match="step frame 4 is missing"):
        for number in range(5, 6 + HELD_FRAMES_MAX):
            rig.slots.take(frame(number), 0.0)


def test_deadlines_end_calls_and_closing_slots() -> None:
    """A call fails at its timeout. A closing slot whose end never comes is given up after CLOSING_S."""
    rig = Rig()
    rig.slots.submit(1, call("a", timeout_s=10.0), 0.0)
    rig.slots.submit(2, call("b"), 0.0)
    rig.slots.cancel(2, 1.0)
    assert rig.slots.next_wake_s() == 1.0 + CLOSING_S
    rig.slots.expire(1.0 + CLOSING_S)
    assert len(rig.slots) == 1 and not rig.sink.heard(2).events
    rig.slots.expire(10.0)
    assert isinstance(rig.sink.heard(1).error, EngineStalled) and rig.cancelled == [1]
    rig.slots.expire(10.0 + CLOSING_S)
    assert not len(rig.slots) and rig.slots.next_wake_s() is None


def test_a_call_that_the_sink_cancels_at_its_first_event_gets_no_tokens() -> None:
    """The sink may end a call from inside an event, and start others."""
    rig = Rig()
    slot = rig.slots.submit(1, call("a"), 0.0)

    def end(*_: object) -> None:
        rig.slots.cancel(1, 0.0)
        rig.slots.submit(2, call("b"), 0.0)

    rig.sink.on_first = end  # type: ignore[method-assign,assignment]
    rig.slots.take(frame(1, tokens=[row(slot, 0, 7)]), 0.0)
    assert not rig.sink.heard(1).ids
    rig.slots.assert_consistent()


@pytest.mark.parametrize("error", [EngineLost("gone"), EngineError("torn")], ids=["lost", "torn"])
def test_a_lost_stream_ends_every_call_once(error: CallError) -> None:
    """All calls fail with the error of the stream; a cancelled one hears nothing, and its id is told with the others."""
    rig = Rig()
    opened(rig, "a", "b")
    rig.slots.cancel(2, 0.0)
    assert rig.slots.lose(error, 0.0) == ["a", "b"]
    assert rig.sink.heard(1).error is error and rig.sink.heard(2).events == ["first", "tokens"]
    late = rig.slots.submit(3, call("c"), 0.0)
    rig.slots.take(frame(1, tokens=[row(late, 0, 5)]), 0.0)
    assert rig.sink.heard(3).ids == [5]
