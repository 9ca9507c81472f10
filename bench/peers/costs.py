"""CPU per token and per request of kvmesh's frontend and router, and of the routers from PyPI.

`python -m bench.peers.costs [--quick] [--only kvmesh,smg] [--repeats N] [--write docs/measurements/peers-cost.md]`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Final, NamedTuple

import typer

from bench import machine, options, pages
from bench.peers import costs_page
from bench.peers.comparison import MESH, NAMES, cases_of, compare
from bench.peers.cost_client import DIRECT, SYSTEM
from bench.peers.cost_systems import STEP_S, Start, SystemUnderTest, start_mesh, start_mesh_openai, started_by
from bench.peers.costs_page import About, Cost, CostRecord, Figures, FirstTokens, Prompts
from bench.peers.routers import POLICIES
from bench.processes import Fleet
from bench.results import BenchError, quantile
from bench.windows import growth

START_S: Final = 3.0
"""Time in which started processes find each other and return the memory of their start."""
WARM_S: Final = 1.0
IDLE_S: Final = 3.0
SETTLE_S: Final = 0.5
"""Work after the answers, such as KV events, belongs to the requests."""
ARRIVED_MIN: Final = 0.9
"""Share of the paced tokens. With fewer of them the run is no figure."""
QUICK: Final = About(window_s=3.0, loop_s=2.5, first_rounds=60)


def measure_costs(
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(NAMES)}, by commas.")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="One repeat, the routers' default policy, short windows.")
    ] = False,
    repeats: options.Repeats = 0,
    json: options.Json = False,
    write: options.Write = None,
) -> None:
    """Compare the CPU of a token and of a request, with each system alone on a core."""
    about = QUICK if quick else About()
    record = CostRecord(options.command_line("bench.peers.costs"), machine.describe(), about)
    policies = POLICIES[:1] if quick else POLICIES[:2]
    meshes: dict[str, Start] = {MESH: start_mesh, f"{MESH}, OpenAI surface": start_mesh_openai}
    cases = cases_of(only, policies, record, meshes, started_by)

    def run(start: Start, repeat: int, say: Callable[[str], None]) -> Figures:
        say("starts")
        with Fleet() as fleet:
            return measure(start(fleet, repeat), about, say)

    def save() -> None:
        if write is not None:
            pages.write(write, costs_page.page(record, pages.old(write)), record.to_json())

    compare(cases, repeats or (1 if quick else 3), record, run, costs_page.line, save, turns_around=True)
    sys.stdout.write(record.to_json() if json else "\n".join(costs_page.tables(record)) + "\n")
    if not record.runs:
        raise typer.Exit(1)


def measure(system: SystemUnderTest, about: About, say: Callable[[str], None]) -> Figures:
    """Measure a running system. Raises BenchError if requests fail or tokens are late."""
    for prompts in (about.short, about.long):  # the first requests of a kind load code
        _requests(system, prompts, WARM_S)
    time.sleep(START_S)
    say("rests")
    idle = _window(system, IDLE_S)
    say("sends one request at a time")
    first = _first_tokens(system, about)
    say("streams")
    streams = _streams(system, about)
    say("sends short prompts")
    short = _requests(system, about.short, about.loop_s)
    say("sends long prompts")
    long = _requests(system, about.long, about.loop_s)
    arrived = streams.tokens / streams.seconds * STEP_S / about.streams
    if arrived < ARRIVED_MIN:
        raise BenchError(f"{arrived:.0%} of the paced tokens arrived")
    return Figures(
        idle=cost(idle.spent_ns, idle.seconds, idle.seconds),
        token=cost(streams.spent_ns, streams.tokens, streams.seconds),
        short=short,
        long=long,
        first=first,
        arrived=arrived,
    )


def cost(spent_ns: Mapping[str, float], units: float, seconds: float) -> Cost:
    """Return the cost of a unit of work. Raises BenchError if none was done."""
    if not units:
        raise BenchError("no request was finished, or no token came")
    return Cost({role: ns / 1e3 / units for role, ns in spent_ns.items()}, units / seconds)


def _first_tokens(system: SystemUnderTest, about: About) -> FirstTokens:
    asked = {"rounds": about.first_rounds, "words": about.short.words}
    times_ms = system.client.ask("first_tokens", **asked)
    through, direct = times_ms[SYSTEM], times_ms[DIRECT]
    return FirstTokens(*(quantile(each, share) for each in (through, direct) for share in (0.5, 0.99)))


class Window(NamedTuple):
    """CPU of each role and the tokens of the client over some seconds."""

    seconds: float
    spent_ns: Mapping[str, float]
    tokens: float


def _window(system: SystemUnderTest, seconds: float) -> Window:
    began_s, before, first = time.monotonic(), system.cpu_ns(), system.client.ask("counters")
    time.sleep(seconds)
    ended_s, after = time.monotonic(), system.cpu_ns()
    tokens = growth(first, system.client.ask("counters"))["tokens"]
    return Window(ended_s - began_s, growth(before, after), tokens)


def _streams(system: SystemUnderTest, about: About) -> Window:
    client = system.client
    client.ask("open", streams=about.streams, prompt=about.stream_words, tokens=about.stream_tokens)
    time.sleep(WARM_S)
    window = _window(system, about.window_s)
    counters = client.ask("counters")
    client.ask("close")
    time.sleep(SETTLE_S)
    if counters["failed"]:
        raise BenchError(f"{counters['failed']} streams failed, first: {counters['faults'][0]}")
    return window


def _requests(system: SystemUnderTest, prompts: Prompts, seconds: float) -> Cost:
    before, began_s = system.cpu_ns(), time.monotonic()
    answer = system.client.ask("ask", words=prompts.words, callers=prompts.callers, seconds=seconds)
    ended_s = time.monotonic()
    time.sleep(SETTLE_S)
    if answer["failed"]:
        raise BenchError(f"{answer['failed']} requests failed, first: {answer['faults'][0]}")
    return cost(growth(before, system.cpu_ns()), answer["finished"], ended_s - began_s)


if __name__ == "__main__":
    typer.run(measure_costs)
