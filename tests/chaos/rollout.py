"""The rollout that is under way while parts of a mesh fail: it gives the pool `next` a part of the sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Protocol

from kvmesh.membership.membership import read_members
from kvmesh.redis_link import RedisLink, RedisUnavailable
from kvmesh.snapshot.board import Board, OnBoard
from kvmesh.snapshot.content import Content
from tests.integration.live_mesh import LiveMesh, until

CANARY: Final = "next"
WEIGHT_PERCENT: Final = 20
"""Weight of the canary in the first step of the rollout, which bakes for a day."""

START: Final = (
    *("rollout", "start", "--to", CANARY, "--steps", f"{WEIGHT_PERCENT},100"),
    *("--bake", "24h", "--bake-max", "48h"),
)
STARTED_S_MAX: Final = 60.0
RISEN_S_MAX: Final = 60.0
LOOK_S: Final = 0.1

EARLY: Final = (
    "NOT_LEADER",
    "UNAVAILABLE",
    "is unknown",
    "was heard",
    "was not heard",
    "no control process",
    "in doubt",
)
"""Words of refusals by a mesh that has just started."""


class CommandFailed(AssertionError):
    """A command of `kvmesh` ended with another status than 0. The text has its output."""


class Commanded(Protocol):
    """A running mesh whose operator may change it."""

    @property
    def mesh(self) -> LiveMesh[Any]: ...

    async def command(self, *words: str) -> Any:
        """Run `kvmesh WORDS --json` on the host of the leading control process. Raises CommandFailed."""
        ...


async def content_of(mesh: LiveMesh[Any]) -> Content | None:
    """Return the content of the snapshot in Redis. None: there is none, or Redis does not answer."""
    redis = RedisLink(f"redis://{mesh.parts['redis'].address}/0")
    try:
        found = await Board(redis, mesh.config.mesh.name).read()
    except RedisUnavailable:
        return None
    finally:
        await redis.close()
    return found.snapshot.content if isinstance(found, OnBoard) else None


async def snapshots_of(mesh: LiveMesh[Any]) -> dict[str, str]:
    """Return the snapshot in the lease of each receiver. Without Redis: none."""
    redis = RedisLink(f"redis://{mesh.parts['redis'].address}/0")
    try:
        members = await read_members(redis, mesh.config.mesh.name)
    except RedisUnavailable:
        return {}
    finally:
        await redis.close()
    return {member.process_id: member.snapshot for member in members}


async def common_snapshot(mesh: LiveMesh[Any]) -> str:
    """Wait until all running receivers hold one snapshot, and return its name."""
    names: set[str] = set()
    receivers = set(mesh.running("frontend", "router", "prefill", "decode"))

    async def agree() -> bool:
        nonlocal names
        held = await snapshots_of(mesh)
        names = set(held.values())
        return len(names) == 1 and "" not in names and receivers <= set(held)

    await until(agree, RISEN_S_MAX, "all receivers hold one snapshot", every_s=LOOK_S)
    return names.pop()


async def begin(rig: Commanded) -> None:
    """Start a rollout unless the canary has a weight already. Return when it has WEIGHT_PERCENT at all receivers."""
    found = await content_of(rig.mesh)
    if found is None or not found.canary_percent:
        await _start(rig)

    async def has_weight() -> bool:
        now = await content_of(rig.mesh)
        return now is not None and now.canary_percent == WEIGHT_PERCENT

    try:
        await until(has_weight, RISEN_S_MAX, f"the canary has {WEIGHT_PERCENT} %", every_s=LOOK_S)
    except AssertionError as error:
        raise AssertionError(f"{error}, but {await rig.command('rollout', 'status')}") from None
    await common_snapshot(rig.mesh)


async def _start(rig: Commanded) -> None:
    faults: Sequence[str] = ()

    async def is_started() -> bool:
        nonlocal faults
        try:
            await rig.command(*START)
        except CommandFailed as failed:
            if not any(word in str(failed) for word in EARLY):
                raise
            faults = (*faults[-1:], str(failed))
            await asyncio.sleep(LOOK_S)
            return False
        return True

    try:
        await until(is_started, STARTED_S_MAX, "a rollout starts")
    except CommandFailed:
        raise
    except AssertionError as error:
        raise AssertionError(f"{error}: {faults[-1:]}") from None


def told(content: Content | None) -> str:
    """Return the rollout of a content, with state and weight. Empty: none. Pure."""
    if content is None or not content.rollout:
        return ""
    return f"{content.rollout} {content.rollout_state.name} at {content.canary_percent} %"
