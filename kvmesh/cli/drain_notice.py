"""The screen during a stop: the processes that it waits for, their live requests, and the longest time left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from rich.console import Console

from kvmesh.cli.supervisor import Supervisor, Wait

QUIET_S: Final = 1.0
"""A process that stops within this time is not mentioned."""

AGAIN_S: Final = 10.0
"""Time until the same processes are mentioned again, with their present numbers of requests."""

COUNT_S: Final = 1.0
"""Longest count of live requests."""

CountLive = Callable[[], Awaitable[Mapping[str, int]]]
"""Returns the live requests of each process that answers, by name."""


async def stop_and_tell(supervisor: Supervisor, count_live: CountLive, console: Console) -> None:
    """Stop all processes, as `Supervisor.stop`. Print what the stop waits for if it takes longer than QUIET_S."""
    stopping = asyncio.ensure_future(supervisor.stop())
    told, told_s = frozenset[str](), float("-inf")
    try:
        while not (await asyncio.wait((stopping,), timeout=QUIET_S))[0]:
            now_s = asyncio.get_running_loop().time()
            waits = [each for each in supervisor.waits() if each.since_s >= QUIET_S]
            names = frozenset(each.name for each in waits)
            if names - told or (names and now_s >= told_s + AGAIN_S):
                told, told_s = names, now_s
                _print(sentence(waits, await _counted(count_live)), console)
    finally:
        await stopping


def sentence(waits: Sequence[Wait], live: Mapping[str, int]) -> str:
    """Return what the stop waits for. `live`: requests by process; a process that did not answer is left out."""
    names = ", ".join(f"{each.name}{_requests(live.get(each.name))}" for each in waits)
    left_s = max(each.left_s for each in waits)
    return f"Draining: waiting up to {max(1.0, left_s):.0f} s for {names}. Ctrl-C now ends at once."


def _requests(count: int | None) -> str:
    if count is None:
        return ""
    return f" ({'no' if count == 0 else count} live request{'' if count == 1 else 's'})"


async def _counted(count_live: CountLive) -> Mapping[str, int]:
    """Return the live requests by process; none if the count takes too long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(COUNT_S):
            return await count_live()
    return {}


def _print(text: str, console: Console) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
