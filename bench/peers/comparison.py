"""The rows of a comparison and their runs: kvmesh, and each router from PyPI under each policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.console import Console

from bench import options
from bench.environments import Unavailable, environment
from bench.peers.record import Record
from bench.peers.routers import ROUTERS, Installed, Policy
from bench.results import BenchError

MESH = "kvmesh"
NAMES = (MESH, *(router.name for router in ROUTERS))

Play = TypeVar("Play")


@dataclass(frozen=True, slots=True)
class Case(Generic[Play]):
    """One row of the table. `play` runs it."""

    name: str
    version: str
    policy: str
    play: Play

    def __str__(self) -> str:
        return f"{self.name} {self.policy}"


def cases_of(
    only: str,
    policies: Sequence[Policy],
    record: Record[Any, Any],
    meshes: Mapping[str, Play],
    routed: Callable[[Installed], Play],
) -> list[Case[Play]]:
    """Return the selected cases, and make the environments. Routers that cannot be installed go to the record.

    `meshes`: the cases of kvmesh by the name of their row. They are selected together.
    """
    names = options.selected(only, NAMES)
    commit = record.machine["commit"]
    own = meshes.items() if MESH in names else ()
    cases = [Case(name, commit, "its own", mesh) for name, mesh in own]
    for router in ROUTERS:
        if router.name not in names:
            continue
        try:
            home = environment(router.name, router.version)
        except Unavailable as error:
            record.problems.append(str(error))
            record.unavailable[router.name] = str(error)
            continue
        cases += [
            Case(router.name, router.version, policy.name, routed(Installed(router, policy, home)))
            for policy in policies
        ]
    return cases


def compare(
    cases: Sequence[Case[Play]],
    repeats: int,
    record: Record[Any, Any],
    run: Callable[[Play, int, Callable[[str], None]], Any],
    line: Callable[[Any], str],
    save: Callable[[], None],
    *,
    turns_around: bool = False,
) -> None:
    """Run every case `repeats` times. `save` after each run keeps the figures if a later run is interrupted.

    `turns_around`: see options.repeated.
    """
    console = Console(stderr=True)
    started_s = time.monotonic()
    for case, repeat, say in options.repeated(cases, repeats, console, turns_around=turns_around):
        try:
            figures = run(case.play, repeat, say)
        except BenchError as error:
            record.problems.append(f"{case.name}, {case.policy}, run {repeat + 1}: {error}")
            console.print(str(error), style="yellow")
        else:
            record.add(case.name, case.version, case.policy, figures)
            console.print(f"{case}: {line(figures)}", highlight=False)
        record.seconds = time.monotonic() - started_s
        save()
