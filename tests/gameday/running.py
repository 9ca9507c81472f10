"""One run of a game day: the regions, their clients, the event and its healing, and the record of it all."""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from bench.results import BenchError
from kvmesh.regions.plan import utilisation
from tests.chaos import machine
from tests.chaos.cpu import CpuShare, Lateness
from tests.gameday import calls, drawing
from tests.gameday.bins import binned
from tests.gameday.calls import Call
from tests.gameday.conversations import Conversation, Demand, cost_of
from tests.gameday.day import GameDay, OrderRefused, new_day
from tests.gameday.events import PLAN, SIXTY, Act
from tests.gameday.playing import Play
from tests.gameday.records import Capacity, Record, Times
from tests.gameday.runs import Run
from tests.gameday.shapes import EQUAL, REGIONS, USERS, Shape
from tests.gameday.views import Watcher
from tests.integration.containers.station import OUT, Station

WARM_S: Final = 20.0
"""From the first conversation to the steady state: some of them have ended by then."""

STEADY_S: Final = 20.0
"""Undisturbed time before the event."""

BUSY_MAX: Final = 0.85
"""Share of busy core time above which the machine is saturated."""

LATE_S_MAX: Final = 0.5
"""Delay of an event loop above which the machine is saturated."""

HEAL_S_MAX: Final = 120.0
PLAY_S_MAX: Final = 900.0
SEEDED: Final = 1.0
"""Share of hot prefixes that a survivor has, in the planned load."""

UTILISATION_MAX: Final = 0.8
"""Utilisation of a survivor, in the planned load."""

SIXTY_LOAD: Final = 0.6
LANES: Final = 16
"""Conversations at once in the measurement of a capacity: the queue delay of all stays below its limit."""

PRESS_WARM_S: Final = 12.0
PRESS_S: Final = 30.0
PRESS_CONVERSATIONS: Final = 160

Say = Callable[[str], None]


def load_of(load: str, regions: int, hit_ratio: float) -> float:
    """Return the utilisation of each region at a load. Raises BenchError."""
    if load == PLAN:
        return utilisation(regions, hit_ratio, SEEDED, UTILISATION_MAX)
    if load == SIXTY:
        return SIXTY_LOAD
    raise BenchError(f'load "{load}" is unknown: allowed are {PLAN} and {SIXTY}')


@dataclass(slots=True)
class Clients:
    """The clients in a station: their files, and their program."""

    station: Station
    folder: Path
    """The station's folder on this machine."""
    playing: asyncio.Task[str] | None = None
    late_s: float = 0.0

    async def start(self, play: Play, timeout_s: float) -> None:
        """Start the program."""
        (self.folder / "stop").unlink(missing_ok=True)
        (self.folder / "plan.json").write_bytes(msgspec.json.encode(play))
        program = ("python", "-m", "tests.gameday.playing", f"{OUT}/plan.json")
        self.playing = asyncio.create_task(self.station.run(*program, timeout_s=timeout_s))

    async def stop(self) -> list[Call]:
        """End the load, and return all calls when the open turns have ended. Raises AssertionError with its output."""
        assert self.playing is not None, "the clients were not started"
        (self.folder / "stop").touch()
        await self.playing
        self.late_s = float((self.folder / "calls.late").read_text(encoding="ascii"))
        return calls.read(self.folder / "calls.jsonl")

    async def until(self, at_s: float) -> None:
        """Wait until a time of the monotonic clock. Raises AssertionError if the program ends before it."""
        assert self.playing is not None, "the clients were not started"
        done, _ = await asyncio.wait({self.playing}, timeout=max(0.0, at_s - time.monotonic()))
        if done:
            raise BenchError(f"the clients ended early: {self.playing.result()[-2000:]}")


def play_of(
    day: GameDay, begin_s: float, conversations: Sequence[Conversation], **options: int | bool
) -> Play:
    """Return the file of a station that plays conversations. `options`: further fields of Play."""
    return Play(
        frontends={name: tuple(day.mesh.frontends(name)) for name in day.mesh.regions},
        begin_s=begin_s,
        calls=f"{OUT}/calls.jsonl",
        stop=f"{OUT}/stop",
        conversations=tuple(conversations),
        **options,  # type: ignore[arg-type]  # two optional fields
    )


async def measure_capacity(folder: Path, tag: str, say: Say) -> Capacity:
    """Load one region of 1 + 1, alone, with more than it can take. Raises BenchError and AssertionError."""
    say("draws conversations")
    home, versions = REGIONS[0], [EQUAL.version(REGIONS[0])]
    truths = drawing.truths_of(versions)
    conversations = [
        await asyncio.to_thread(
            drawing.conversation, number, 0.0, home, versions, truths, "capacity", kind=USERS
        )
        for number in range(PRESS_CONVERSATIONS)
    ]
    day = new_day(EQUAL, (home,), folder, tag)
    try:
        say("starts a region")
        await day.mesh.start()
        clients = Clients(await day.mesh.station(), day.mesh.folder / "stations")
        say("measures the capacity")
        begin_s = time.monotonic() + 1.0
        await clients.start(play_of(day, begin_s, conversations, is_pressed=True, lanes=LANES), 300.0)
        await clients.until(begin_s + PRESS_WARM_S)
        cpu = CpuShare()
        await clients.until(begin_s + PRESS_WARM_S + PRESS_S)
        busy = cpu.share()
        found = await clients.stop()
    finally:
        await asyncio.shield(day.mesh.stop())
    return capacity_of(found, begin_s + PRESS_WARM_S, PRESS_S, busy=busy, late_s=clients.late_s)


def capacity_of(
    found: Sequence[Call], from_s: float, for_s: float, *, busy: float = 0.0, late_s: float = 0.0
) -> Capacity:
    """Return the capacity from the good calls that ended within a time. Raises BenchError without one."""
    good = [call for call in found if call.outcome == calls.GOOD and from_s <= call.ended_s < from_s + for_s]
    prompts = sum(call.prompt_tokens for call in good)
    if not prompts:
        reasons = {call.reason for call in found}
        raise BenchError(f"no good call of {len(found)} ended in the measured time; reasons: {reasons}")
    uncached = prompts - sum(call.cached_tokens for call in good)
    return Capacity(
        requests_per_s=round(len(good) / for_s, 3),
        tokens_per_s=round(uncached / for_s, 1),
        hit_ratio=round(1.0 - uncached / prompts, 4),
        commit=machine.commit(),
        cpu=machine.about(),
        busy=round(busy, 3),
        late_s=round(late_s, 3),
    )


def capacities_of(shape: Shape, regions: Sequence[str], capacity: Capacity) -> dict[str, float]:
    """Return the uncached tokens per second of each region: its prefill replicas limit it."""
    return {name: shape.replicas_of(name)[0] * capacity.tokens_per_s for name in regions}


@dataclass(slots=True)
class _Course:
    """What a run observed."""

    times: Times
    struck_s: float
    """Begin of the event on the monotonic clock."""
    watcher: Watcher
    found: list[Call]
    busy: float
    late_s: float
    settled: int | None


async def perform(run: Run, capacity: Capacity, folder: Path, tag: str, say: Say) -> Record:
    """Make one run. `folder`: evidence. Raises BenchError and AssertionError."""
    began, began_s = dt.datetime.now(dt.UTC), time.monotonic()
    event, regions = run.event, REGIONS[: run.regions]
    share = load_of(run.load, run.regions, capacity.hit_ratio)
    capacities = capacities_of(event.shape, regions, capacity)
    say("draws conversations")
    conversations = await asyncio.to_thread(_conversations, run, regions, share, capacities)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    day = new_day(event.shape, regions, folder, tag)
    try:
        say("starts the regions")
        await day.mesh.start()
        say("waits for the federation")
        await day.federated()
        seen = await _course(run, day, conversations, say)
    finally:
        say("stops the regions")
        await asyncio.shield(day.mesh.stop())
    problems = []
    if seen.busy > BUSY_MAX:
        problems.append(f"the machine was saturated: {seen.busy:.0%} busy, at most {BUSY_MAX:.0%} allowed")
    if seen.late_s > LATE_S_MAX:
        problems.append(
            f"the machine was saturated: {seen.late_s:.2f} s late, at most {LATE_S_MAX:g} s allowed"
        )
    return Record(
        event=event.name,
        load=run.load,
        regions=regions,
        number=run.number,
        commit=machine.commit(),
        cpu=machine.about(),
        began=began.isoformat(timespec="seconds"),
        took_s=round(time.monotonic() - began_s, 1),
        capacity=capacity,
        utilisation=round(share, 3),
        capacities=capacities,
        times=seen.times,
        bins=tuple(binned(seen.found, seen.struck_s)),
        views=tuple(seen.watcher.views(seen.struck_s)),
        busy=round(seen.busy, 3),
        late_s=round(seen.late_s, 3),
        settled=seen.settled,
        cost=calls.cost_of(seen.found),
        problems=tuple(problems),
        notes=tuple(day.notes),
    )


def _conversations(
    run: Run, regions: Sequence[str], share: float, capacities: dict[str, float]
) -> list[Conversation]:
    """Draw the conversations of a run. The same run has the same ones."""
    event, seed = run.event, f"{run.event.name}/{run.load}/{run.regions}/{run.number}"
    versions = {name: event.shape.version(name) for name in regions}
    every = list(dict.fromkeys(versions.values()))
    truths = drawing.truths_of(every)
    sample = [
        drawing.conversation(number, 0.0, regions[0], every[:1], truths, f"{seed}/sample")
        for number in range(100)
    ]
    turn_tokens, _ = cost_of(sample)
    begin_s = WARM_S + STEADY_S
    demands = []
    for name in regions:
        per_s = share * capacities[name] / turn_tokens / drawing.TURNS
        demands.append(Demand(name, per_s))
        if name == regions[0] and event.surge != 1.0:
            demands.append(Demand(name, per_s * event.surge, begin_s))
            demands.append(Demand(name, per_s, begin_s + event.fault_s))
    until_s = begin_s + event.fault_s + event.after_s + HEAL_S_MAX
    found = drawing.arrivals(demands, until_s, random.Random(seed))
    made = []
    for number, (at_s, home) in enumerate(found):
        own = sorted(every, key=lambda each, home=home: each != versions[home])  # type: ignore[misc]  # mypy infers no lambda with defaults
        made.append(drawing.conversation(number, at_s, home, own, truths, seed))
    return made


async def _course(run: Run, day: GameDay, conversations: Sequence[Conversation], say: Say) -> _Course:
    event, watcher, lateness = run.event, Watcher(day.controls), Lateness()
    clients = Clients(await day.mesh.station(), day.mesh.folder / "stations")
    say("prepares")
    await event.prepare(day)
    settled = None if event.ends_accounts else await day.settled()
    watching = [asyncio.create_task(watcher.run()), asyncio.create_task(lateness.run())]
    try:
        say("warms up")
        begin_s = time.monotonic() + 1.0
        shows_refusals = run.load != PLAN or event.surge != 1.0
        play = play_of(day, begin_s, conversations, shows_refusals=shows_refusals)
        await clients.start(play, PLAY_S_MAX)
        await clients.until(begin_s + WARM_S)
        say("undisturbed")
        cpu = CpuShare()
        await clients.until(begin_s + WARM_S + STEADY_S)
        say(event.title)
        begun_s = time.monotonic()
        await _act(event.strike, day)
        struck_s = time.monotonic() - begun_s
        await clients.until(begun_s + event.fault_s)
        busy = cpu.share()
        say("heals")
        heal_s = time.monotonic() - begun_s
        await _act(event.heal, day)
        healed_s = time.monotonic() - begun_s
        say("healed")
        await clients.until(time.monotonic() + event.after_s)
        ended_s = time.monotonic() - begun_s
        say("ends the load")
        found = await clients.stop()
        if settled is not None:
            settled = await day.settled() - settled
    finally:
        await day.quiet()
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await watcher.close()
        if clients.playing is not None:
            clients.playing.cancel()
    times = Times(
        steady_s=-STEADY_S,
        struck_s=round(struck_s, 3),
        heal_s=round(heal_s, 3),
        healed_s=round(healed_s, 3),
        ended_s=round(ended_s, 3),
    )
    late_s = max(lateness.longest_s, clients.late_s)
    return _Course(times, begun_s, watcher, found, busy, late_s, settled)


async def _act(act: Act, day: GameDay) -> None:
    """Do a part of an event. A refused order is part of the result."""
    try:
        await act(day)
    except OrderRefused as refused:
        day.notes.append(str(refused))
