"""Measures stock gRPC clients over xDS while their home region is cut off from everything and its packets are dropped.

Each client of VARIANTS has other channel options, or another xDS server. All are outside both regions, and send a small
request every half second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from bench.results import BenchError
from tests.gameday import acts
from tests.gameday.capacity import Say
from tests.gameday.day import GameDay, new_day
from tests.gameday.shapes import EQUAL, REGIONS, USERS, key_of
from tests.gameday.stock_client import DEADLINE_S, Sent, Stock
from tests.integration.containers.part import ContainerPart
from tests.integration.containers.station import OUT, Station
from tests.integration.live_mesh import until
from tests.integration.xds.mesh import OPTIONS, bootstrap

STEADY_S: Final = 15.0
CUT_S: Final = 180.0
AFTER_S: Final = 12.0
"""Time after which new requests of a client with all options are good."""

GOOD_MIN: Final = 0.995
READY_S_MAX: Final = 60.0
ENDED_S_MAX: Final = DEADLINE_S + 20.0

ALL: Final = "all four options"


@dataclass(frozen=True, slots=True)
class Variant:
    """A client. `servers`: regions of its xDS servers, in order."""

    name: str
    without: Sequence[str] = ()
    """Options of OPTIONS that it lacks."""
    servers: Sequence[str] = REGIONS[:2]

    @property
    def options(self) -> Mapping[str, int]:
        """Return its channel options."""
        return {key: value for key, value in OPTIONS.items() if key not in self.without}


VARIANTS: Final = (
    Variant(ALL),
    Variant("without `grpc.priority_failover_timeout_ms`", ("grpc.priority_failover_timeout_ms",)),
    Variant("without `grpc.http2.ping_timeout_ms`", ("grpc.http2.ping_timeout_ms",)),
    Variant("none", tuple(OPTIONS)),
    Variant("none, the xDS server of the other region first", tuple(OPTIONS), REGIONS[1::-1]),
)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a client's requests. Times are in seconds after the cut."""

    variant: str
    moved_s: float | None
    """First answer of another region. None: none."""
    good_from_s: float | None
    """Every request that was sent later was good. None: the last ones failed."""
    sent: int
    """Requests that were sent while the region was cut off."""
    failed: int
    sent_after: int
    """Those that were sent AFTER_S later or more."""
    failed_after: int

    @property
    def good_after(self) -> float:
        """Share of good ones of the latter."""
        return 1.0 - self.failed_after / self.sent_after


class Outcomes(msgspec.Struct, frozen=True):
    """The outcome of each variant."""

    clients: tuple[Outcome, ...]

    @property
    def is_met(self) -> bool:
        """True if a client with all options got GOOD_MIN good answers after AFTER_S."""
        return next(each for each in self.clients if each.variant == ALL).good_after >= GOOD_MIN


async def measure_stock(folder: Path, tag: str, say: Say) -> Outcomes:
    """Raises BenchError and AssertionError."""
    home, other = REGIONS[:2]
    day = new_day(EQUAL, (home, other), folder, tag)
    servers: dict[str, ContainerPart] = {}
    try:
        say("starts two regions, and an xDS server of each")
        await day.mesh.start()
        servers = {name: mesh.xds_server() for name, mesh in day.mesh.regions.items()}
        await asyncio.gather(
            *(day.mesh.regions[name].launch([each]) for name, each in servers.items()), day.federated()
        )
        await asyncio.gather(*(day.mesh.regions[name].ready(each) for name, each in servers.items()))
        await day.seen_well(*day.mesh.regions)
        found = await _cut_off(day, servers, say)
    finally:
        await asyncio.shield(day.mesh.stop())
        for each in servers.values():
            each.close()
    return found


async def _cut_off(day: GameDay, servers: Mapping[str, ContainerPart], say: Say) -> Outcomes:
    """Let all clients run, cut their home off, and return what they saw until it is back."""
    station, files = await day.mesh.station(), day.mesh.folder / "stations"
    for old in (files / "stop", *files.glob("calls-*.jsonl")):
        old.unlink(missing_ok=True)
    addresses = {name: each.address for name, each in servers.items()}
    running = [
        asyncio.create_task(_run(station, files, number, each, addresses))
        for number, each in enumerate(VARIANTS)
    ]

    def seen() -> list[list[Sent]]:
        return [read(files / f"calls-{number}.jsonl") for number in range(len(VARIANTS))]

    try:
        say("waits for the clients")
        await _while_running(running, until(lambda: all(map(_is_served, seen())), READY_S_MAX, "answers"))
        await _while_running(running, asyncio.sleep(STEADY_S))
        say("cuts the region off")
        cut_s = time.monotonic()
        await acts.isolate(day)
        await _while_running(running, asyncio.sleep(CUT_S))
        healed_s = time.monotonic()
        await acts.heal_link(day)
    finally:
        (files / "stop").touch()
        await asyncio.wait(running, timeout=ENDED_S_MAX)
    return Outcomes(
        tuple(
            outcome_of(each.name, calls, day.target, cut_s, healed_s - DEADLINE_S)
            for each, calls in zip(VARIANTS, seen(), strict=True)
        )
    )


def _is_served(calls: Sequence[Sent]) -> bool:
    return any(not each.error for each in calls)


async def _while_running(running: Sequence[asyncio.Task[str]], work: object) -> None:
    """Wait for `work`. Raises BenchError if a client ends before it."""
    waiting = asyncio.ensure_future(work)  # type: ignore[call-overload]  # a coroutine
    done, _ = await asyncio.wait({waiting, *running}, return_when=asyncio.FIRST_COMPLETED)
    if waiting not in done:
        waiting.cancel()
        raise BenchError(f"a client ended early: {done.pop().result()[-2000:]}")
    await waiting


async def _run(
    station: Station, files: Path, number: int, variant: Variant, servers: Mapping[str, str]
) -> str:
    stock = Stock(
        bootstrap=bootstrap([servers[region] for region in variant.servers], REGIONS[0]),
        options=variant.options,
        key=key_of(USERS),
        calls=f"{OUT}/calls-{number}.jsonl",
        stop=f"{OUT}/stop",
    )
    (files / f"plan-{number}.json").write_bytes(msgspec.json.encode(stock))
    program = ("python", "-m", "tests.gameday.stock_client", f"{OUT}/plan-{number}.json")
    return await station.run(*program, timeout_s=READY_S_MAX + STEADY_S + CUT_S + 2 * ENDED_S_MAX)


def read(path: Path) -> list[Sent]:
    """Return the requests of a file."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return sorted((msgspec.json.decode(line, type=Sent) for line in lines), key=lambda each: each.sent_s)


def outcome_of(variant: str, calls: Sequence[Sent], home: str, cut_s: float, until_s: float) -> Outcome:
    """Return what a client saw of the requests that it sent from `cut_s` to `until_s`. Raises BenchError without one."""
    found = [each for each in calls if cut_s <= each.sent_s < until_s]
    after = [each for each in found if each.sent_s - cut_s >= AFTER_S]
    if not after:
        raise BenchError(f"{variant}: no request of {len(calls)} was sent {AFTER_S:g} s after the cut")
    failed = [each for each in found if each.error]
    moved = [each.ended_s for each in found if not each.error and each.region != home]
    later = [each.sent_s for each in found if not failed or each.sent_s > failed[-1].sent_s]
    return Outcome(
        variant=variant,
        moved_s=round(min(moved) - cut_s, 2) if moved else None,
        good_from_s=round(later[0] - cut_s, 2) if later else None,
        sent=len(found),
        failed=len(failed),
        sent_after=len(after),
        failed_after=sum(bool(each.error) for each in after),
    )


def lines(outcomes: Outcomes) -> list[str]:
    """Return the table and the verdict as Markdown."""
    told = "met" if outcomes.is_met else "MISSED"
    return [
        f"| channel options | first answer of the other region | good from | failed | good {AFTER_S:g} s after the cut |",
        "|---|--:|--:|--:|--:|",
        *(
            f"| {each.variant} | {_seconds(each.moved_s)} | {_seconds(each.good_from_s)} | {each.failed} of {each.sent} "
            f"| {each.good_after:.1%} of {each.sent_after} |"
            for each in outcomes.clients
        ),
        "",
        f"With all options at least {GOOD_MIN:.1%} are good {AFTER_S:g} s after the cut: {told}.",
    ]


def _seconds(value: float | None) -> str:
    return f"not within {CUT_S - DEADLINE_S:g} s" if value is None else f"{value:.1f} s"
