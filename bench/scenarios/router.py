"""The router alone: a sink is its frontend, sources are prefill and decode replicas."""

from __future__ import annotations

import time

from bench import aims
from bench.processes import Fleet, Process
from bench.results import ScenarioResults
from bench.windows import LONG_SEQUENCES, Pace, SystemUnderTest

SHORT_PROMPT_TOKENS = 32
"""Prompt below router.local_prefill_tokens_max."""
PER_S = 200


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        fleet.configure(LONG_SEQUENCES)
        sources = [source_of(fleet, role, f"{role}-0") for role in ("prefill", "decode")]
        router = fleet.service("router", "router-0")
        wait_attached(router, sources)
        sink = fleet.start_ready("sink", "bench.sink", target=router.address)
        tested = SystemUnderTest(results, pace, router, sink)
        tested.idle()
        for case in pace.cases:
            ask_pace(sources, case.step_ms)
            tested.streams(case, sources[1:])
        for name, prompt_tokens in (
            (aims.RATE_200, tested.prompt_tokens),
            (f"{aims.RATE_200}, decode runs the prompt", SHORT_PROMPT_TOKENS),
        ):
            window = tested.rate(name, PER_S, prompt_tokens)
            if window.counts["finished"]:
                messages = window.counts["messages"] / window.counts["finished"]
                tested.add(name, "messages to the frontend per request", "", messages)
        sources.append(source_of(fleet, "decode", "decode-1"))
        wait_attached(router, sources)
        for case in pace.double_cases:
            ask_pace(sources, case.step_ms)
            tested.streams(case, sources[1:])


def source_of(fleet: Fleet, role: str, name: str, **more: object) -> Process:
    """Start a fake replica that registers."""
    return fleet.start_ready(name, "bench.source", role=role, id=name, redis=fleet.redis_url, **more)


def wait_attached(router: Process, sources: list[Process]) -> None:
    """Return 1 s after `router` has attached to each of `sources`. Raises BenchError."""
    router.wait_until(
        lambda: all(source.ask("counters")["sessions"] for source in sources), "did not attach to the sources"
    )
    time.sleep(1.0)


def ask_pace(sources: list[Process], step_ms: float) -> None:
    """Let `sources` send a token per stream every `step_ms`."""
    for source in sources:
        source.ask("pace", step_ms=step_ms)
