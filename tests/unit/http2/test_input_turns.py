"""Fair shares of the event loop: under any flood a connection with little input waits for a turn and a slice."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from kvmesh.clock import VirtualClock
from kvmesh.http2.input_turns import TURN_S, InputTurns

SLICE_S = 0.0015


class Loop:
    """An event loop by hand."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.due: list[Callable[[], None]] = []
        self.turns = InputTurns(self.clock, self.due.append)

    def turn(self) -> float:
        """Run the callbacks of a turn, and return the seconds that they took."""
        begin_s = self.clock.now_s()
        due, self.due[:] = list(self.due), []
        assert len(due) <= 1, "one callback serves all"
        for each in due:
            each()
        return self.clock.now_s() - begin_s


class Source:
    """A connection whose slices take `slice_s` seconds."""

    def __init__(self, loop: Loop, slice_s: float = SLICE_S) -> None:
        self.loop, self.slice_s = loop, slice_s
        self.is_new = True
        self.waiting: deque[float] = deque()
        """Times at which the slices arrived."""
        self.delays: list[float] = []
        self.is_held = False

    def receive(self, slices: int = 1) -> None:
        self.waiting.extend([self.loop.clock.now_s()] * slices)
        if not self.is_held:
            self.is_held = not self.loop.turns.ready(self)

    def take_slice(self) -> bool:
        self.loop.clock.advance(self.slice_s)
        self.delays.append(self.loop.clock.now_s() - self.waiting.popleft())
        return bool(self.waiting)

    def on_taken(self) -> None:
        assert self.is_held and not self.waiting
        self.is_held = False


@pytest.mark.parametrize(("flooding", "is_churning"), [(1, False), (20, False), (300, False), (50, True)])
def test_a_connection_with_little_input_waits_for_a_turn_and_a_slice(
    flooding: int, is_churning: bool
) -> None:
    """Whatever the number of floods, if it is older, and also if each turn brings new connections that flood."""
    loop = Loop()
    light = Source(loop, 0.0001)
    light.receive()
    loop.turn()
    floods = [Source(loop) for _ in range(flooding)]
    for turn in range(400):
        if is_churning:
            floods = [Source(loop) for _ in range(flooding)]
        for each in floods:
            each.receive(20)
        if turn % 3 == 0:
            light.receive()
        assert loop.turn() < TURN_S + 2 * SLICE_S
    assert len(light.delays) > 130 and max(light.delays) < 2 * (TURN_S + 2 * SLICE_S)


@pytest.mark.parametrize("seed", range(20))
def test_each_schedule_serves_all_input_in_bounded_turns(seed: int) -> None:
    """Nothing is left, a connection is told once that its input is taken, and no callback runs without input."""
    chance, loop = random.Random(seed), Loop()
    sources = [Source(loop, chance.choice((0.0, 0.0002, SLICE_S))) for _ in range(10)]
    for _ in range(100):
        begin_s = loop.clock.now_s()
        for each in chance.sample(sources, chance.randrange(4)):
            each.receive(chance.randrange(1, 30))
        loop.turn()
        assert loop.clock.now_s() - begin_s < 2 * TURN_S + 3 * SLICE_S, (
            "the time of a turn is that of all sources"
        )
    while loop.due:
        loop.turn()
    assert not any(each.waiting or each.is_held for each in sources)


@pytest.mark.parametrize("is_first_alone", [True, False])
def test_a_flood_of_old_connections_goes_ahead_for_one_slice(is_first_alone: bool) -> None:
    """Behind it they are as other floods, also one that was alone at first."""
    loop = Loop()
    light, *floods = (Source(loop, slice_s) for slice_s in (0.0001, *([SLICE_S] * 20)))
    for each in (light, *floods):
        each.is_new = False
    if is_first_alone:
        floods[0].receive(1_000)
        light.receive()
        loop.turn()
        assert light.delays[0] < TURN_S + 2 * SLICE_S
    for each in floods:
        each.receive(1_000)
    while any(len(each.waiting) == 1_000 for each in floods):
        loop.turn()
    light.delays.clear()
    for _ in range(50):
        light.receive()
        loop.turn()
    assert len(light.delays) == 50 and max(light.delays) < 0.001


def test_floods_share_the_time() -> None:
    """Each has the same number of slices, also one that worked for long alone."""
    loop = Loop()
    old = Source(loop)
    for _ in range(200):
        old.receive(1)
        loop.turn()
    floods = [old, *(Source(loop) for _ in range(4))]
    for each in floods:
        each.receive(100)
    for _ in range(100):
        loop.turn()
    left = [len(each.waiting) for each in floods]
    assert min(left) > 0 and max(left) - min(left) <= 2, left


def test_light_connections_do_not_starve_a_flood() -> None:
    """Connections of the first line that fill each turn leave a slice of it."""
    loop = Loop()
    lights, flood = [Source(loop) for _ in range(10)], Source(loop)
    for each in lights:
        each.is_new = False
    flood.receive(20)
    for _ in range(21):
        for each in lights:
            if not each.is_held:
                each.receive()
        loop.turn()
    assert not flood.waiting


def test_a_bug_met_by_one_connection_does_not_hold_the_others() -> None:
    loop = Loop()
    first, *others = [Source(loop) for _ in range(4)]
    for source in (first, *others):
        source.receive(6)
    first.waiting.clear()  # its next slice raises
    with pytest.raises(IndexError):
        for _ in range(20):
            loop.turn()
    for _ in range(20):
        loop.turn()
    assert not any(source.is_held for source in others)
