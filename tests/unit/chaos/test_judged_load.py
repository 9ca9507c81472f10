"""The steady load: it finds each wrong answer, and knows the pools of each session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.chaos.judged_load import SESSIONS, JudgedLoad, Requests
from tests.chaos.plan import Stream
from tests.chaos.records import COMPLETE, FAILED, Seen
from tests.chaos.truth import Truth

SALT = "salt"
CONTEXT = 1024


@pytest.fixture(scope="module")
def requests() -> Requests:
    """The requests of all sessions."""
    return Requests(SALT, CONTEXT)


class Right:
    """A reader that answers as the mesh should; `spoil` changes an answer."""

    def __init__(self, spoil: Callable[[Seen], None] = lambda _: None) -> None:
        self._truth = Truth(SALT, CONTEXT)
        self._spoil = spoil

    async def read(self, stream: Stream, seen: Seen, now: Callable[[], float]) -> None:
        """See Reader."""
        await asyncio.sleep(0)
        seen.ids, seen.pool, seen.end = self._truth.tokens(stream), "stable", COMPLETE
        self._spoil(seen)


async def load_of(requests: Requests, reader: Right, count: int) -> JudgedLoad:
    """Return a load with at least `count` answers."""
    ticks = iter(range(10_000_000))
    async with JudgedLoad(requests, reader, lambda: float(next(ticks))).running() as load:
        await load.more(count)
    return load


async def test_right_answers_have_no_fault_and_sessions_take_turns(requests: Requests) -> None:
    """Every session is seen, and its pool is known."""
    load = await load_of(requests, Right(), SESSIONS)
    assert load.faults(load.seen) == []
    assert all(pools == {"stable"} for pools in load.pools(load.seen).values())
    assert len(load.pools(load.seen)) == SESSIONS


def lose_last(seen: Seen) -> None:
    seen.ids = seen.ids[:-1]


def change_first(seen: Seen) -> None:
    seen.ids = [seen.ids[0] + 1, *seen.ids[1:]]


def add_one(seen: Seen) -> None:
    seen.ids = [*seen.ids, 5]


def break_off(seen: Seen) -> None:
    seen.ids, seen.end, seen.code = seen.ids[:3], FAILED, "UNAVAILABLE"


def break_rule(seen: Seen) -> None:
    seen.broken_rules.append("started twice")


@pytest.mark.parametrize("spoil", [lose_last, change_first, add_one, break_off, break_rule])
async def test_each_wrong_answer_is_found(requests: Requests, spoil: Callable[[Seen], None]) -> None:
    """A lost, changed or additional token, an early end, a broken rule: each answer is a fault."""
    load = await load_of(requests, Right(spoil), 8)
    assert len(load.faults(load.seen)) == len(load.seen) >= 8
