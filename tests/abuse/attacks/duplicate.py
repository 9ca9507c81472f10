"""A second process of a name: it starts beside the first, and ends by SIGKILL or SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from kvmesh.ports import free_ports
from tests.abuse.attack import Attack, Bounds, Dose, Outcome
from tests.abuse.target import Target
from tests.integration.harness import START_S_MAX, Part, beside, until

BACK_S_MAX = 5.0
"""Longest time until routers place requests on the remaining process again."""


async def duplicate(target: Target, dose: Dose) -> Outcome:
    """Start and end a second process of each name in turn; check that routers still use the first."""
    outcome = Outcome()
    names = ("prefill-0", "decode-1") if dose.count > 1 else ("decode-1",)
    for index in range(dose.count):
        name = names[index % len(names)]
        sig = signal.SIGTERM if index // len(names) % 2 else signal.SIGKILL
        await _one(target, name, sig, dose.seconds / dose.count, outcome)
    return outcome


async def _one(target: Target, name: str, sig: signal.Signals, seconds: float, outcome: Outcome) -> None:
    mesh = target.mesh
    host = mesh.config.mesh.host
    command = beside(mesh.parts[name].command, {"--listen": f"{host}:{next(free_ports(host, 1))}"})
    log = Path(mesh.folder) / f"{name}-second-{outcome.did['processes']}.log"
    second = Part(f"{name}-second", command, "", log)
    second.start()
    outcome.did["processes"] += 1
    try:
        await until(
            lambda: '{"ready"' in log.read_text(errors="replace"), START_S_MAX, f"a second {name} is ready"
        )
        await asyncio.sleep(seconds)  # this is the attack: both processes run for so long
        if second.has_fallen:
            outcome.saw["ended by itself"] += 1
    finally:
        await second.end(sig)

    async def is_placed_on() -> bool:
        status = await mesh.status("router-0")
        return any(view.replica == name and view.placeable for view in status.replicas)

    try:
        waited_s = await until(is_placed_on, BACK_S_MAX, f"{name} is placed on again", every_s=0.05)
        outcome.saw["back"] += 1
        outcome.saw["ms for the slowest return"] = max(
            outcome.saw["ms for the slowest return"], round(1000 * waited_s)
        )
    except AssertionError:
        outcome.violations.append(
            f"{name} was not placed on {BACK_S_MAX:g} s after its second process had ended"
        )


DUPLICATE = Attack(
    name="duplicate-names",
    about="A second process with the name of a replica, alive for some seconds, then ended by SIGKILL or SIGTERM",
    run=duplicate,
    long=Dose(4, 24.0),
    short=Dose(1, 2.0),
    bounds=Bounds(p99_s=10.0),
)
