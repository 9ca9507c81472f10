"""Every call frees its slot at any kind of end: random schedules in virtual time, on a grid so that timers coincide."""

from __future__ import annotations

import asyncio

from hypothesis import example, given
from hypothesis import strategies as st

from kvmesh import request_reader as module
from kvmesh.clock import Clock
from kvmesh.errors import MeshError
from kvmesh.request_reader import RequestReader
from tests.unit.frontend.budgets.virtual_time import VirtualLoop, simulate

TICK_S = 0.0625
TIMEOUT_TICKS = 8
CALLS_MAX = 10

CALLS = st.lists(
    st.tuples(
        st.integers(0, 4),  # ticks after the call before it
        st.sampled_from([0, 0, 1, 3, TIMEOUT_TICKS, 1_000]),  # ticks until its message arrives
        st.sampled_from([None, None, None, 0, 2, TIMEOUT_TICKS]),  # ticks until its client resets it
    ),
    max_size=60,
)
FLOOD = [(0, 1_000, None)] * CALLS_MAX + [(2, 1_000, None)] * 40
"""Silent calls at the rate at which the oldest ones expire."""


async def arrives(after_ticks: int) -> bytes:
    """Return a message after some ticks."""
    await asyncio.sleep(after_ticks * TICK_S)
    return b"x"


async def call(request_reader: RequestReader, after_ticks: int, reset_ticks: int | None) -> str:
    """Make one call and return its outcome."""
    try:
        async with asyncio.timeout(None if reset_ticks is None else reset_ticks * TICK_S):
            return repr(await request_reader.message(lambda: arrives(after_ticks), ("one",)))
    except TimeoutError:
        return "reset"
    except MeshError as error:
        return error.reason


async def schedule(steps: list[tuple[int, int, int | None]]) -> None:
    """Make all calls. Check that no state of them is left, and that messages are still read."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    clock: Clock = loop
    message_bytes_max = module.BODY_BYTES_MAX // module.READERS_MIN
    request_reader = RequestReader(
        message_bytes_max, calls_max=CALLS_MAX, timeout_s=TIMEOUT_TICKS * TICK_S, clock=clock
    )
    calls = []
    for gap_ticks, after_ticks, reset_ticks in steps:
        await asyncio.sleep(gap_ticks * TICK_S)
        calls.append(asyncio.create_task(call(request_reader, after_ticks, reset_ticks)))
    outcomes = await asyncio.gather(*calls)
    assert set(outcomes) <= {"b'x'", "reset", "CALLS_FULL", "REQUEST_TIMEOUT"}
    assert not len(request_reader.unread) and not request_reader._limits and not request_reader._waiters
    after = await asyncio.gather(*(call(request_reader, 1, None) for _ in range(module.READERS_MIN)))
    assert set(after) == {"b'x'"}


@given(CALLS)
@example(FLOOD)
def test_no_slot_leaks(steps: list[tuple[int, int, int | None]]) -> None:
    """The loop has no error, no call ends with the error of another one, and all slots are free at the end."""
    simulate(schedule(steps))
