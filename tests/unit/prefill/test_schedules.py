"""The prefill core under random schedules: lost streams, cancels, deadlines, crossing attempts, seeds, faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvmesh.attach.caller_session import CallerSession
from kvmesh.attach.outbox import DownwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.triton.errors import EngineBusy, EngineError
from services.prefill.core import PrefillCore
from services.prefill.limits import PrefillLimits
from services.prefill.slot import PrefillSlot
from tests.unit.triton.fake_engine import FakeEngine, facts, next_token
from tests.unit.triton.reader import HELLO, Reader, submit

SEEDS = 60
STEPS = 300
USER, WARM_UP, PROBE = budget_pb2.PURPOSE_USER, budget_pb2.PURPOSE_WARM_UP, budget_pb2.PURPOSE_PROBE


@dataclass
class Stream:
    """One router's stream."""

    session: CallerSession[PrefillSlot]
    reader: Reader
    prompts: dict[int, list[int]]
    """Requests by slot."""
    seeds: dict[int, bytes] = field(default_factory=dict)
    """The handoff of a seed from the warm replica, by slot."""
    last: int = 0


class World:
    """A prefill core, its engine, routers that come and go, a decode that pulls, and the checks."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 100.0
        limits = PrefillLimits(
            queue_max_requests=8,
            engine_concurrency=2,
            handoff_timeout_s=1.0,
            detached_s=0.3,
            first_token_timeout_s=2.0,
        )
        self.core = PrefillCore(
            "prefill-0", facts(kv_blocks=20), limits, is_source=lambda address, _: address == "kv:1"
        )
        self.engine = FakeEngine(self.core.sink, peer=FakeEngine(self.core.sink))
        """Its peer is the engine of the warm replica, which never runs."""
        self.core.connect(self.engine)
        self.engine.report(self.now_s)
        self.streams: list[Stream] = []
        self.known: list[tuple[str, int]] = []
        self.first_tokens = self.transferred = self.seeded = 0

    def act(self) -> None:
        """Do one random thing, then check."""
        actions = (
            (self.open, 3),
            (self.cut, 1),
            (self.submit, 25),
            (self.seed, 8),
            (self.hand_over, 10),
            (self.drain, 1),
            (self.step, 25),
            (self.read, 25),
            (self.cancel, 12),
            (self.engine_fault, 2),
            (self.wait, 12),
        )
        action = self.rng.choices([one for one, _ in actions], [weight for _, weight in actions])[0]
        action()
        self.check()

    def check(self) -> None:
        """Check that the core knows everything that the engine holds."""
        self.core.assert_consistent()
        assert set(self.core.prefilling.calls) == set(self.engine.live)
        assert {slot.context_phase_params for slot in self.core.slot_table.held} >= set(self.engine.held)

    def open(self) -> None:
        """Attach a router."""
        if len(self.streams) < 3:
            outbox = DownwardOutbox()
            session = self.core.open_session(HELLO, outbox, self.now_s)
            self.streams.append(Stream(session, Reader(outbox), {}))

    def cut(self) -> None:
        """Break a stream."""
        if self.streams:
            stream = self.streams.pop(self.rng.randrange(len(self.streams)))
            stream.session.on_closed(self.now_s)

    def submit(self) -> None:
        """Submit a new request, or another attempt of a known one."""
        if not self.streams:
            return
        rng, stream = self.rng, self.rng.choice(self.streams)
        if self.known and rng.random() < 0.3:
            request_id, attempt = rng.choice(self.known)
            attempt = max(1, attempt + rng.choice((1, 1, 0, -1)))
        else:
            request_id, attempt = f"{rng.getrandbits(128):032x}", 1
        self.known.append((request_id, attempt))
        prompt = [rng.randrange(64) for _ in range(rng.randrange(1, 60))]
        stream.last += 1
        stream.prompts[stream.last] = prompt
        start = rng.randrange(len(prompt))
        stream.reader.open(stream.last, start)
        message = submit(
            stream.last,
            prompt,
            pb.PHASE_CONTEXT_ONLY,
            request_id=request_id,
            attempt=attempt,
            start=start,
            priority=rng.randrange(-2, 3),
            resumed=rng.random() < 0.2,
            shadow=rng.random() < 0.1,
            remaining_ms=rng.choice((100, 2_000, 60_000)),
            ttft_ms=rng.choice((None, 50, 1_000)),
            priority_class=rng.choice((None, 0, 4, 7)),
            tenant=rng.choice(("", "a", "b")),
            weight=rng.choice((0.0, 0.5, 2.0)),
            estimate_s=rng.choice((0.0, 0.0, 0.01, 0.5)),
            purpose=rng.choice((USER, USER, USER, WARM_UP, PROBE)),
        )
        stream.session.on_request(pb.AttachRequest(submits=[message]), self.now_s)

    def seed(self) -> None:
        """Submit a seed, sometimes with its handoff in the same message."""
        if not self.streams:
            return
        rng, stream = self.rng, self.rng.choice(self.streams)
        prompt = [rng.randrange(64) for _ in range(rng.randrange(1, 30))]
        stream.last += 1
        stream.reader.open(stream.last, 1)  # behind the token of the handoff
        remaining_ms = rng.choice((100, 2_000, 60_000))
        message = submit(
            stream.last,
            prompt,
            pb.PHASE_SEED,
            remaining_ms=remaining_ms,
            purpose=rng.choice((WARM_UP, WARM_UP, USER)),
        )
        handoff = stream.seeds[stream.last] = f"h{rng.getrandbits(64)}".encode()
        assert self.engine.peer is not None
        self.engine.peer.held[handoff] = next_token(prompt)
        rows = [self.handoff(stream, stream.last)] if rng.random() < 0.3 else []
        stream.session.on_request(pb.AttachRequest(submits=[message], handoffs=rows), self.now_s)

    def handoff(self, stream: Stream, number: int) -> pb.Handoff:
        """Return the handoff of a seed, rarely of an address that is not registered, or one that the source has lost."""
        address = "kv:1" if self.rng.random() < 0.9 else "kv:evil"
        params = stream.seeds[number] if self.rng.random() < 0.9 else b"lost"
        return pb.Handoff(slot=number, context_phase_params=params, first_token_count=1, kv_address=address)

    def hand_over(self) -> None:
        """Deliver a handoff to a seed, sometimes twice, or to a slot that waits for none."""
        for stream in self.streams:
            if stream.seeds:
                row = self.handoff(stream, self.rng.choice(list(stream.seeds)))
                stream.session.on_request(pb.AttachRequest(handoffs=[row, row]), self.now_s)

    def drain(self) -> None:
        """Begin a drain, and end it."""
        self.core.drain()
        self.wait()
        assert not any(slot.is_waiting_control() for slot in self.core.slot_table.lane)
        self.core.undrain()

    def step(self) -> None:
        """Let the engine finish some calls."""
        self.engine.step(self.now_s, chosen=lambda _: self.rng.random() < 0.7)
        self.now_s += 0.005

    def read(self) -> None:
        """Let a router read, and decode pull some of the handoffs."""
        if not self.streams:
            return
        stream = self.rng.choice(self.streams)
        stream.reader.read(self.now_s)
        for number in list(stream.seeds):
            view = stream.reader.slots[number]
            if view.is_over():
                is_seeded = view.finish is not None and view.finish.reason == pb.Finish.REASON_LENGTH
                self.seeded += is_seeded
                assert view.is_transferred or not is_seeded, view
                assert view.first is None and not view.ids, view
                del stream.seeds[number]
        for number, prompt in list(stream.prompts.items()):
            view = stream.reader.slots[number]
            if view.first is not None:
                self.first_tokens += 1
                assert view.ids == [next_token(prompt)], view
                del stream.prompts[number]
                handoff = view.first.context_phase_params
                if self.rng.random() < 0.7 and handoff in self.engine.held:
                    del self.engine.held[handoff]
                    self.transferred += 1
                    row = pb.Cancel(slot=number, reason=pb.Cancel.REASON_TRANSFERRED)
                    stream.session.on_request(pb.AttachRequest(cancels=[row]), self.now_s)
            elif view.is_over():
                del stream.prompts[number]

    def cancel(self) -> None:
        """Cancel a slot in any phase, or an unknown one."""
        if self.streams:
            stream = self.rng.choice(self.streams)
            number = self.rng.randrange(1, stream.last + 3)
            row = pb.Cancel(slot=number, reason=pb.Cancel.REASON_COMPLETE)
            stream.session.on_request(pb.AttachRequest(cancels=[row]), self.now_s)

    def engine_fault(self) -> None:
        """Fail one call, or lose the whole engine."""
        if self.rng.random() < 0.3:
            self.engine.crash(f"boot-{self.rng.random()}", self.now_s)
        elif self.engine.live:
            error = self.rng.choice((EngineError("fault"), EngineBusy("full")))
            self.engine.fail(self.rng.choice(list(self.engine.live)), error, self.now_s)

    def wait(self) -> None:
        """Let time pass, with all timers."""
        self.until(self.now_s + self.rng.choice((0.001, 0.02, 0.3)))

    def until(self, end_s: float) -> None:
        """Move the clock to `end_s`, and call the core at the times that it requests."""
        rounds = 0
        while (at_s := self.core.next_wake_s()) is not None and at_s <= end_s:
            self.now_s = max(self.now_s, at_s)
            self.core.on_timer(self.now_s)
            self.check()
            rounds += 1
            assert rounds < 10_000, "the core asks to be called without end"
        self.now_s = max(self.now_s, end_s)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_schedules_keep_the_counts_and_leak_no_handoff(seed: int) -> None:
    """Counts agree, and first tokens are right. At the end neither replica nor engine holds anything."""
    print(f"seed={seed}")
    world = World(seed)
    for _ in range(STEPS):
        world.act()
    for stream in world.streams:
        stream.reader.read(world.now_s)
        stream.session.on_closed(world.now_s)
    world.check()
    world.until(world.now_s + 2.0)
    core = world.core
    assert not core.slot_table.slots and not core.prefilling.calls and not world.engine.live
    assert core.slot_table.blocks_reserved == 0 and not len(core.slot_table.queue)
    assert not len(core.slot_table.lane) and not core.slot_table.lane.blocks
    assert not world.engine.held, "a handoff was neither pulled nor released"
    assert core.next_wake_s() is None


def test_random_schedules_reach_every_outcome() -> None:
    """First tokens come, handoffs are transferred, and seeds end well."""
    first_tokens = transferred = seeded = 0
    for seed in range(10):
        world = World(seed)
        for _ in range(STEPS):
            world.act()
        first_tokens += world.first_tokens
        transferred += world.transferred
        seeded += world.seeded
    assert first_tokens > 100 and transferred > 50 and seeded > 15, (first_tokens, transferred, seeded)
