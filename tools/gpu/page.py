"""The page of a run in Markdown. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from bench.aims import AIMS
from bench.pages import items, number, paragraph, section, table
from bench.results import Key

TITLE: Final = "# A run of the mesh on a GPU"
NOT_RUN: Final = (
    "**Not run on a GPU yet.** This is a rehearsal on a CPU with a tiny model. It shows that the run works, and says "
    "nothing about a GPU."
)
AIM: Final = 0.10
"""Largest error of the fitted form from 512 uncached tokens on."""


def page(record: dict[str, Any]) -> str:
    """Return the page of a record, whatever its phases came to. Raises KeyError for another file."""
    phases = {name: phase["result"] for name, phase in record["phases"].items()}
    lines = [TITLE, "", *_origin(record), *_phases(record)]
    lines += section("Prefills", _prefills(phases.get("prefills", {})))
    lines += section("Transfers", _transfers(phases.get("transfers", {})))
    lines += section("Decode steps", _steps(phases.get("steps", {})))
    lines += section("Conformance", _conformance(phases.get("conformance", {})))
    lines += section("The mesh in front", _mesh(phases.get("mesh", {})))
    return "\n".join(lines)


def _origin(record: dict[str, Any]) -> Iterator[str]:
    plan, host = record["plan"], record["host"]
    yield from paragraph(
        "Written by `python -m tools.gpu page` from the record of `./run` in the archive of `python -m tools.gpu pack` "
        "([how](../../tools/gpu/README.md))."
    )
    yield ""
    if plan["device"] != "cuda":
        yield from paragraph(NOT_RUN)
        yield ""
    model = (
        f"torch {host['torch']}, shape {plan['shape']}"
        if plan["arithmetic"] == "torch"
        else "hashed arithmetic"
    )
    gpus = ", ".join(host["gpus"]) or "none"
    yield from table(("machine", ""), [("GPU", gpus), ("engines", model), *record["machine"].items()])
    yield ""


def _phases(record: dict[str, Any]) -> list[str]:
    rows = [
        (
            name,
            "passed" if phase["passed"] else "**failed**",
            f"{phase['seconds']:.1f}",
            _cell(phase["reason"]),
        )
        for name, phase in record["phases"].items()
    ]
    return section("Phases", table(("phase", "", "s", "why"), rows, "llrl"))


def _prefills(result: dict[str, Any]) -> Iterator[str]:
    timed = result.get("timed", [])
    rows = [
        (
            f"{one['cached']:,}",
            f"{one['uncached']:,}",
            *_spread(one["seconds"]),
            number(_median(one["seconds"]) / one["uncached"] * 1e6),
        )
        for one in timed
    ]
    yield from table(("cached", "uncached", "ms", "least..most", "us per token"), rows, "r")
    if "fit" in result:
        made = result["fit"]
        errors = made["errors"]
        c0_ms, a_us, b_ns = made["c0_s"] * 1e3, made["a_s"] * 1e6, made["b_s"] * 1e9
        yield ""
        yield from paragraph(
            "Seconds by the engine's clock, from the admission to the first token. The router's form is fitted to the "
            f"prompts without cache from {made['from']} tokens on: c0 {number(c0_ms)} ms, a {number(a_us)} us, "
            f"b {number(b_ns)} ns. Its error is {errors['median']:.1%} at the median and {errors['worst']:.1%} at worst. "
            f"The aim of {AIM:.0%} is {'met' if errors['worst'] <= AIM else '**missed**'}."
        )


def _transfers(result: dict[str, Any]) -> Iterator[str]:
    rows = [
        (
            f"{one['tokens']:,}",
            number(one["bytes"] / 1e6),
            *_spread(one["seconds"]),
            number(one["bytes"] / _median(one["seconds"]) / 1e9),
        )
        for one in result.get("moved", [])
    ]
    yield from table(("tokens", "MB", "ms", "least..most", "GB/s"), rows, "r")
    if rows:
        yield ""
        yield from paragraph(
            "From the request with the handoff to the first token of the decode engine. The blocks go over TCP."
        )


def _steps(result: dict[str, Any]) -> Iterator[str]:
    rows = [
        (
            str(one["batch"]),
            f"{one['context']:,}",
            number(_median(one["seconds"]) * 1e3),
            number(one["batch"] / _median(one["seconds"])),
        )
        for one in result.get("timed", [])
    ]
    yield from table(("streams", "tokens of each", "ms per step", "tokens per second"), rows, "r")


def _conformance(result: dict[str, Any]) -> list[str]:
    told = result.get("told", {})
    counts = Counter(check["result"] for check in told.get("checks", ()))
    if not counts:
        return []
    rows = [
        tuple(_cell(check[key]) for key in ("capability", "check", "result", "why"))
        for check in told["checks"]
        if check["result"] != "pass"
    ]
    summary = ", ".join(f"{count} {result}" for result, count in counts.items())
    return [f"{summary}.", "", *table(("capability", "check", "result", "why"), rows)]


def _mesh(result: dict[str, Any]) -> list[str]:
    rows = [
        (one["case"], one["metric"], number(one["median"]), one["unit"]) for one in result.get("figures", [])
    ]
    lines = table(("case", "figure", "", "unit"), rows, "llrl")
    by = {(one["case"], one["metric"]): one["median"] for one in result.get("figures", [])}
    added = by.get(("one request at a time", "added time to first token, p50"))
    if added is not None:
        aim = AIMS[Key("path", "one request at a time", "added time to first token, p50")]
        state = "met" if aim.is_met(added) else "**missed**"
        lines += [
            "",
            *paragraph(
                f"Added time to first token: {number(added)} ms, aim {aim} {number(aim.limit)} ms: {state}."
            ),
        ]
    if result.get("problems"):
        lines += ["", *items(_cell(text) for text in result["problems"])]
    return lines


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _spread(seconds: list[float]) -> tuple[str, str]:
    least, most = min(seconds) * 1e3, max(seconds) * 1e3
    return number(_median(seconds) * 1e3), f"{number(least)}..{number(most)}"


def _cell(text: str) -> str:
    """Return `text` in one line that does not end a table's cell."""
    return " ".join(text.split()).replace("|", "/")[:300]
