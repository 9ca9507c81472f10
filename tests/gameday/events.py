"""The events of a game day: what breaks, how it heals, and the aims by which it is judged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from tests.gameday import aims
from tests.gameday.aims import Judge
from tests.gameday.day import GameDay, OrderRefused
from tests.gameday.shapes import BOTH, EQUAL, MIXED, TRIPLE, UNEQUAL, Shape

PLAN: Final = "plan"
"""The load that `kvmesh region plan` gives for the hit ratio of the conversations, fully seeded."""

SIXTY: Final = "60"
LOADS: Final = (PLAN, SIXTY)

FLAP_S: Final = 1.5
"""Half of a flap: 20 flaps a minute."""

SLOW_DELAY_S: Final = 0.08
SLOW_LOSS: Final = 0.01
BROWN: Final = 1.5
SURGE: Final = 3.0
DARK_S: Final = 5.0
"""Time between the end of all control planes and that of a region."""

Act = Callable[[GameDay], Awaitable[None]]


async def nothing(day: GameDay) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event. Clients are under load from before it to after its healing."""

    name: str
    title: str
    strike: Act
    heal: Act = nothing
    prepare: Act = nothing
    """Before the load."""
    shape: Shape = EQUAL
    fault_s: float = 75.0
    """From the begin of the event to that of its healing."""
    after_s: float = 15.0
    """From the end of the healing to that of the load."""
    surge: float = 1.0
    """Factor of the conversations at the target while the event lasts."""
    loses: bool = True
    """The target's capacity is lost: at 60 % the survivors are full."""
    moves: bool = False
    """All callers of the target move: the event shows if a load is survivable."""
    counts: tuple[int, ...] = (2,)
    """Numbers of regions of a full game day."""
    ends_accounts: bool = True
    """The event ends a frontend or a Redis, and so its count of charges."""
    judges: tuple[Judge, ...]
    """Aims at the planned load."""

    def judges_at(self, load: str) -> tuple[Judge, ...]:
        """Return the aims at a load. At the planned load they are the event's own ones."""
        own = self.judges if load == PLAN or not self.loses else aims.FULL
        charges = () if self.ends_accounts else (aims.charged_once,)
        return (*own, *aims.ALWAYS, *charges)


async def _kill(day: GameDay) -> None:
    await day.mesh.kill_region(day.target)


async def _restart(day: GameDay) -> None:
    await day.mesh.restart_region(day.target)


async def _lack(day: GameDay) -> None:
    """Take one of two decode replicas from the smaller region."""
    (survivor, *_) = day.survivors
    faults = day.mesh.faults[survivor]
    await asyncio.gather(faults.kill("decode-1"), faults.kill("decode-1-engine"))


async def _isolate(day: GameDay) -> None:
    await day.link.isolate(day.target)


async def _heal_link(day: GameDay) -> None:
    await day.quiet()
    await day.link.heal()


async def _kill_decode(day: GameDay) -> None:
    await day.mesh.kill_role(day.target, "decode")


async def _kill_redis(day: GameDay) -> None:
    await day.mesh.kill_redis(day.target)


async def _kill_control(day: GameDay) -> None:
    await day.mesh.kill_control(day.target)


async def _brown(day: GameDay) -> None:
    day.slow(day.target, f"slow={BROWN:g}")


async def _recover(day: GameDay) -> None:
    day.slow(day.target, "")


async def _kill_third(day: GameDay) -> None:
    faults = day.mesh.faults[day.target]
    names = [f"{role}-2{part}" for role in ("prefill", "decode") for part in ("", "-engine")]
    await asyncio.gather(*map(faults.kill, names))


async def _flap(day: GameDay) -> None:
    """Let the probes of all survivors fail and succeed in turn, while clients reach the target."""

    async def flap() -> None:
        while True:
            for survivor in day.survivors:
                await day.link.cut(survivor, day.target)
            await asyncio.sleep(FLAP_S)
            await day.link.heal()
            await asyncio.sleep(FLAP_S)

    day.background = asyncio.create_task(flap())


async def _slow_link(day: GameDay) -> None:
    for survivor in day.survivors:
        await day.link.slow(day.target, survivor, SLOW_DELAY_S, SLOW_LOSS)


async def _cut(day: GameDay) -> None:
    for survivor in day.survivors:
        await day.link.cut(day.target, survivor)


async def _cut_one_way(day: GameDay) -> None:
    for survivor in day.survivors:
        await day.link.cut(day.target, survivor, is_directed=True)


async def _darken(day: GameDay) -> None:
    for region in day.mesh.regions:
        await day.mesh.kill_control(region)
    await asyncio.sleep(DARK_S)


async def _relight(day: GameDay) -> None:
    await _restart(day)
    for region in day.survivors:
        await day.mesh.restart_region(region)


async def _drain(day: GameDay) -> None:
    """Drain the target; with force if the forecast refuses it, which the run notes."""
    try:
        await day.command(day.target, "drain", day.target, "--reason", "game day")
    except OrderRefused as refused:
        day.notes.append(f"forced after a refusal: {refused}")
        await day.command(day.target, "drain", day.target, "--reason", "game day", "--force")


async def _restore(day: GameDay) -> None:
    await day.command(day.target, "restore", day.target, "--reason", "game day is over")


MOVE: Final = (aims.good_after_5_s, aims.streams_exact, aims.ttft_back)

EVENTS: Final = (
    Event(
        name="kill",
        moves=True,
        title="kill -9 of a whole region",
        strike=_kill,
        heal=_restart,
        counts=(2, 3),
        judges=MOVE,
    ),
    Event(
        name="unequal",
        title="the larger of two unequal regions killed while the smaller lacks a replica",
        prepare=_lack,
        strike=_kill,
        heal=_restart,
        shape=UNEQUAL,
        judges=(aims.own_95, aims.typed, aims.shed_by_priority, aims.not_sent_to_dead),
    ),
    Event(
        name="isolate",
        ends_accounts=False,
        moves=True,
        title="a region cut off from everything, packets dropped",
        strike=_isolate,
        heal=_heal_link,
        counts=(2, 3),
        judges=MOVE,
    ),
    Event(
        name="both-versions",
        title="a region killed while the other one serves a later version, and still its own",
        strike=_kill,
        heal=_restart,
        shape=BOTH,
        judges=(aims.good_after_5_s, aims.streams_exact),
    ),
    Event(
        name="versions",
        title="regions one version apart, one killed",
        strike=_kill,
        heal=_restart,
        shape=MIXED,
        judges=(aims.good_after_5_s, aims.stale_with_tokens),
    ),
    Event(
        name="decode",
        ends_accounts=False,
        title="the decode pool of a region killed",
        strike=_kill_decode,
        heal=_restart,
        judges=(aims.nothing_lost, aims.no_failover),
    ),
    Event(
        name="redis",
        title="the Redis of a region killed",
        strike=_kill_redis,
        heal=_restart,
        loses=False,
        judges=(aims.nothing_lost, aims.no_failover),
    ),
    Event(
        name="control",
        ends_accounts=False,
        title="the control plane of a region killed",
        strike=_kill_control,
        heal=_restart,
        loses=False,
        judges=(aims.nothing_lost, aims.no_failover),
    ),
    Event(
        name="brownout",
        ends_accounts=False,
        title=f"engines of a region {BROWN:g} times slower",
        strike=_brown,
        heal=_recover,
        loses=False,
        judges=(aims.nothing_lost, aims.suspect_at_most),
    ),
    Event(
        name="third",
        ends_accounts=False,
        title="one of three replicas a role killed",
        strike=_kill_third,
        heal=_restart,
        shape=TRIPLE,
        loses=False,
        judges=(aims.nothing_lost, aims.suspect_at_most),
    ),
    Event(
        name="flap",
        ends_accounts=False,
        title="the probes of a region flap 20 times a minute",
        strike=_flap,
        heal=_heal_link,
        loses=False,
        judges=(aims.no_transition, aims.own_throughout),
    ),
    Event(
        name="link",
        ends_accounts=False,
        title="80 ms and 1 % loss each way between the regions",
        strike=_slow_link,
        heal=_heal_link,
        loses=False,
        judges=(aims.no_transition, aims.own_throughout),
    ),
    Event(
        name="cut",
        ends_accounts=False,
        title="the link between the regions cut both ways",
        strike=_cut,
        heal=_heal_link,
        loses=False,
        counts=(2, 3),
        judges=(aims.own_throughout, aims.heals_smoothly),
    ),
    Event(
        name="cut-one-way",
        ends_accounts=False,
        title="the link between the regions cut one way",
        strike=_cut_one_way,
        heal=_heal_link,
        loses=False,
        judges=(aims.own_throughout, aims.heals_smoothly),
    ),
    Event(
        name="dark",
        title="all control planes killed, then a region",
        prepare=_darken,
        strike=_kill,
        heal=_relight,
        judges=(aims.good_after_5_s, aims.streams_exact, aims.survivors_stay, aims.not_sent_to_dead),
    ),
    Event(
        name="drain",
        ends_accounts=False,
        title="planned drain and restore",
        strike=_drain,
        heal=_restore,
        fault_s=45.0,
        after_s=90.0,
        counts=(2, 3),
        judges=(aims.nothing_lost, aims.errors_not_up, aims.sessions_back),
    ),
    Event(
        name="surge",
        ends_accounts=False,
        title=f"{SURGE:g} times the load on one region",
        strike=nothing,
        surge=SURGE,
        fault_s=60.0,
        loses=False,
        judges=(aims.typed, aims.shed_by_priority, aims.others_95, aims.spill_within_grant),
    ),
)

BY_NAME: Final = {event.name: event for event in EVENTS}
