"""The cost of a token and of a request by role, for two variants of the transports, interleaved in one run.

Both variants of a process alone, or of a whole mesh with engines in Triton, run at the same time. Only one has load.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench import accounting, aims, engines
from bench.mesh import Mesh
from bench.processes import ANY_CORE, Fleet
from bench.results import ScenarioResults
from bench.scenarios import path, router
from bench.variants import VARIANTS, Variant, interleaved
from bench.windows import LONG_SEQUENCES, SETTLE_S, Case, Pace, SystemUnderTest, growth

CASES = (Case(128, 20), Case(64, 20))
MEMORY_STEP_MS = 500
FIRST_STREAMS, FURTHER_STREAMS = 200, 800
"""The first streams take the memory that a process freed after its start. Memory per stream is the growth by the others."""
MEMORY_CASE = f"{FURTHER_STREAMS} streams more"
PATH_CASES = (Case(64, 20),)
"""Two cores carry no whole mesh of the old variant with 128 streams."""
PAIRS, QUICK_PAIRS = 40, 20
ROUNDS, QUICK_ROUNDS = 2, 1


@dataclass(frozen=True, slots=True)
class Prompts:
    """Requests of one token, by the words of their prompts and the callers that send them in a closed loop."""

    name: str
    words: int
    callers: int


PROMPTS = (Prompts("requests of 40 words", 40, 8), Prompts("requests of 1,200 words", 1200, 4))


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    rounds = QUICK_ROUNDS if pace.is_quick else ROUNDS
    for kind in (FrontendAlone, RouterAlone):
        _measure_alone(kind, results, pace, rounds)
    with Fleet() as old, Fleet() as new:
        meshes = [
            WholePath(results, pace, fleet, variant)
            for fleet, variant in zip((old, new), VARIANTS, strict=True)
        ]
        for measure in (WholePath.first_tokens, WholePath.streams, WholePath.requests):
            for mesh in interleaved(meshes, rounds):
                measure(mesh)


def _measure_alone(
    kind: type[FrontendAlone] | type[RouterAlone], results: ScenarioResults, pace: Pace, rounds: int
) -> None:
    with Fleet() as old, Fleet() as new:
        alone = [
            kind(results, pace, fleet, variant) for fleet, variant in zip((old, new), VARIANTS, strict=True)
        ]
        for one in alone:
            one.memory()
        for case in CASES:
            for one in interleaved(alone, rounds):
                one.measure(case)


class FrontendAlone:
    """A frontend between a client and a stub router."""

    def __init__(self, results: ScenarioResults, pace: Pace, fleet: Fleet, variant: Variant) -> None:
        fleet.configure(variant.over(LONG_SEQUENCES))
        self._source = fleet.start_ready(
            "source", "bench.source", role="router", id="router-0", redis=fleet.redis_url
        )
        frontend = fleet.service("frontend", "frontend-0")
        client = fleet.start_ready("client", "bench.client", target=frontend.address)
        frontend.wait_until(lambda: path.is_served(client), "answered no request", every_s=0.5)
        self._tested = SystemUnderTest(
            results, pace, frontend, client, way=f"frontend alone, {variant.label}"
        )

    def measure(self, case: Case) -> None:
        """Measure CPU per token."""
        self._source.ask("pace", step_ms=case.step_ms, phases=1)
        self._tested.streams(case, [self._source], sees_frames=False, is_first=False)

    def memory(self) -> None:
        """Measure memory per stream."""
        self._source.ask("pace", step_ms=MEMORY_STEP_MS, phases=1)
        _measure_memory(self._tested)


class RouterAlone:
    """A router between a sink and fake replicas."""

    def __init__(self, results: ScenarioResults, pace: Pace, fleet: Fleet, variant: Variant) -> None:
        fleet.configure(variant.over(LONG_SEQUENCES))
        self._sources = [router.source_of(fleet, role, f"{role}-0") for role in ("prefill", "decode")]
        process = fleet.service("router", "router-0")
        router.wait_attached(process, self._sources)
        sink = fleet.start_ready("sink", "bench.sink", target=process.address)
        self._tested = SystemUnderTest(results, pace, process, sink, way=f"router alone, {variant.label}")

    def measure(self, case: Case) -> None:
        """Measure CPU per token."""
        router.ask_pace(self._sources, case.step_ms)
        self._tested.streams(case, self._sources[1:], is_first=False)

    def memory(self) -> None:
        """Measure memory per stream."""
        router.ask_pace(self._sources, MEMORY_STEP_MS)
        _measure_memory(self._tested)


def _measure_memory(tested: SystemUnderTest) -> None:
    tested.open(Case(FIRST_STREAMS, MEMORY_STEP_MS))
    before = accounting.rss_bytes(tested.process.pid)
    tested.open(Case(FURTHER_STREAMS, MEMORY_STEP_MS))
    time.sleep(4 * MEMORY_STEP_MS / 1e3)  # each stream had some tokens
    grown = accounting.rss_bytes(tested.process.pid) - before
    tested.add(MEMORY_CASE, aims.STREAM_BYTES, "KB", grown / FURTHER_STREAMS / 1e3)
    tested.end(MEMORY_CASE)


class WholePath:
    """A whole mesh with the meters of its processes."""

    def __init__(self, results: ScenarioResults, pace: Pace, fleet: Fleet, variant: Variant) -> None:
        mesh = Mesh(fleet, path.COSTS, variant.over({"engine": engines.CONFIG}))
        self._results, self._pace, self._variant = results, pace, variant
        self._fleet, self._mesh = fleet, mesh
        self._client = fleet.start_ready("client", "bench.client", ANY_CORE, target=mesh.frontend.address)
        mesh.frontend.wait_until(lambda: path.is_served(self._client), "answered no request", every_s=0.5)
        self._texts = fleet.start_ready("texts", "bench.text_client", ANY_CORE, target=mesh.frontend.address)
        for prompts in PROMPTS:  # a first request of a kind loads code
            self._texts.ask("ask", words=prompts.words, callers=1, seconds=0.1)

    def first_tokens(self) -> None:
        """Measure the added time to first token, one request at a time."""
        triton = self._mesh.engines["prefill-0"].address
        probe = self._fleet.start_ready(
            "ttft", path.__name__, ANY_CORE, target=self._mesh.frontend.address, triton=triton
        )
        pairs = QUICK_PAIRS if self._pace.is_quick else PAIRS
        path.run_ttft(self._results, probe, pairs, case=self._name(path.TTFT_CASE))
        self._fleet.stop(probe)

    def streams(self) -> None:
        """Measure CPU per token by role."""
        for case in PATH_CASES:
            whole = SystemUnderTest(
                self._results,
                self._pace,
                self._mesh.frontend,
                self._client,
                stream_tokens=path.OUTPUT_TOKENS,
                way=f"whole path, {self._variant.label}",
            )
            whole.open(case)
            before = self._cpu_ns()
            window = whole.measure()
            spent = growth(before, self._cpu_ns())
            tokens = window.counts["tokens"]
            expected = case.streams / case.step_ms * 1000 * window.seconds
            if tokens < 0.9 * expected:
                whole.problem(case, f"{tokens / expected:.0%} of the paced tokens arrived")
            for role, ns in spent.items():
                whole.add(case, f"{aims.PER_TOKEN}, {role}", "us", ns / 1e3 / max(tokens, 1))
            whole.end(case)

    def requests(self) -> None:
        """Measure CPU per request by role, for short and for long prompts."""
        for prompts in PROMPTS:
            case, before = self._name(prompts.name), self._cpu_ns()
            answer = self._texts.ask(
                "ask", words=prompts.words, callers=prompts.callers, seconds=self._pace.rate_s
            )
            time.sleep(SETTLE_S)  # work after the answers, such as KV events, belongs to the requests
            spent, finished = growth(before, self._cpu_ns()), answer["finished"]
            if answer["failed"]:
                self._results.problem(
                    f"{answer['failed']} requests failed, first: {answer['faults'][0]}", case
                )
            if not finished:
                self._results.problem("no request was finished", case)
                continue
            for role, ns in spent.items():
                self._results.add(case, f"{aims.PER_REQUEST}, {role}", "ms", ns / 1e6 / finished)

    def _name(self, case: str) -> str:
        return f"{case}, {self._variant.label}"

    def _cpu_ns(self) -> dict[str, int]:
        """Return the CPU time of each role. A Triton server's process and its engine's are apart."""
        mesh, spent = self._mesh, {}
        roles = {"frontend": mesh.frontend, "router": mesh.routers[0], "redis": self._fleet.process("redis")}
        for role, process in {**roles, **mesh.replicas}.items():
            spent[role.partition("-")[0]] = accounting.cpu_ns(process.pid)
        for name, engine in mesh.engines.items():
            role, pid = name.partition("-")[0], engine.process.pid
            spent[f"Triton of {role}"] = accounting.cpu_ns(pid)
            spent[f"engine process of {role}"] = sum(map(accounting.cpu_ns, accounting.descendants(pid)))
        return spent
