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

from bench.results import BenchError
from kvmesh.regions.plan import UTILISATION_MAX, utilisation
from tests.chaos import machine
from tests.chaos.cpu import CpuShare, Lateness
from tests.gameday import calls, drawing
from tests.gameday.acts import Act
from tests.gameday.bins import binned
from tests.gameday.calls import Call
from tests.gameday.clients import Clients, play_of
from tests.gameday.conversations import Conversation, Demand, cost_of
from tests.gameday.day import GameDay, OrderRefused, new_day
from tests.gameday.events import LOADS, PLAN, SIXTY
from tests.gameday.records import Capacity, Record, Times
from tests.gameday.runs import Run
from tests.gameday.shapes import REGIONS, Shape
from tests.gameday.views import Watcher

WARM_S: Final = 30.0
"""From the first conversation to the steady state: some of them have ended by then."""

STEADY_S: Final = 45.0
"""Undisturbed time before the event: some 300 requests at the planned load. The p95 of fewer scatters too much."""

BUSY_MAX: Final = 0.85
"""Share of busy core time above which the machine is saturated."""

LATE_S_MAX: Final = 0.5
"""Delay of an event loop above which the machine is saturated."""

HEAL_S_MAX: Final = 120.0
PLAY_S_MAX: Final = 900.0
SEEDED: Final = 1.0
"""Share of hot prefixes that a survivor has, in the planned load."""

Say = Callable[[str], None]


def load_of(load: str, regions: int, hit_ratio: float) -> float:
    """Return the utilisation of each region at a load. Raises BenchError."""
    if load == PLAN:
        return utilisation(regions, hit_ratio, SEEDED, UTILISATION_MAX)
    if load in LOADS:
        return int(load) / 100
    raise BenchError(f'load "{load}" is unknown: allowed are {", ".join(LOADS)}')


def capacities_of(shape: Shape, regions: Sequence[str], capacity: Capacity) -> dict[str, float]:
    """Return the uncached tokens per second of each region: its prefill replicas limit it."""
    return {name: shape.replicas_of(name)[0] * capacity.tokens_per_s for name in regions}


@dataclass(slots=True)
class _Course:
    """Observations of a run."""

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
        await day.seen_well(*day.mesh.regions)
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
    until_s = begin_s + event.strike_s_max + event.fault_s + event.after_s + HEAL_S_MAX
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
        shows_refusals = run.load == SIXTY or event.surge != 1.0
        play = play_of(day, begin_s, conversations, shows_refusals=shows_refusals)
        await clients.start(play, PLAY_S_MAX)
        await clients.until(begin_s + WARM_S)
        say("undisturbed")
        cpu = CpuShare()
        await clients.until(begin_s + WARM_S + STEADY_S)
        await _act(event.prelude, day)
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
