"""Conversations on a whole mesh: prefix-cache reuse, balance of work, session affinity.

The conversations are those of a recorded trace with one system prompt, lengths divided by 16. With perfect reuse, their
prefill work is 0.6 of the capacity of four prefill replicas. Two routers place it. Half-way both routers are killed at
once and started again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bench import aims, conversation_mesh, conversations
from bench.conversation_figures import fitted, imbalance, kept, reuse, simulated
from bench.conversation_mesh import PREFILL_BLOCKS, PREFILLS, ROUTERS
from bench.conversation_player import PlayedTurn
from bench.processes import Fleet
from bench.results import BenchError, ScenarioResults, quantile
from bench.windows import Pace

CONVERSATIONS, QUICK_CONVERSATIONS = 120, 60
LOAD = 0.6
SEED = 1


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    _measure(results, pace, aims.CONVERSATIONS, PREFILL_BLOCKS)
    if not pace.is_quick:
        _measure(results, pace, aims.SCARCE, PREFILL_BLOCKS // 2)


def _measure(results: ScenarioResults, pace: Pace, case: str, cache_blocks: int) -> None:
    count = QUICK_CONVERSATIONS if pace.is_quick else CONVERSATIONS
    plan = conversations.plan(conversations.read(), count, LOAD, PREFILLS)
    with Fleet() as fleet:
        mesh = conversation_mesh.start(fleet, cache_blocks)
        mesh.open(plan, SEED)
        warm = conversation_mesh.regret(mesh.running.routers)
        before = mesh.play(plan.span_s / 2)
        first = conversation_mesh.regret(mesh.running.routers)
        mesh.running.restart_routers()
        after = mesh.play(plan.span_s + 1.0)
        regret = {
            name: value + first[name] - warm[name]
            for name, value in conversation_mesh.regret(mesh.running.routers).items()
        }
        taken = [*before, *after]
        _check(results, case, plan.turn_count, taken)
        cost = fitted(taken)
        mesh_size = {"replicas": PREFILLS, "routers": ROUTERS, "cache_blocks": cache_blocks}
        foretold = simulated(taken, fleet.folder / "played.jsonl", **mesh_size, cost=cost)
    first_tokens = max(1.0, regret["late_count"] + regret["early_count"])
    seen = reuse(taken)
    stayed, again = kept((), before)
    stayed_on, again_on = kept(before, after)
    found = [one.ttft_s * 1e3 for one in taken if one.ttft_s is not None]
    for metric, unit, value in (
        ("turns", "", len(taken)),
        (aims.REUSE, "", seen.share),
        (aims.IMBALANCE, "x", imbalance(taken, mesh.prefills, cost)),
        ("hit ratio", "", seen.ratio),
        ("hit ratio, simulated", "", foretold.hit),
        ("hit ratio of one cache without bounds", "", seen.ratio_max),
        (aims.HIT_DISTANCE, "points", abs(seen.ratio - foretold.hit) * 100),
        ("most prefill work / mean, simulated", "x", foretold.imbalance),
        ("turns that kept session affinity", "", stayed / max(1, again)),
        ("turns that kept session affinity, all routers restarted", "", stayed_on / max(1, again_on)),
        ("time to first token, p50", "ms", quantile(found, 0.5)),
        ("time to first token, p95", "ms", quantile(found, 0.95)),
        ("time to first token, mean", "ms", sum(found) / len(found)),
        ("end of prefill, mean, simulated", "ms", foretold.mean_s * 1e3),
        ("first token later than estimated, mean", "ms", regret["late_sum"] / first_tokens * 1e3),
        ("first token earlier than estimated, mean", "ms", regret["early_sum"] / first_tokens * 1e3),
    ):
        results.add(case, metric, unit, value)


def _check(results: ScenarioResults, case: str, expected: int, taken: Sequence[PlayedTurn]) -> None:
    """Record failed turns; later turns of their conversations were not sent."""
    failed = Counter(one.error for one in taken if one.error)
    if failed or len(taken) < expected:
        results.problem(f"{len(taken)} of {expected} turns, failed {dict(failed)}", case)
    if not taken:
        raise BenchError("no turn was answered")
