"""The client surfaces of a frontend alone: its own API, OpenAI over HTTP, KServe over gRPC.

One frontend serves all surfaces, and one client asks over one of them at a time. A source is the router. The surfaces take
turns, in every second repeat in reverse order. A bare HTTP server is the floor of streamed completions: it writes one event
per step and stream.
"""

from __future__ import annotations

import time
from typing import Final

from bench import aims, surface_client
from bench.processes import TEST_CORE, Fleet, Process
from bench.results import BenchError, ScenarioResults, quantile
from bench.surface_client import (
    BARE_EVENTS,
    CHAT,
    CHAT_WHOLE,
    COMPLETIONS,
    COMPLETIONS_WHOLE,
    GENERATE,
    GENERATE_CHAT,
    KSERVE_IDS,
    KSERVE_TEXT,
)
from bench.windows import (
    ANSWER_TOKENS,
    LATE_SHARE_MAX,
    LONG_SEQUENCES,
    Case,
    Pace,
    SystemUnderTest,
    Window,
    growth,
    measure,
)
from kvmesh.roles import REFERENCE

CASE: Final = Case(64, 20)
STREAMED: Final = (GENERATE, CHAT, COMPLETIONS, KSERVE_TEXT, KSERVE_IDS)
SHORT: Final = (GENERATE, GENERATE_CHAT, COMPLETIONS_WHOLE, CHAT_WHOLE, CHAT)
"""Surfaces of the short requests. An answer of Generate is always streamed."""
FIRST: Final = (GENERATE, COMPLETIONS, GENERATE_CHAT, CHAT, KSERVE_TEXT)
COMPARED: Final = {COMPLETIONS: GENERATE, CHAT: GENERATE_CHAT, KSERVE_TEXT: GENERATE}
"""The surface to which the time to first token is compared: the own API with the same kind of prompt."""
PER_S: Final = 200
WORDS: Final = 40
FIRST_ROUNDS, QUICK_FIRST_ROUNDS = 80, 40
FIRST_STEP_MS: Final = 5
TRIES: Final = 8
"""Most windows of one figure."""
DONE_MIN: Final = 0.9
"""Share of the paced tokens, or of the requests that were to be sent. With fewer of them a window does not count."""


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        surfaces = Surfaces(results, pace, fleet)
        step = -1 if results.repeats % 2 else 1
        for surface in (*STREAMED, BARE_EVENTS)[::step]:
            surfaces.streams(surface)
        for surface in SHORT[::step]:
            surfaces.requests(surface)
        surfaces.first_tokens(QUICK_FIRST_ROUNDS if pace.is_quick else FIRST_ROUNDS)


class Surfaces:
    """A frontend between a client and a stub router."""

    def __init__(self, results: ScenarioResults, pace: Pace, fleet: Fleet) -> None:
        self._results, self._pace = results, pace
        fleet.configure(LONG_SEQUENCES)
        self._source = fleet.start_ready(
            "source", "bench.source", role="router", id="router-0", redis=fleet.redis_url
        )
        self._frontend = fleet.service("frontend", "frontend-0")
        self._bare = fleet.start_ready("bare", "bench.bare_events", TEST_CORE, step_ms=CASE.step_ms)
        ports = {
            "grpc": self._frontend.address,
            "http": self._frontend.http_address,
            "bare": self._bare.address,
        }
        self._client = fleet.start_ready("client", surface_client.__name__, model=REFERENCE, **ports)
        self._frontend.wait_until(self._is_served, "answered no request", every_s=0.5)
        for surface in {*STREAMED, *SHORT, *FIRST}:  # a first request of a kind loads code
            self._client.ask("first_tokens", surfaces=[surface], rounds=3, words=WORDS)

    def streams(self, surface: str) -> None:
        """Measure the CPU of a token, with open streams."""
        self._source.ask("pace", step_ms=CASE.step_ms, phases=1)
        tested = self._over(surface, self._bare if surface == BARE_EVENTS else self._frontend)
        tested.open(CASE)
        window = self._quiet(tested, CASE, self._pace.window_s, "tokens", CASE.streams * 1000 / CASE.step_ms)
        tested.add(CASE, aims.PER_TOKEN, "us", window.cpu_s / max(window.counts["tokens"], 1) * 1e6)
        tested.end(CASE)

    def requests(self, surface: str) -> None:
        """Measure the CPU of a short request."""
        self._source.ask("pace", step_ms=CASE.step_ms, phases=1)
        tested, case = self._over(surface, self._frontend), aims.RATE_200
        self._client.ask("rate", per_s=PER_S, prompt=WORDS, tokens=ANSWER_TOKENS)
        time.sleep(self._pace.warm_s)
        window = self._quiet(tested, case, self._pace.rate_s, "finished", PER_S)
        tested.add(case, aims.PER_REQUEST, "ms", window.cpu_s / max(window.counts["finished"], 1) * 1e3)
        tested.end(case)

    def _quiet(
        self, tested: SystemUnderTest, case: object, seconds: float, unit: str, per_s: float
    ) -> Window:
        """Return the first of TRIES windows in which other work hardly kept the tested process from its core.

        The source must have kept its steps, and the client must have counted the `unit`: `per_s` each second.
        """
        for _ in range(TRIES):
            before = self._source.ask("counters")
            window = measure(tested.process, self._client, seconds)
            source = growth(before, self._source.ask("counters"))
            late = source["late_steps"] / max(1.0, source["steps"])
            done = window.counts[unit] / (per_s * window.seconds)
            if window.is_quiet and late <= LATE_SHARE_MAX and done >= DONE_MIN:
                return window
        waited = window.wait_s / window.seconds
        tested.problem(
            case,
            f"no quiet window of {TRIES}: waits for the core {waited:.0%}, late steps {late:.0%}, {unit} {done:.0%}",
        )
        return window

    def first_tokens(self, rounds: int) -> None:
        """Measure the time to first token over each surface in turn, one request at a time."""
        self._source.ask("pace", step_ms=FIRST_STEP_MS, phases=1)
        times_ms = self._client.ask("first_tokens", surfaces=FIRST, rounds=rounds, words=WORDS)
        for surface in FIRST:
            times = {
                name: quantile(times_ms[surface], share) for name, share in (("p50", 0.5), ("p99", 0.99))
            }
            case = f"{aims.ONE_AT_A_TIME}, {surface}"
            for name, value in times.items():
                self._results.add(case, f"time to first token, {name}", "ms", value)
            if own := COMPARED.get(surface):
                added = times["p50"] - quantile(times_ms[own], 0.5)
                self._results.add(case, f"{aims.ADDED_TTFT}, p50", "ms", added)

    def _over(self, surface: str, tested: Process) -> SystemUnderTest:
        self._client.ask("use", surface=surface)
        return SystemUnderTest(
            self._results, self._pace, tested, self._client, prompt_tokens=WORDS, way=surface
        )

    def _is_served(self) -> bool:
        """Return whether a request is answered. It fails until the frontend has found the router."""
        try:
            self._client.ask("first_tokens", surfaces=[GENERATE], rounds=1, words=WORDS)
        except BenchError:
            return False
        return True
