"""The page of a fit: tables in Markdown, and the hand-written end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Final

from bench import pages
from bench.gpu.findings import SHOWN
from bench.pages import number, table

TITLE: Final = "# Prefill cost on a GPU, and the router's estimate of it"
QUESTION: Final = """\
**Question.** For a prefill of u uncached of T tokens, the router estimates c0 + u (a + b (T - u / 2)) seconds. It learns
the three coefficients from observed prefills, and starts from a prior
([decision 0019](../decisions/0019-placement-cost.md)). Does a GPU take that time?"""
PUBLISHED: Final = """\
**Source of the timings.** The timings are published ones ([sources](../../bench/gpu/published/README.md)): matrix products
and attention of an 8B Llama on an NVIDIA H100 80GB in bf16. Three engines run them, one operator at a time. This page adds
them up over 32 layers. An engine also spends time on norms, launches and scheduling. `python -m bench.gpu measure` times a
whole model. It has run on a CPU only, with a small model. There, a prefill in two parts gave the same logits as a whole
one. No run of it on a GPU is recorded here."""
CONTEXTS: Final = (128, 1024, 2048, 4096, 8192, 16_384, 32_768)


def page(run: dict[str, Any], old: str = "") -> str:
    """Return the page. `old`: the previous page; its hand-written end is kept."""
    origin = f"Written by `{run['command']}`, {run['date']}, commit {run['commit']}."
    lines = [TITLE, "", origin, "", QUESTION, "", *((PUBLISHED, "") if run["is_published"] else ())]
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
    text = "us per token and share of the peak (989 TFLOP/s, data sheet) belong to the first column of times."
    return [*table(head, rows, "r"), "", text]


def _whole(sizes: Sequence[dict[str, Any]]) -> list[str]:
    head = ("uncached", "ms [least..most]", "us per token")
    rows = []
    for size in sizes:
        tokens, per_token_s = size["uncached"], median(size["seconds"]) / size["uncached"]
        rows.append((f"{tokens:,}", _spread(size["seconds"]), number(per_token_s * 1e6)))
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
    rows = []
    for name, line in ((name, line) for name, lines in known for line in lines):
        coefficients = (number(line["c0_s"] * 1e3), number(line["a_s"] * 1e6), number(line["b_s"] * 1e9))
        errors = (f"{line[key]:.0%}" for key in ("median", "p90", "worst"))
        worst_at = f"{line['worst_at']['uncached']:,} ({line['worst_at']['off']:+.0%})"
        rows.append((name, line["fit"], str(line["least"]), *coefficients, *errors, worst_at))
    return [
        *table((*head, "error: median", "p90", "worst", "at uncached"), rows, "r"),
        "",
        "An error is relative: estimate / time - 1. Counted as at least 256: a prefill of fewer uncached tokens counts as",
        "one of 256.",
    ]


def _learnt(recording: dict[str, Any]) -> list[str]:
    after = list(recording["learnt"][0]["after"])
    asked = list(recording["learnt"][0]["asked"])
    columns = (*(f"after {count}" for count in after), *(f"{int(tokens):,} asked" for tokens in asked))
    head = ("uncached tokens of the prompts", "counted as at least", *columns)
    rows = []
    for line in recording["learnt"]:
        errors = (_pair(line["after"].get(count)) for count in after)
        rows.append(
            (line["mix"], str(line["least"]), *errors, *(f"{line['asked'][one]:+.0%}" for one in asked))
        )
    return [
        *table(head, rows, "r"),
        "",
        "`CostModel` starts from its prior. 60 runs feed it 128 sizes each, drawn log-uniform from those timed. After n:",
        "error of the estimate for the next prefill, median and p90. Asked: median error, at the end of each run, for a",
        "prompt of that many tokens without anything in cache.",
    ]


def _pair(errors: dict[str, float] | None) -> str:
    return "" if errors is None else f"{errors['median']:.0%}, {errors['p90']:.0%}"


def _attention(rows: Sequence[dict[str, Any]]) -> list[str]:
    known = {(row["uncached"], row["cached"]): row for row in rows}
    cells = []
    for uncached in dict.fromkeys(row["uncached"] for row in rows):
        depths = sorted(cached for tokens, cached in known if tokens == uncached)
        for cached in dict.fromkeys((depths[0], depths[len(depths) // 2], depths[-1])):
            row = known[uncached, cached]
            times = (number(row["seconds"] * 1e3), number(row["pair_s"] * 1e9))
            cells.append((f"{uncached:,}", f"{cached:,}", *times))
    made = table(("uncached", "cached", "ms", "ns per pair"), cells, "r")
    text = "A pair is an uncached token and one before it; there are u (T - u / 2). The form has one time for all pairs."
    return [*made, "", "An NVIDIA A100 80GB, FlashInfer.", text] if made else []


def _steps(recordings: Sequence[dict[str, Any]]) -> list[str]:
    known = [one for one in recordings if "steps" in one]
    if not known:
        return []
    times = {(step["batch"], step["context"]): median(step["seconds"]) for step in known[0]["steps"]["timed"]}
    contexts = [context for context in CONTEXTS if any(context == found for _, found in times)]
    rows = []
    for batch in sorted({batch for batch, _ in times}):
        cells = (number(times[batch, one] * 1e3) if (batch, one) in times else "" for one in contexts)
        rows.append((str(batch), *cells))
    made = [*table(["streams", *(f"{context:,} tokens, ms" for context in contexts)], rows, "r"), ""]
    for one in known:
        line = one["steps"]
        made.append(
            f"- {one['name']}: {number(line['base_s'] * 1e3)} ms + {number(line['stream_s'] * 1e6)} us per stream + "
            f"{number(line['token_s'] * 1e9)} ns per token of context over all streams. The error is "
            f"{line['median']:.0%} (p90 {line['p90']:.0%}, worst {line['worst']:.0%}). With one time for all steps, as in "
            f"the reference engine, {number(line['constant_s'] * 1e3)} ms, the error is {line['constant']['median']:.0%} "
            f"(worst {line['constant']['worst']:.0%})."
        )
    return made
