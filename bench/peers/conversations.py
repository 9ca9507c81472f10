"""Conversations under kvmesh and under routers from PyPI: what is found in cache again, and how even the work is.

`python -m bench.peers.conversations [--quick] [--only kvmesh,smg] [--repeats N] [--write docs/measurements/peers.md]`
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench import conversation_mesh, conversations, machine
from bench.conversation_figures import imbalance, kept, reuse
from bench.conversation_mesh import PREFILL_BLOCKS, PREFILLS, STEP_S
from bench.conversation_player import Taken
from bench.conversations import COST, Plan
from bench.peers import conversations_page
from bench.peers.conversations_page import Figures, Record
from bench.peers.router_system import listening, start_router, urls_of
from bench.peers.routers import ROUTERS, Policy, Router, Unavailable, environment
from bench.processes import ANY_CORE, BenchError, Fleet, Process
from bench.selection import selected
from bench.tenant_mesh import quantile
from kvmesh.ports import free_ports

MESH = "kvmesh"
NAMES = (MESH, *(router.name for router in ROUTERS))
CACHE_AWARE = Policy("cache_aware (default)", ("--policy", "cache_aware"))
SHORTEST = Policy("cache_aware, workers serve the shortest first", CACHE_AWARE.options)
"""What of kvmesh's figures is owed to the order at its replicas, others could have with such an engine."""

POLICIES = (CACHE_AWARE, SHORTEST, Policy("round_robin", ("--policy", "round_robin")))
CONVERSATIONS, QUICK_CONVERSATIONS = 120, 60
LOAD = 0.6
WORKERS = tuple(f"worker-{index}" for index in range(PREFILLS))


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    name: str
    version: str
    policy: str
    play: Callable[[Fleet, Plan, int], Sequence[Taken]]
    replicas: tuple[str, ...] = WORKERS


def compare(
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(NAMES)}, by commas.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="One repeat, half the conversations, the default policy.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Repeats; 0 takes 3, or 1 with --quick.", min=0, max=20)] = 0,
    write: Annotated[
        Path | None,
        typer.Option(
            help="Page whose section is written, and the JSON beside it, for example docs/measurements/peers.md."
        ),
    ] = None,
) -> None:
    """Hold the same conversations with kvmesh and with routers from PyPI."""
    names = selected(only, NAMES)
    console = Console(stderr=True)
    plan = conversations.plan(
        conversations.read(), QUICK_CONVERSATIONS if quick else CONVERSATIONS, LOAD, PREFILLS
    )
    command = " ".join(["python -m bench.peers.conversations", *map(shlex.quote, sys.argv[1:])])
    record = Record(command, machine.describe(), len(plan.conversations), plan.turn_count, plan.span_s, LOAD)
    cases = _cases(names, POLICIES[:1] if quick else POLICIES, record)
    started_s = time.monotonic()
    for repeat in range(repeats or (1 if quick else 3)):
        for case in cases:  # repeats are the outer loop: a noisy minute spoils one run of each
            console.print(f"{case.name} {case.policy}, run {repeat + 1}")
            try:
                with Fleet() as fleet:
                    taken = case.play(fleet, plan, repeat)
                    figures = judge(taken, case.replicas)
            except BenchError as error:
                record.problems.append(f"{case.name}, {case.policy}, run {repeat + 1}: {error}")
                console.print(str(error), style="yellow")
            else:
                record.add(case.name, case.version, case.policy, figures)
                console.print(conversations_page.line(figures), highlight=False)
            record.seconds = time.monotonic() - started_s
            if write is not None:  # what was measured stays if the rest never is
                _write(write, record)
    sys.stdout.write(conversations_page.table(record))
    if not record.runs:
        raise typer.Exit(1)


def _write(page: Path, record: Record) -> None:
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    page.write_text(conversations_page.put(before, conversations_page.section(record)), encoding="utf-8")
    page.with_name(f"{page.stem}-conversations.json").write_text(record.to_json(), encoding="utf-8")


def judge(taken: Sequence[Taken], replicas: Sequence[str]) -> Figures:
    """Sum up a run. Raises BenchError if no turn was answered."""
    good = [one for one in taken if not one.error]
    seen = reuse(good)
    found = [one.ttft_s for one in good if one.ttft_s is not None]
    stayed, again = kept((), good)
    return Figures(
        turns=len(good),
        failed=len(taken) - len(good),
        reuse=seen.share,
        hit=seen.ratio,
        hit_max=seen.ratio_max,
        imbalance=imbalance(good, replicas, COST),
        kept=stayed / again if again else 0.0,
        work_s=sum(COST.seconds(one.prompt_tokens - one.cached_tokens, one.prompt_tokens) for one in good),
        ttft_mean_s=sum(found) / max(1, len(found)),
        ttft_p50_s=quantile(found, 0.5),
        ttft_p95_s=quantile(found, 0.95),
        errors=tuple(sorted({one.error for one in taken if one.error})),
    )


def _cases(names: Sequence[str], policies: Sequence[Policy], record: Record) -> list[Case]:
    """Return what is measured, and make the environments. A router that cannot be had is noted in the record."""
    cases = []
    if MESH in names:
        replicas = tuple(f"prefill-{number}" for number in range(PREFILLS))
        cases.append(Case(MESH, record.machine["commit"], "its own", _play_mesh, replicas))
    for router in ROUTERS:
        if router.name not in names:
            continue
        try:
            home = environment(router)
        except Unavailable as error:
            record.problems.append(str(error))
            continue
        cases += [
            Case(router.name, router.version, policy.name, _player(router, policy, home))
            for policy in policies
        ]
    return cases


def _play_mesh(fleet: Fleet, plan: Plan, seed: int) -> Sequence[Taken]:
    mesh = conversation_mesh.start(fleet)
    mesh.open(plan, seed)
    return mesh.play(plan.span_s + 1.0)


def _player(router: Router, policy: Policy, home: Path) -> Callable[[Fleet, Plan, int], Sequence[Taken]]:
    def play(fleet: Fleet, plan: Plan, seed: int) -> Sequence[Taken]:
        own, metrics, *ports = free_ports("127.0.0.1", 2 + len(WORKERS))
        order = "shortest" if policy is SHORTEST else "fifo"
        workers = [_start_worker(fleet, name, port, order) for name, port in zip(WORKERS, ports, strict=True)]
        asyncio.run(_listening(zip(workers, ports, strict=True)))
        command = router.command(home, own, metrics, policy, urls_of(ports))
        asyncio.run(_listening([(start_router(fleet, router.name, command), own)]))
        module, options = "bench.peers.chat_conversations", ("--port", str(own))
        client = fleet.neighbour("client", module, *options, core=ANY_CORE)
        said = conversation_mesh.Conversations(client)
        said.open(plan, seed)
        return said.play(plan.span_s + 1.0)

    return play


async def _listening(processes: Iterable[tuple[Process, int]]) -> None:
    for process, port in processes:
        await listening(process, port)


def _start_worker(fleet: Fleet, name: str, port: int, order: str) -> Process:
    options = ["--port", str(port), "--name", name, "--interval-s", str(STEP_S)]
    options += ["--blocks", str(PREFILL_BLOCKS), "--order", order]
    return fleet.start(name, [sys.executable, "-m", "bench.peers.caching_worker", *options], ANY_CORE)


def main() -> None:
    """Run the command."""
    made = typer.Typer(add_completion=False)
    made.command()(compare)
    made()


if __name__ == "__main__":
    main()
