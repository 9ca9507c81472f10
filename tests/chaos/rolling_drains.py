"""Rolling drains under load: one process after the other, by the control plane and by SIGTERM in turn."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final

from tests.chaos.judged_load import JudgedLoad
from tests.chaos.stage import Stage
from tests.chaos.without_control import longest_pause_s
from tests.chaos.without_record import Drains
from tests.integration.live_mesh import role_of, until

ORDER: Final = (
    *("stable-decode-0", "stable-router-0", "stable-prefill-0", "frontend-0"),
    *("stable-decode-1", "stable-router-1", "stable-prefill-1", "frontend-1"),
)
"""Processes with a second one of their role and pool, so that no drain needs --force."""

SERVES_S_MAX: Final = 120.0
"""Longest return of a process. It is not judged, and a busy machine makes it long."""

MORE: Final = 8
"""Answers between two changes: the drained process has none of them, and the returned one some."""


async def rolling_drains(stage: Stage, count: int, say: Callable[[str], None] = lambda line: None) -> Drains:
    """Drain `count` processes, one after the other, each until it is empty and serves again. `say` takes progress."""
    await stage.rollout_in_force()
    by_control, faults = 0, list[str]()
    async with stage.resuming_load() as load:
        await load.more(MORE)
        began_s = stage.now_s()
        for number in range(count):
            # The second round of the order drains by the other means.
            name, is_by_control = ORDER[number % len(ORDER)], (number + number // len(ORDER)) % 2 == 0
            by_control += is_by_control
            await (_by_control if is_by_control else _by_signal)(stage, load, name)
            means = "the control plane" if is_by_control else "SIGTERM"
            say(f"drain {number + 1} of {count}: {name}, by {means}; {len(load.seen):,} answers so far")
        seconds = stage.now_s() - began_s
    faults = load.faults(load.seen)
    return Drains(
        by_control=by_control,
        by_signal=count - by_control,
        seconds=round(seconds, 1),
        requests=len(load.seen),
        lost=len(faults),
        longest_pause_s=longest_pause_s(load.seen),
        faults=faults[:8],
    )


async def _by_control(stage: Stage, load: JudgedLoad, name: str) -> None:
    """Drain a process with `kvmesh`, and put it into use again."""
    await stage.rig.command("replicas", "drain", name, "--wait", "--reason", "rolling drains")
    sent_s = stage.now_s()
    await load.more(MORE)
    served = [one.number for one in load.since(sent_s) if name in one.parts]
    assert not served, f"{name} served the requests {served} while it was drained"
    await stage.rig.command("replicas", "uncordon", name)
    await _serves(stage, load, name)


async def _by_signal(stage: Stage, load: JudgedLoad, name: str) -> None:
    """Drain a process with SIGTERM, and start it again."""
    status = await stage.mesh.parts[name].end(signal.SIGTERM)
    assert status == 0, f"{name} ended with {status}: {stage.mesh.parts[name].tail()}"
    await load.more(MORE)
    await stage.mesh.start(name)
    await _serves(stage, load, name)


async def _serves(stage: Stage, load: JudgedLoad, name: str) -> None:
    """Wait until a process serves requests again. One replica after the other: the next drain needs this one."""

    async def is_placeable() -> bool:
        routers = [await stage.mesh.status(router) for router in stage.mesh.running("router")]
        return all(view.placeable for status in routers for view in status.replicas)

    await until(is_placeable, SERVES_S_MAX, "every router may place on every replica", every_s=0.05)
    since_s = stage.now_s()

    def has_served() -> bool:
        return any(name in one.parts for one in load.since(since_s))

    await until(
        has_served, SERVES_S_MAX, f"{name} serves a {role_of(name)}'s part of a request", every_s=0.05
    )
