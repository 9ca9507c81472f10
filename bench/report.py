"""The record of a run of the bench, as a page and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench import aims, comparison, pages
from bench.pages import number
from bench.results import Figure, Key, Results

PARTS = (aims.EDGE_PART, aims.MESH_PART, aims.CALL_PART)
TRIPS = 2
"""Round trips over Attach before a first token if decode certainly has capacity: to the router, to prefill."""
TITLES = {
    "floor": "Floor: source and sink, nothing between",
    "router": "Router alone",
    "frontend": "Frontend alone",
    "decode": "Decode service alone (an engine in Triton on the other core)",
    "cost": "A token and a request: old and new transports",
    "surfaces": "Client surfaces of a frontend alone: the own API, OpenAI over HTTP, KServe",
    "path": "Whole path through Triton",
    "start": "First request after a start",
    "index": "Prefix index",
    "placement": "Placement decisions",
    "gossip": "Gossip of dispatches between routers, over one Redis",
    "trust": "Router alone, plain text and mutual TLS",
    "admission": "Admission by budgets",
    "versions": "Versions side by side: choice and observation of a request",
    "snapshots": "Snapshots: publication to ACK, and the idle control plane",
    "hot": "Hot prefixes: recording of prompts, and an answer",
    "xds": "xDS: ADS for 200 clients",
    "models": "Models: folders, conversations, detokenizers, sampling features",
    "refusals": "Refusals, over gRPC and without it",
    "fairness": "Fairness: effect of a tenant's burst on other tenants",
    "conversations": "Conversations: prefix-cache reuse and balance of work",
    "overload": "Overload: goodput and load shedding",
    "trtllm": "The model on TensorRT-LLM's LLM API, over its recorded surface",
}
METHOD = """\
CPU is the time of all threads of the process under test, user and system. It is read from outside over a window
of steady load, without the first seconds. The process under test has core 0 to itself. Load generators, stubs and
Redis share core 1. Each figure is the smallest, the median and the largest of the repeats. The median is compared
with the aim."""
COLUMNS = ("figure", "min", "median", "max", "unit", "aim", "")


def verdict(figure: Figure) -> str:
    """Return "met", "missed" or nothing, with a question mark if the load differed from the case."""
    told = {None: "", True: "met", False: "missed"}[figure.is_met]
    return told + "?" * figure.is_doubtful


@dataclass(slots=True)
class Run:
    """A run of the bench."""

    command: str
    machine: Mapping[str, str]
    results: Results
    seconds: float = 0.0

    def to_json(self) -> str:
        """Return the run as JSON."""
        run: dict[str, Any] = {
            "command": self.command,
            "seconds": round(self.seconds, 1),
            "machine": dict(self.machine),
            "figures": [figure.to_json() for figure in self.results.figures.values()],
            "problems": self.results.problems,
        }
        return json.dumps(run, indent=2) + "\n"

    def page(self, old: str = "") -> str:
        """Return the run as Markdown. `old`: the previous page; its title and hand-written end are kept."""
        results = self.results
        lines = [old.partition("\n")[0] or "# The cost of kvmesh", ""]
        lines += [*pages.origin(self.command, self.seconds, self.machine), METHOD, ""]
        lines += pages.section("Aims", sentences(results) or ["No figure with an aim was measured."])
        lines += pages.section("Not measured, or under a doubtful load", pages.items(results.problems))
        for scenario in results.scenarios():
            if compared := comparison.lines(results.of(scenario)):
                lines += pages.section(TITLES[scenario], compared)
                continue
            rows = [[figure.key.case, *_cells(figure)] for figure in results.of(scenario)]
            lines += pages.section(TITLES[scenario], pages.table(("case", *COLUMNS), rows, "llrrrl"))
        return pages.with_notes(lines, old)


def sentences(results: Results) -> list[str]:
    """Return one list item per figure with an aim: met, not judged, or missed by a share, with the measured parts."""
    lines = []
    for figure in results.figures.values():
        if figure.aim is None:
            continue
        name = f"{figure.key.scenario}, {figure.key.case}, {figure.key.metric}"
        value, limit = f"{number(figure.median)} {figure.unit}", f"{number(figure.aim.limit)} {figure.unit}"
        if figure.is_doubtful:
            lines.append(
                f"- **Not judged**: {name}: {value}, aim {figure.aim} {limit}. The load differed from the case."
            )
            continue
        if figure.is_met:
            lines.append(f"- Met: {name}: {value}, aim {figure.aim} {limit}.")
            continue
        over = abs(figure.median / figure.aim.limit - 1)
        lines.append(
            f"- **Missed by {over:.0%}**: {name}: {value}, aim {figure.aim} {limit}.{_share(results, figure)}"
        )
    return lines


def _share(results: Results, figure: Figure) -> str:
    """Return the measured parts of a cost: the floor of the same case, or the parts of a delay."""
    scenario, case, metric = figure.key

    def medians(scenario: str, *metrics: str) -> list[float]:
        """Return the medians of `metrics` in this case, none if one was not measured."""
        found = [results.figures.get(Key(scenario, case, metric)) for metric in metrics]
        return [one.median for one in found if one is not None] if all(found) else []

    if parts := medians("path", *PARTS) if scenario == "path" else []:
        told = ", ".join(f"{number(value)} {name[:-5]}" for name, value in zip(PARTS, parts, strict=True))
        floor = ""
        if found := medians("floor", aims.EDGE_TRIP, aims.ATTACH_TRIP):
            edge, trip = found
            floor = (
                f" The least time is {number(edge + TRIPS * trip)} ms. A call of the client API takes {number(edge)} ms, "
                f"each of {TRIPS} round trips over Attach (frontend to router, router to prefill) {number(trip)} ms."
            )
        return f" Parts, in ms: {told}.{floor}"
    own, floor_costs = medians(scenario, aims.PER_FRAME), medians("floor", aims.PER_FRAME, aims.FRAME_WRITER)
    if metric != aims.PER_TOKEN or not own or not floor_costs:
        return ""
    reading, writing = map(number, floor_costs)
    if scenario == "router":
        bare = f"With nothing between, reading a frame costs {reading} us, writing {writing} us."
        return f" A frame costs {number(own[0])} us. {bare}"
    if scenario == "frontend" and (edges := medians("floor", aims.EDGE_WRITER)):
        return (
            f" A bare server spends {number(edges[0])} us per token on the stream to the client. Reading a frame costs "
            f"{reading} us."
        )
    return ""


def _cells(figure: Figure) -> list[str]:
    values = [number(value) for value in (min(figure.values), figure.median, max(figure.values))]
    aim = "" if figure.aim is None else f"{'≥' if figure.aim.is_least else '≤'} {number(figure.aim.limit)}"
    return [figure.key.metric, *values, figure.unit, aim, verdict(figure)]
