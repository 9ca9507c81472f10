"""Conversations on a whole mesh: what is found in cache again, how even the work is, who stays where it was.

Conversations of a recorded trace with one system prompt before all of them, lengths divided by 16, at 0.6 of what four
prefill replicas can do. Half-way every router is killed at once and started again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench import aims, conversation_mesh, conversations
from bench.conversation_figures import fitted, imbalance, kept, reuse
from bench.conversation_mesh import PREFILL_BLOCKS, PREFILLS, ROUTERS
from bench.conversation_player import Taken
from bench.conversation_replay import simulated
from bench.processes import BenchError, Fleet
from bench.results import Results
from bench.tenant_mesh import quantile
from bench.windows import Pace

NAME = "conversations"
CASE = aims.CONVERSATIONS
CONVERSATIONS, QUICK_CONVERSATIONS = 120, 60
LOAD = 0.6
SEED = 1


def run(results: Results, pace: Pace) -> None:
    """Measure one repeat."""
    count = QUICK_CONVERSATIONS if pace.is_quick else CONVERSATIONS
    plan = conversations.plan(conversations.read(), count, LOAD, PREFILLS)
    with Fleet() as fleet:
        mesh = conversation_mesh.start(fleet)
        mesh.open(plan, SEED)
        warm = conversation_mesh.regret(mesh.routers)
        before = mesh.play(plan.span_s / 2)
        regret = conversation_mesh.regret(mesh.routers) - warm
        mesh.restart_routers()
        after = mesh.play(plan.span_s + 1.0)
        regret += conversation_mesh.regret(mesh.routers)
        _check(results, plan.turn_count, [*before, *after])
        _add_reuse(results, [*before, *after], mesh.replicas, fleet.folder / "played.jsonl")
        _add_places(results, before, after)
        for sooner, seconds in (("later", regret.late_s), ("sooner", regret.early_s)):
            name = f"first token {sooner} than estimated, mean over all"
            results.add(NAME, CASE, name, "ms", seconds / max(1, regret.count) * 1e3)


def _check(results: Results, expected: int, taken: Sequence[Taken]) -> None:
    failed = Counter(one.error for one in taken if one.error)
    if failed or len(taken) < expected:
        results.problem(NAME, f"{len(taken)} of {expected} turns, failed {dict(failed)}", CASE)
    if not taken:
        raise BenchError("no turn was answered")


def _add_reuse(results: Results, taken: Sequence[Taken], replicas: Sequence[str], trace: Path) -> None:
    cost, seen = fitted(taken), reuse(taken)
    foretold = simulated(
        taken, trace, replicas=PREFILLS, routers=ROUTERS, cache_blocks=PREFILL_BLOCKS, cost=cost
    )
    for metric, unit, value in (
        ("turns", "", len(taken)),
        (aims.REUSE, "", seen.share),
        (aims.IMBALANCE, "x", imbalance(taken, replicas, cost)),
        ("hit ratio of all blocks", "", seen.ratio),
        ("hit ratio of one cache without bounds", "", seen.ratio_max),
        ("hit ratio, simulated", "", foretold.hit),
        (aims.HIT_DISTANCE, "points", abs(seen.ratio - foretold.hit) * 100),
        ("imbalance, simulated", "x", foretold.imbalance),
    ):
        results.add(NAME, CASE, metric, unit, value)
    found = [one.ttft_s * 1e3 for one in taken if one.ttft_s is not None]
    for share in (0.5, 0.95):
        results.add(NAME, CASE, f"time to first token, p{share * 100:.0f}", "ms", quantile(found, share))
    results.add(NAME, CASE, "time to first token, mean", "ms", sum(found) / len(found))
    results.add(
        NAME, CASE, "time to prefill, mean, simulated without the warm-up", "ms", foretold.mean_s * 1e3
    )


def _add_places(results: Results, before: Sequence[Taken], after: Sequence[Taken]) -> None:
    """Tell who stayed, before every router was killed and after it."""
    for former, turns, when in (
        ((), before, "before"),
        (before, after, "after"),
    ):
        stayed, count = kept(former, turns)
        if count:
            name = f"turns that kept their place, {when} all routers were killed"
            results.add(NAME, CASE, name, "", stayed / count)
