"""The experiment: 16 streams at once, one of four workers killed with SIGKILL and started again on its address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from bench.peers.streams import Fault, Figures, Outcome, Stream, figures, readmitted_s
from bench.results import BenchError

WARM_S_MAX = 60.0
RETRY_S = 0.05
"""Pause of a client after a failure."""
LOOK_S = 0.05
MIDDLE_S_MAX = 5.0
"""Longest wait for a moment at which every client is in the middle of a stream."""
MARGIN_TOKENS = 8
"""A stream with fewer tokens left may have left the worker already, if router or client lag behind."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The events of a run. Seconds on the run's clock, 0 at the start of the load."""

    streams: int = 16
    prompt_words: int = 40
    tokens: int = 32
    interval_s: float = 0.02
    """Between two tokens of a stream at the worker."""
    kill_s: float = 2.0
    """Earliest time of the kill. It waits up to MIDDLE_S_MAX for every client to be in the middle of a stream."""
    down_s: float = 3.0
    """From the kill until the worker is started again."""
    watch_s: float = 9.0
    """Least time of load after the returned worker is ready."""


class System(Protocol):
    """A system under test: four workers and all processes before them. Fresh for every run."""

    workers: frozenset[str]
    victim: str
    returned: str
    """Name of the victim after its return; may be the same name."""

    async def start(self) -> None:
        """Start all processes and return when they should serve."""
        ...

    async def stream(self, slot: int, record: Stream, began_s: float) -> None:
        """Send the next request of client `slot` and read it to its end, all into `record`.

        `began_s`: the loop's time at 0 of the run's clock. Errors of the system are part of `record`.
        """
        ...

    def prepare_kill(self) -> Callable[[], None]:
        """Return a call that kills the victim with SIGKILL without delay."""
        ...

    async def start_again(self) -> None:
        """Start the victim again and return when it could serve."""
        ...

    async def close(self, streams: list[Stream]) -> None:
        """Close the clients, and complete the checks of `streams` that are too slow under load."""
        ...


async def run(system: System, schedule: Schedule, horizon_s: float, say: Callable[[str], None]) -> Figures:
    """Run the schedule once. Raises BenchError if the system does not serve.

    The load goes on for `watch_s` after the returned worker is ready. It then goes on until that worker has served a new
    request, but not past `horizon_s` on the run's clock.
    """
    say("starts")
    await system.start()
    say("warms up")
    await _warm(system, schedule)
    load = _Load(system, schedule)
    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(load.client(slot)) for slot in range(schedule.streams)]
        try:
            fault = await _break(system, schedule, load, say)
            end_s = fault.ready_s + schedule.watch_s
            say("watches the returned worker")
            while load.now_s() < end_s or (
                load.now_s() < horizon_s and readmitted_s(load.streams, fault) is None
            ):
                await asyncio.sleep(LOOK_S)
        except BaseException:
            for client in clients:
                client.cancel()
            raise
        watched_until_s = load.now_s()
        load.stop()
    await system.close(load.streams)
    return figures(load.streams, fault, watched_until_s)


class _Load:
    """Closed-loop load: each client sends its next request when the last one has ended."""

    def __init__(self, system: System, schedule: Schedule) -> None:
        self.streams: list[Stream] = []
        self._live: dict[int, Stream] = {}
        self._system = system
        self._schedule = schedule
        self._is_on = True
        self._now = asyncio.get_running_loop().time
        self._began_s = self._now()

    def now_s(self) -> float:
        """Return the time on the run's clock."""
        return self._now() - self._began_s

    def is_in_the_middle(self) -> bool:
        """True if every client has a stream with a first token and more than MARGIN_TOKENS left."""
        middle = range(1, self._schedule.tokens - MARGIN_TOKENS + 1)
        return len(self._live) == self._schedule.streams and all(
            stream.outcome is None and stream.token_count in middle for stream in self._live.values()
        )

    def stop(self) -> None:
        """Let the clients end after their present streams."""
        self._is_on = False

    async def client(self, slot: int) -> None:
        """Send requests until `stop`. Clients begin at different times, so a fault meets streams of different ages."""
        half_stream_s = self._schedule.tokens * self._schedule.interval_s / 2
        await asyncio.sleep(half_stream_s * slot / self._schedule.streams)
        while self._is_on:
            stream = self._live[slot] = Stream(self.now_s())
            await self._system.stream(slot, stream, self._began_s)
            self.streams.append(stream)
            if stream.outcome is not Outcome.DONE:
                await asyncio.sleep(RETRY_S)


async def _warm(system: System, schedule: Schedule) -> None:
    """Return when every worker has served."""
    load = _Load(system, schedule)
    async with asyncio.TaskGroup() as group:
        for slot in range(schedule.streams):
            group.create_task(load.client(slot))
        while load.now_s() < WARM_S_MAX and not _have_served(load.streams, system.workers):
            await asyncio.sleep(LOOK_S)
        load.stop()
    if not _have_served(load.streams, system.workers):
        seen = sorted({f"{stream.outcome} {stream.detail} {stream.workers}" for stream in load.streams})
        raise BenchError(f"not every worker served within {WARM_S_MAX:g} s; streams ended: {seen[:6]}")


def _have_served(streams: list[Stream], workers: frozenset[str]) -> bool:
    return workers <= {
        name for stream in streams if stream.outcome is Outcome.DONE for name in stream.workers
    }


async def _break(system: System, schedule: Schedule, load: _Load, say: Callable[[str], None]) -> Fault:
    await asyncio.sleep(schedule.kill_s - load.now_s())
    say("kills a worker")
    kill = system.prepare_kill()
    latest_s = schedule.kill_s + MIDDLE_S_MAX
    while not load.is_in_the_middle() and load.now_s() < latest_s:
        await asyncio.sleep(LOOK_S / 10)
    kill()
    killed_s = load.now_s()
    await asyncio.sleep(schedule.down_s)
    say("starts it again")
    started_s = load.now_s()
    await system.start_again()
    return Fault(system.victim, system.returned, killed_s, started_s, load.now_s())
