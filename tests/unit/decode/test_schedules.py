"""The decode core under random schedules: lost streams, takeovers, cancels, deadlines, attempts, warm-up, faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvmesh.attach.caller_session import CallerSession
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.triton.errors import EngineError
from services.decode.core import DecodeCore
from services.decode.limits import DecodeLimits
from services.decode.slot import DecodeSlot, DecodeState
from tests.unit.triton.fake_engine import END_TOKEN, FakeEngine, expected, facts, next_token
from tests.unit.triton.reader import HELLO, Reader, SlotView, submit

SEEDS = 60
STEPS = 300
USER, WARM_UP, PROBE = budget_pb2.PURPOSE_USER, budget_pb2.PURPOSE_WARM_UP, budget_pb2.PURPOSE_PROBE
GENERATION, LOCAL = pb.PHASE_GENERATION_ONLY, pb.PHASE_CONTEXT_AND_GENERATION


@dataclass
class Request:
    """A request as its frontend knows it."""

    request_id: str
    prompt: list[int]
    output: list[int]
    """All tokens that it will generate."""
    attempt: int


@dataclass
class Stream:
    """One router's stream."""

    session: CallerSession[DecodeSlot]
    reader: Reader
    owner: dict[int, Request] = field(default_factory=dict)
    """Requests by slot."""
    handoffs: dict[int, bytes] = field(default_factory=dict)
    """The handoff of a slot from prefill."""
    control: set[int] = field(default_factory=set)
    """Slots of warm-up and probes."""
    last: int = 0

    def number(self) -> int:
        self.last += 1
        return self.last


class World:
    """A decode core, its engine, routers that come and go, and the checks."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 100.0
        limits = DecodeLimits(
            slots_max=8, detached_s=0.5, slow_reader_s=2.0, first_token_timeout_s=3.0, token_timeout_s=2.0
        )
        self.core = DecodeCore("decode-0", facts(), limits, lambda address, _: address == "kv:1")
        self.engine = FakeEngine(self.core.sink)
        self.core.connect(self.engine)
        self.engine.report(self.now_s)
        self.streams: list[Stream] = []
        self.requests: list[Request] = []
        self.finished = 0
        self.control_finished = 0
        self.cuts = 0
        """Slots that ended because too many windows were closed."""

    def act(self) -> None:
        """Do one random thing, then check."""
        actions = (
            (self.open, 2),
            (self.cut, 1),
            (self.submit, 14),
            (self.hand_over, 14),
            (self.step, 40),
            (self.read, 25),
            (self.cancel, 3),
            (self.credit, 12),
            (self.close_windows, 8),
            (self.adopt, 8),
            (self.engine_fault, 1),
            (self.drain, 1),
            (self.wait, 10),
        )
        action = self.rng.choices([one for one, _ in actions], [weight for _, weight in actions])[0]
        action()
        self.core.assert_consistent()
        assert set(self.core.generation.calls) == set(self.engine.live)

    def open(self) -> None:
        """Attach a router."""
        if len(self.streams) < 3:
            outbox = DownwardOutbox()
            session = self.core.open_session(HELLO, outbox, self.now_s)
            self.streams.append(Stream(session, Reader(outbox)))

    def cut(self) -> None:
        """Break a stream. The rows in its outbox are lost."""
        if self.streams:
            stream = self.streams.pop(self.rng.randrange(len(self.streams)))
            stream.session.on_closed(self.now_s)

    def submit(self) -> None:
        """Submit a new request, or a higher or an old attempt of a known one."""
        if not self.streams:
            return
        rng, stream = self.rng, self.rng.choice(self.streams)
        if self.requests and rng.random() < 0.25:
            request = rng.choice(self.requests)
            request.attempt = max(1, request.attempt + rng.choice((1, 1, 1, 0, -1)))
        else:
            prompt = [rng.randrange(64) for _ in range(rng.randrange(1, 24))]
            output = expected(prompt, rng.randrange(1, 30), END_TOKEN)
            request = Request(f"{rng.getrandbits(128):032x}", prompt, output, 1)
            self.requests.append(request)
        start = rng.randrange(len(request.output))
        known = request.prompt + request.output[:start]
        is_local = rng.random() < 0.4
        credit = rng.choice((0, start + 3, 1 << 30))
        number = stream.number()
        message = submit(
            number,
            known,
            LOCAL if is_local else GENERATION,
            request_id=request.request_id,
            attempt=request.attempt,
            start=start,
            output=len(request.output) - start,
            end_token_id=END_TOKEN,
            tenant="" if request.request_id < "8" else "a",
            credit=credit,
            remaining_ms=rng.choice((300, 5_000, 60_000)),
            ttft_ms=rng.choice((None, 200, 5_000)),
            logprobs=rng.random() < 0.3,
            resumed=start > 0,
            headroom_permille=rng.choice((0, 50, 150)),
            estimate_s=rng.choice((0.0, 0.05)),
            purpose=rng.choice((USER, USER, USER, WARM_UP, PROBE)),
        )
        if message.budget.purpose != USER:
            stream.control.add(number)
        # After a handoff the caller has the first token already, from prefill.
        stream.reader.open(number, start if is_local else start + 1, max(credit, start + 1))
        stream.owner[number] = request
        if not is_local:
            handoff = stream.handoffs[number] = f"h{rng.getrandbits(64)}".encode()
            self.engine.held[handoff] = next_token(known)
        stream.session.on_request(pb.AttachRequest(submits=[message]), self.now_s)

    def hand_over(self) -> None:
        """Deliver a handoff, sometimes twice, sometimes an unknown one."""
        for stream in self.streams:
            waiting = [
                number for number, slot in stream.session.slots.items() if slot.state is DecodeState.PENDING
            ]
            if not waiting:
                continue
            number = self.rng.choice(waiting)
            address = "kv:1" if self.rng.random() < 0.9 else "kv:evil"
            row = pb.Handoff(
                slot=number,
                context_phase_params=stream.handoffs[number],
                first_token_count=1,
                kv_address=address,
            )
            stream.session.on_request(pb.AttachRequest(handoffs=[row, row]), self.now_s)

    def step(self) -> None:
        """Let the engine make a step, or a part of one."""
        chance = self.rng.choice((1.0, 1.0, 0.5))
        tokens = self.rng.choice((1, 1, 1, 3))
        self.engine.step(self.now_s, tokens, lambda _: self.rng.random() < chance)
        self.now_s += 0.002

    def read(self) -> None:
        """Let a router read."""
        if self.streams:
            self.deliver(self.rng.choice(self.streams))

    def deliver(self, stream: Stream) -> None:
        """Read one stream, and compare the tokens of every slot with the expected ones."""
        stream.reader.read(self.now_s)
        for number, request in list(stream.owner.items()):
            view = stream.reader.slots[number]
            begin = view.next_position - len(view.ids)
            assert view.ids == request.output[begin : view.next_position], (number, request, view)
            if view.finish is not None and view.finish.reason in (
                pb.Finish.REASON_LENGTH,
                pb.Finish.REASON_END_TOKEN,
            ):
                self.finished += 1
                self.control_finished += number in stream.control
                assert view.finish.end_position == len(request.output), view
            if view.is_over():
                del stream.owner[number]

    def cancel(self) -> None:
        """Cancel a slot, or an unknown one."""
        if self.streams:
            stream = self.rng.choice(self.streams)
            number = self.rng.randrange(1, stream.last + 3)
            row = pb.Cancel(slot=number, reason=pb.Cancel.REASON_CLIENT)
            stream.session.on_request(pb.AttachRequest(cancels=[row]), self.now_s)

    def credit(self) -> None:
        """Grant a window, sometimes a lower one than before."""
        for stream in self.streams:
            for number, view in stream.reader.slots.items():
                if self.rng.random() < 0.5 and number in stream.session.slots:
                    position = view.next_position + self.rng.randrange(-2, 10)
                    view.credit = max(view.credit, position)
                    message = pb.AttachRequest(credit_slots=[number], credit_positions=[max(0, position)])
                    stream.session.on_request(message, self.now_s)

    def close_windows(self) -> None:
        """Report closed windows of some clients, also for ended slots."""
        for stream in self.streams:
            numbers = [*stream.session.slots, stream.last + 1]
            numbers = self.rng.sample(numbers, self.rng.randint(1, len(numbers)))
            closed = self.core.slot_table.closed_windows
            before = self.core.slow_reader_cuts["share"]
            stream.session.on_request(pb.AttachRequest(closed_slots=numbers), self.now_s)
            self.cuts += self.core.slow_reader_cuts["share"] - before
            assert self.core.slow_reader_cuts["share"] == before or len(closed) == closed.slots_max

    def adopt(self) -> None:
        """Take a request over, from a possible position of its frontend or from a wrong one."""
        if not self.streams or not self.requests:
            return
        rng, stream, request = self.rng, self.rng.choice(self.streams), self.rng.choice(self.requests)
        slot = self.core.slot_table.slots.get(request.request_id)
        position = rng.randrange(40)
        if slot is not None and rng.random() < 0.9:
            position = rng.randrange(slot.log.start, slot.known_position() + 1)
        credit = rng.choice((0, position + 2, 1 << 30))
        number = stream.number()
        stream.reader.open(number, position, max(credit, position))
        stream.owner[number] = request
        row = pb.Adopt(
            slot=number,
            request_id=request.request_id,
            attempt=request.attempt,
            position=position,
            credit_position=credit,
        )
        stream.session.on_request(pb.AttachRequest(adopts=[row]), self.now_s)

    def drain(self) -> None:
        """Begin a drain, and end it."""
        self.core.drain()
        self.wait()
        assert not any(slot.is_waiting() for slot in self.core.slot_table.lane)
        self.core.undrain()

    def engine_fault(self) -> None:
        """Fail one call, or lose the whole engine."""
        if self.rng.random() < 0.2:
            self.engine.crash(f"boot-{self.rng.random()}", self.now_s)
        elif self.engine.live:
            self.engine.fail(self.rng.choice(list(self.engine.live)), EngineError("fault"), self.now_s)

    def wait(self) -> None:
        """Let time pass, with all timers."""
        self.until(self.now_s + self.rng.choice((0.001, 0.005, 0.05, 0.4)))

    def until(self, end_s: float) -> None:
        """Move the clock to `end_s`, and call the core at the times that it requests."""
        rounds = 0
        while (at_s := self.core.next_wake_s()) is not None and at_s <= end_s:
            self.now_s = max(self.now_s, at_s)
            self.core.on_timer(self.now_s)
            self.core.assert_consistent()
            rounds += 1
            assert rounds < 10_000, "the core asks to be called without end"
        self.now_s = max(self.now_s, end_s)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_schedules_neither_repeat_nor_lose_nor_leak(seed: int) -> None:
    """The tokens of every slot are right, without gap or repeat. At the end no slot is held."""
    print(f"seed={seed}")
    world = World(seed)
    for _ in range(STEPS):
        world.act()
    for stream in world.streams:
        world.deliver(stream)
        stream.session.on_closed(world.now_s)
    world.core.assert_consistent()
    world.until(world.now_s + 2.0)
    core = world.core
    assert not core.slot_table.slots and not core.generation.calls and not world.engine.live
    assert core.slot_table.reservations.reserved == 0
    assert not len(core.slot_table.lane) and not core.slot_table.lane.blocks
    assert core.generation.step_batch.live_count == 0
    assert len(core.slot_table.deadline_heap) == 0
    assert core.next_wake_s() is None


def test_random_schedules_reach_every_outcome() -> None:
    """Requests finish, slots are taken over, and streams are detached and refused."""
    finished = adopted = cuts = control = 0
    for seed in range(10):
        world = World(seed)
        for _ in range(STEPS):
            world.act()
        finished += world.finished
        adopted += world.core.takeover_total
        cuts += world.cuts
        control += world.control_finished
    counts = (finished, adopted, cuts, control)
    assert finished > 50 and adopted > 20 and cuts and control > 20, counts


def test_the_reader_refuses_a_repeat() -> None:
    """The checks of this file can fail."""
    reader = Reader(DownwardOutbox())
    reader.open(1, 0)
    reader.outbox.tokens(1, 0, b"\x01\x00\x00\x00")
    reader.read(0.0)
    reader.outbox.tokens(1, 0, b"\x01\x00\x00\x00")
    with pytest.raises(AssertionError, match="was next"):
        reader.read(0.0)
    assert isinstance(reader.slots[1], SlotView)
