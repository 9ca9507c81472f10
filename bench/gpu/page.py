"""The record of a fit: tables in Markdown, and below them what was written by hand. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from bench import pages
from bench.gpu.findings import SHOWN
from bench.pages import number, table

TITLE: Final = "# What a prefill costs on a GPU, and what the router takes it to cost"
CONTEXTS: Final = (128, 1024, 2048, 4096, 8192, 16_384, 32_768)


def page(run: dict[str, Any], old: str = "") -> str:
    """Return the page. `old`: the one that it replaces, whose hand-written end is kept."""
    lines = [
        TITLE,
        "",
        f"Written by `{run['command']}`, {run['date']}, commit {run['commit']}.",
        "",
        "**Question.** The router takes a prefill of u uncached of T tokens to cost c0 + u (a + b (T - u / 2)) seconds,",
        "learns the three from what it sees, and starts from a prior",
        "([decision 0019](../decisions/0019-placement-cost.md)). Is that what a GPU takes?",
        "",
    ]
    if run["is_published"]:
        lines += [
            "**Whose timings.** Others', not ours ([where from](../../bench/gpu/published/README.md)): matrix products and",
            "attention of an 8B Llama on an NVIDIA H100 80GB in bf16, one operator at a time, as three engines run them,",
            "added up here over 32 layers; an engine also spends norms, launches and scheduling.",
            "`python -m bench.gpu measure` times a whole model. It has run on a CPU only, with a small model, where a",
            "prefill in two parts gave the logits of one in whole; no run of it on a GPU is recorded here.",
            "",
        ]
    first = run["recordings"][0]
    for title, made in (
        ("Prefills", _sizes(run["recordings"])),
        ("Whole prefills of Llama 2 70B on two H100", _whole(run.get("whole_prefills", []))),
        ("The form, fitted to all sizes at once", _fits(run)),
        (f"The router's own estimate, {first['name']}", _learnt(first)),
        ("Attention behind a cache, one layer", _attention(run.get("prefix_attention", []))),
        (f"Decode steps, {first['name']}", _steps(run["recordings"])),
    ):
        lines += pages.section(title, made)
    return pages.with_notes(lines, old)


def _sizes(recordings: Sequence[dict[str, Any]]) -> list[str]:
    head = ["cached", "uncached", *(f"{one['name']}, ms" for one in recordings), "us per token", "of peak"]
    by_size = [{(size["cached"], size["uncached"]): size for size in one["prefills"]} for one in recordings]
    shown = [size for size in by_size[0] if size[1] in SHOWN and all(size in one for one in by_size)]
    rows = []
    for cached, uncached in shown:
        sizes = [one[cached, uncached] for one in by_size]
        first_s = median(sizes[0]["seconds"])
        times = (_spread(size["seconds"]) for size in sizes)
        per_token, of_peak = number(first_s / uncached * 1e6), f"{sizes[0]['of_peak']:.0%}"
        rows.append([f"{cached:,}", f"{uncached:,}", *times, per_token, of_peak])
    text = "us per token and share of the peak (989 TFLOP/s, data sheet): of the first column of times."
    return [*table(head, rows, "r"), "", text]


def _whole(sizes: Sequence[dict[str, Any]]) -> list[str]:
    head = ("uncached", "ms [least..most]", "us per token")
    rows = (
        (
            f"{size['uncached']:,}",
            _spread(size["seconds"]),
            number(median(size["seconds"]) / size["uncached"] * 1e6),
        )
        for size in sizes
    )
    return table(head, rows, "r")


def _spread(seconds: Sequence[float]) -> str:
    middle = number(median(seconds) * 1e3)
    if len(seconds) == 1:
        return middle
    return f"{middle} [{number(min(seconds) * 1e3)}..{number(max(seconds) * 1e3)}]"


def _fits(run: dict[str, Any]) -> list[str]:
    known = [(one["name"], one["fits"]) for one in run["recordings"]]
    if "whole_fits" in run:
        known.append(("Llama 2 70B on two H100", run["whole_fits"]))
    head = ("timings", "coefficients", "counted as at least", "c0, ms", "a, us", "b, ns")
    rows = [
        [
            name,
            line["fit"],
            str(line["least"]),
            number(line["c0_s"] * 1e3),
            number(line["a_s"] * 1e6),
            number(line["b_s"] * 1e9),
            *(f"{line[key]:.0%}" for key in ("median", "p90", "worst")),
            f"{line['worst_at']['uncached']:,} ({line['worst_at']['off']:+.0%})",
        ]
        for name, lines in known
        for line in lines
    ]
    return [
        *table((*head, "error: median", "p90", "worst", "at uncached"), rows, "r"),
        "",
        "Errors are relative, estimate over time less 1. Counted as at least 256: a prefill of fewer uncached tokens is",
        "taken for one of 256.",
    ]


def _learnt(recording: dict[str, Any]) -> list[str]:
    after = list(recording["learnt"][0]["after"])
    asked = list(recording["learnt"][0]["asked"])
    head = [
        "uncached tokens that come",
        "counted as at least",
        *(f"after {count}" for count in after),
        *(f"{int(tokens):,} asked" for tokens in asked),
    ]
    rows = [
        [
            line["mix"],
            str(line["least"]),
            *(_pair(line["after"].get(count)) for count in after),
            *(f"{line['asked'][tokens]:+.0%}" for tokens in asked),
        ]
        for line in recording["learnt"]
    ]
    return [
        *table(head, rows, "r"),
        "",
        "`CostModel` from its prior, fed sizes drawn log-uniform from those timed, 60 runs of 128. After n: how far it was",
        "off for the next prefill, median and p90. Asked: its middle error, in the end of each run, for a prompt of so",
        "many tokens without anything in cache.",
    ]


def _pair(errors: dict[str, float] | None) -> str:
    return "" if errors is None else f"{errors['median']:.0%}, {errors['p90']:.0%}"


def _attention(rows: Sequence[dict[str, Any]]) -> list[str]:
    known = {(row["uncached"], row["cached"]): row for row in rows}
    chosen: list[dict[str, Any]] = []
    for uncached in dict.fromkeys(row["uncached"] for row in rows):
        depths = sorted(cached for tokens, cached in known if tokens == uncached)
        chosen += [
            known[uncached, cached]
            for cached in dict.fromkeys((depths[0], depths[len(depths) // 2], depths[-1]))
        ]
    cells = (
        (
            f"{row['uncached']:,}",
            f"{row['cached']:,}",
            number(row["seconds"] * 1e3),
            number(row["pair_s"] * 1e9),
        )
        for row in chosen
    )
    made = table(("uncached", "cached", "ms", "ns per pair"), cells, "r")
    text = "A pair: an uncached token and one in front of it, u (T - u / 2) of them. The form has one time for all pairs."
    return [*made, "", "An NVIDIA A100 80GB, FlashInfer.", text] if made else []


def _steps(recordings: Sequence[dict[str, Any]]) -> list[str]:
    known = [one for one in recordings if "steps" in one]
    if not known:
        return []
    times = {(step["batch"], step["context"]): median(step["seconds"]) for step in known[0]["steps"]["timed"]}
    contexts = [context for context in CONTEXTS if any(context == found for _, found in times)]
    rows = [
        [
            str(batch),
            *(number(times[at] * 1e3) if (at := (batch, context)) in times else "" for context in contexts),
        ]
        for batch in sorted({batch for batch, _ in times})
    ]
    made = [*table(["streams", *(f"{context:,} tokens, ms" for context in contexts)], rows, "r"), ""]
    for one in known:
        line = one["steps"]
        made.append(
            f"- {one['name']}: {number(line['base_s'] * 1e3)} ms + {number(line['stream_s'] * 1e6)} us per stream + "
            f"{number(line['token_s'] * 1e9)} ns per token of context over all streams is off by {line['median']:.0%} "
            f"(p90 {line['p90']:.0%}, worst {line['worst']:.0%}). One time for all, as the reference engine has it, "
            f"{number(line['constant_s'] * 1e3)} ms: {line['constant']['median']:.0%}, "
            f"worst {line['constant']['worst']:.0%}."
        )
    return made
