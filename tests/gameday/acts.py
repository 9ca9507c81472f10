"""Acts of the events of a game day: faults of regions and of the link between them, and their removal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from tests.gameday.day import GameDay, OrderRefused

FLAP_S: Final = 1.5
"""Half of a flap: 20 flaps a minute."""

SLOW_DELAY_S: Final = 0.08
SLOW_LOSS: Final = 0.01
BROWN: Final = 1.5
DARK_S: Final = 5.0
"""Time between the end of all control planes and that of a region."""

Act = Callable[[GameDay], Awaitable[None]]


async def nothing(day: GameDay) -> None:
    """Do nothing."""


async def kill(day: GameDay) -> None:
    """Kill every process of the target."""
    await day.mesh.kill_region(day.target)


async def restart(day: GameDay) -> None:
    """Start all of the target that does not run, and remove the faults of its parts."""
    await day.mesh.restart_region(day.target)


async def lack(day: GameDay) -> None:
    """Take one of two decode replicas from the smaller region."""
    (survivor, *_) = day.survivors
    faults = day.mesh.faults[survivor]
    await asyncio.gather(faults.kill("decode-1"), faults.kill("decode-1-engine"))


async def isolate(day: GameDay) -> None:
    """Cut the target off from all other sites."""
    await day.link.isolate(day.target)


async def heal_link(day: GameDay) -> None:
    """Remove all impairments of the link."""
    await day.quiet()
    await day.link.heal()


async def kill_decode(day: GameDay) -> None:
    """Kill the decode pool of the target."""
    await day.mesh.kill_role(day.target, "decode")


async def kill_redis(day: GameDay) -> None:
    """Kill the Redis of the target."""
    await day.mesh.kill_redis(day.target)


async def kill_control(day: GameDay) -> None:
    """Kill the control plane of the target."""
    await day.mesh.kill_control(day.target)


async def brown(day: GameDay) -> None:
    """Make the engines of the target BROWN times slower."""
    day.slow(day.target, f"slow={BROWN:g}")


async def recover(day: GameDay) -> None:
    """Let the engines of the target run at their speed."""
    day.slow(day.target, "")


async def kill_third(day: GameDay) -> None:
    """Kill one of three replicas of each role of the target."""
    faults = day.mesh.faults[day.target]
    names = [f"{role}-2{part}" for role in ("prefill", "decode") for part in ("", "-engine")]
    await asyncio.gather(*map(faults.kill, names))


async def flap(day: GameDay) -> None:
    """Let the probes of all survivors fail and succeed in turn, while clients reach the target."""

    async def flap() -> None:
        while True:
            for survivor in day.survivors:
                await day.link.cut(survivor, day.target)
            await asyncio.sleep(FLAP_S)
            await day.link.heal()
            await asyncio.sleep(FLAP_S)

    day.background = asyncio.create_task(flap())


async def slow_link(day: GameDay) -> None:
    """Delay and lose packets between the target and all survivors."""
    for survivor in day.survivors:
        await day.link.slow(day.target, survivor, SLOW_DELAY_S, SLOW_LOSS)


async def cut(day: GameDay) -> None:
    """Cut the target off from all survivors."""
    for survivor in day.survivors:
        await day.link.cut(day.target, survivor)


async def cut_one_way(day: GameDay) -> None:
    """Lose the packets from the target to all survivors."""
    for survivor in day.survivors:
        await day.link.cut(day.target, survivor, is_directed=True)


async def darken(day: GameDay) -> None:
    """Kill all control planes, and let the others notice."""
    for region in day.mesh.regions:
        await day.mesh.kill_control(region)
    await asyncio.sleep(DARK_S)


async def relight(day: GameDay) -> None:
    """Start the target and all control planes."""
    await restart(day)
    for region in day.survivors:
        await day.mesh.restart_region(region)


async def drain(day: GameDay) -> None:
    """Drain the target; with force if the forecast refuses it, which the run notes."""
    try:
        await day.command(day.target, "drain", day.target, "--reason", "game day")
    except OrderRefused as refused:
        day.notes.append(f"forced after a refusal: {refused}")
        await day.command(day.target, "drain", day.target, "--reason", "game day", "--force")


async def upgrade(day: GameDay) -> None:
    """Drain, replace and restore one region after the other."""
    for region in day.mesh.regions:
        await day.drained(region)
        await day.mesh.replace_region(region)
        await day.recovered(region)


async def restore(day: GameDay) -> None:
    """End the drain of the target."""
    await day.command(day.target, "restore", day.target, "--reason", "game day is over")
