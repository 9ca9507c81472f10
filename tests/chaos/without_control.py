"""The mesh without its control plane: every control process is dead, and the mesh serves on as before.

Meanwhile Redis loses its data, and processes of each kind are killed and started again. Then the canary's pool dies, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvmesh.tasks import end
from tests.chaos import rollout
from tests.chaos.cpu import Lateness
from tests.chaos.judged_load import JudgedLoad
from tests.chaos.records import COMPLETE, Seen
from tests.chaos.rollout import CANARY
from tests.chaos.stage import CONTROLS, STABLE, Stage
from tests.chaos.without_record import Canary, Dead
from tests.integration.live_mesh import until

RESTARTED: Final = ("frontend-0", "stable-router-0", "stable-decode-0", "stable-prefill-0")
"""Processes that are killed and started again while the control plane is dead: a frontend, a router, replicas.

Each has a second one of its role and pool, so that no session has to leave its pool."""

ROUND_S: Final = 60.0
"""One round of losses, at most one each minute."""

SWITCH_S: Final = 2.0
"""Longest wait for the first token of a new request after the canary's pool has died."""

SERVES_S_MAX: Final = 60.0


async def without_control(
    stage: Stage, dead_s: float, say: Callable[[str], None] = lambda line: None
) -> Dead:
    """Kill each control process, and judge the mesh for at least `dead_s`. Start the control plane again.

    `say` takes progress.
    """
    await stage.rollout_in_force()
    running = str((await stage.rollout())["rollout"])
    async with stage.resuming_load() as load:
        await load.every_session()
        before, snapshot_before = list(load.seen), await rollout.common_snapshot(stage.mesh)
        await stage.end_control()
        began_s, deeds = stage.now_s(), list[str]()
        while not deeds or stage.now_s() < began_s + dead_s:
            round_s = stage.now_s()
            deeds += await _losses(stage, load)
            dead_for_s = stage.now_s() - began_s
            say(
                f"no control process for {dead_for_s:.0f} of {dead_s:.0f} s: {len(deeds)} losses and restarts, "
                f"{len(load.seen):,} answers"
            )
            next_s = min(round_s + ROUND_S, began_s + dead_s)
            await until(
                lambda next_s=next_s: stage.now_s() >= next_s, 2 * ROUND_S, "the next round", every_s=0.05
            )
        ended_s, behind = stage.now_s(), len(load.seen)
        await load.every_session()
        after, snapshot_after = load.seen[behind:], await rollout.common_snapshot(stage.mesh)
        faults = await _continued(stage, running, snapshot_after)
    pools_before, pools_after = load.pools(before), load.pools(load.since(began_s))
    moved = sorted(name for name, found in pools_after.items() if found != pools_before.get(name))
    lost = load.faults(load.seen)
    faults += [
        *lost[:8],
        *(f"{name} moved from {pools_before.get(name)} to {pools_after[name]}" for name in moved[:8]),
    ]
    if snapshot_after != snapshot_before:
        faults.append(f"receivers held {snapshot_before}, and hold {snapshot_after} now")
    return Dead(
        dead_s=round(ended_s - began_s, 1),
        requests=len(load.seen),
        lost=len(lost),
        share_before=_share(before),
        share_after=_share(after),
        moved_sessions=len(moved),
        snapshot_before=snapshot_before,
        snapshot_after=snapshot_after,
        deeds=deeds,
        longest_pause_s=longest_pause_s(load.seen),
        faults=faults,
    )


async def _losses(stage: Stage, load: JudgedLoad) -> list[str]:
    """Empty Redis, then kill and restart one process after the other, under load."""
    await stage.flush()
    await load.more(4)
    done = ["Redis emptied"]
    for name in RESTARTED:
        await stage.mesh.parts[name].end()
        await stage.mesh.start(name)
        await load.more(4)
        done.append(f"{name} killed and started")
    return done


async def _continued(stage: Stage, running: str, snapshot: str) -> list[str]:
    """Start the control plane behind `snapshot`, and return what differs from the rollout before."""
    before = await rollout.content_of(stage.mesh)
    assert before is not None
    await stage.mesh.start(*CONTROLS)

    async def leads() -> bool:
        names = set((await rollout.snapshots_of(stage.mesh)).values())
        return len(names) == 1 and names != {snapshot}

    await until(leads, SERVES_S_MAX, "each receiver has a snapshot of the new leader", every_s=0.2)
    now, shown = await rollout.content_of(stage.mesh), await stage.rollout()
    faults = []
    if shown["rollout"] != running or shown["state"] != "ROLLOUT_STATE_BAKING":
        faults.append(f"rollout {running} did not continue: {shown['rollout']} is {shown['state']}")
    if now is None or now.pools != before.pools:
        faults.append(f"the new leader changed the weights: {before.pools}, now {now and now.pools}")
    return faults


async def without_canary(stage: Stage) -> Canary:
    """Kill the control plane and then the canary's pool; all to stable without a control plane; both start again."""
    await stage.rollout_in_force()
    async with stage.plain_load() as load:
        await load.every_session()
        at_canary = {name for name, pools in load.pools(load.seen).items() if CANARY in pools}
        await stage.end_control()
        late = Lateness()
        ticking = asyncio.create_task(late.run(), name="lateness")
        killed_s = stage.now_s()
        names = await stage.end_canary()
        gone_s = stage.now_s()
        await load.every_session()
        await end([ticking])
        after = load.since(gone_s)
        faults = load.faults([one for one in load.seen if one.ended_s < killed_s])
        bound, mid = _bound(load, killed_s, gone_s)
        faults += load.faults(mid)
        refused = [one for one in after if one.end != COMPLETE]
        faults += load.faults(after)[:8]
        moved = [one for one in after if load.session(one) in at_canary]
        first_token_s = max((one.came_s[0] - one.sent_s for one in moved if one.came_s), default=0.0)
        if first_token_s > SWITCH_S + late.longest_s:
            faults.append(f"a request of a canary's session waited {first_token_s:.2f} s for its first token")
        if not moved:
            faults.append("no session of the canary sent a request")
        direct = await _direct(stage, load, names)
    return Canary(
        requests=len(after),
        refused=len(refused),
        refused_s=round(max((one.ended_s - killed_s for one in refused), default=0.0), 2),
        sessions=len({load.session(one) for one in moved}),
        first_token_s=round(first_token_s, 3),
        bound=len(bound),
        direct_snapshot=direct.name,
        direct_requests=direct.requests,
        direct_lost=direct.lost,
        direct_canary=direct.canary,
        faults=[*faults, *direct.faults],
    )


class _Direct:
    """What was seen behind `kvmesh snapshot stable --direct`."""

    def __init__(self) -> None:
        self.name = ""
        self.requests = 0
        self.lost = 0
        self.canary = 0
        self.faults: list[str] = []


async def _direct(stage: Stage, load: JudgedLoad, canary: list[str]) -> _Direct:
    """Write "all to stable", start the canary's pool again, empty Redis, and start the control plane again."""
    found = _Direct()
    answer = await stage.rig.command(
        "snapshot", "stable", "--direct", "--reason", "the canary's pool is dead"
    )
    found.name = str(answer["snapshot"])
    written_s = stage.now_s()
    await stage.mesh.start(*canary)
    await load.every_session()
    await stage.flush()
    await load.more(len(canary))
    if await rollout.common_snapshot(stage.mesh) != found.name:
        found.faults.append(
            f"receivers hold {await rollout.common_snapshot(stage.mesh)} and not {found.name}"
        )
    await stage.mesh.start(*CONTROLS)

    async def is_taken_back() -> bool:
        try:
            return (await stage.rollout())["state"] in (
                "ROLLOUT_STATE_ROLLING_BACK",
                "ROLLOUT_STATE_ROLLED_BACK",
            )
        except AssertionError:
            return False

    await until(is_taken_back, SERVES_S_MAX, "the new leader takes the rollout back", every_s=0.5)
    await load.every_session()
    content = await rollout.content_of(stage.mesh)
    if content is None or content.canary_percent or content.stable.pool != STABLE:
        found.faults.append(f"the new leader gave the canary weight: {content}")
    seen = load.since(written_s)
    found.requests, found.canary = len(seen), sum(one.pool == CANARY for one in seen)
    lost = load.faults(seen)
    found.lost = len(lost)
    found.faults += lost[:8]
    if found.canary:
        found.faults.append(f"{found.canary} requests at the canary behind --direct")
    return found


def _bound(load: JudgedLoad, killed_s: float, gone_s: float) -> tuple[list[Seen], list[Seen]]:
    """Return the requests sent before the pool was gone that ended with it, by design, and the others.

    A request that has begun is bound to its version. It ends with STALE_SNAPSHOT when no pool serves the version.
    """
    mid = [one for one in load.seen if one.ended_s >= killed_s and one.sent_s < gone_s]
    bound = [one for one in mid if one.ids and one.end != COMPLETE and one.reason == "STALE_SNAPSHOT"]
    return bound, [one for one in mid if one not in bound]


def _share(seen: list[Seen]) -> float:
    """Return the share of the answers that the canary's pool gave."""
    answered = [one for one in seen if one.end == COMPLETE]
    return round(sum(one.pool == CANARY for one in answered) / max(1, len(answered)), 3)


def longest_pause_s(seen: list[Seen]) -> float:
    """Return the longest wait of a client for a message."""
    return round(max((one.longest_wait[0] for one in seen), default=0.0), 2)
