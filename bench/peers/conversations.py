"""Conversations with kvmesh and with routers from PyPI: prefix-cache reuse and balance of work.

`python -m bench.peers.conversations [--quick] [--only kvmesh,smg] [--repeats N] [--write docs/measurements/peers.md]`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from bench import conversation_mesh, conversations, machine, options, pages
from bench.conversation_figures import imbalance, kept, reuse
from bench.conversation_mesh import PREFILL_BLOCKS, PREFILLS, STEP_S
from bench.conversation_player import PlayedTurn
from bench.conversations import COST, Plan
from bench.mesh import names
from bench.peers import conversations_page
from bench.peers.comparison import MESH, NAMES, cases_of, compare
from bench.peers.conversations_page import COLUMNS, About, ConversationRecord, Figures
from bench.peers.routers import Installed, Policy
from bench.processes import ANY_CORE, Fleet
from bench.results import quantile

CACHE_AWARE = Policy("cache_aware (default)", ("--policy", "cache_aware"))
SHORTEST = Policy("cache_aware, workers serve the shortest first", CACHE_AWARE.options)
"""Separates the effect of kvmesh's order at its replicas: other routers could have it with such an engine."""

POLICIES = (CACHE_AWARE, SHORTEST, Policy("round_robin", ("--policy", "round_robin")))
CONVERSATIONS, QUICK_CONVERSATIONS = 120, 60
LOAD = 0.6
WORKERS = names("worker", PREFILLS)


class Played(NamedTuple):
    """A system: the call that plays conversations with it, and the names of its replicas."""

    play: Callable[[Fleet, Plan, int], Sequence[PlayedTurn]]
    replicas: Sequence[str]


def hold(
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(NAMES)}, by commas.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="One repeat, half the conversations, the default policy.")
    ] = False,
    repeats: options.Repeats = 0,
    write: options.Write = None,
) -> None:
    """Hold the same conversations with kvmesh and with routers from PyPI."""
    count = QUICK_CONVERSATIONS if quick else CONVERSATIONS
    plan = conversations.plan(conversations.read(), count, LOAD, PREFILLS)
    about = About(len(plan.conversations), plan.turn_count, plan.span_s, LOAD)
    command = options.command_line("bench.peers.conversations")
    record = ConversationRecord(command, machine.describe(), about)
    meshes = {MESH: Played(_play_mesh, names("prefill", PREFILLS))}
    cases = cases_of(only, POLICIES[:1] if quick else POLICIES, record, meshes, _routed)

    def run(played: Played, repeat: int, say: Callable[[str], None]) -> Figures:
        say("plays")
        with Fleet() as fleet:
            return judge(played.play(fleet, plan, repeat), played.replicas)

    def save() -> None:
        if write is not None:
            text = conversations_page.put(pages.old(write), record)
            pages.write(write, text, record.to_json(), tag="-conversations")

    compare(cases, repeats or (1 if quick else 3), record, run, conversations_page.line, save)
    sys.stdout.write("\n".join(record.table(COLUMNS)) + "\n")
    if not record.runs:
        raise typer.Exit(1)


def judge(taken: Sequence[PlayedTurn], replicas: Sequence[str]) -> Figures:
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


def _play_mesh(fleet: Fleet, plan: Plan, seed: int) -> Sequence[PlayedTurn]:
    mesh = conversation_mesh.start(fleet)
    mesh.open(plan, seed)
    return mesh.play(plan.span_s + 1.0)


def _routed(installed: Installed) -> Played:
    def play(fleet: Fleet, plan: Plan, seed: int) -> Sequence[PlayedTurn]:
        order = "shortest" if installed.policy is SHORTEST else "fifo"
        options: dict[str, Any] = {"interval_s": STEP_S, "blocks": PREFILL_BLOCKS, "order": order}
        routed = installed.start(fleet, WORKERS, "bench.peers.caching_worker", **options)
        client = fleet.start_ready("client", "bench.peers.chat_conversations", ANY_CORE, port=routed.port)
        said = conversation_mesh.Conversations(client)
        said.open(plan, seed)
        return said.play(plan.span_s + 1.0)

    return Played(play, WORKERS)


if __name__ == "__main__":
    typer.run(hold)
