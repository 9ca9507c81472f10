"""Findings of recordings about the router's cost model, as one dictionary for page and JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from bench.gpu.form import Fit, fit, fit_steps
from bench.gpu.learning import MIXES, RUNS, SEEN, Learnt, learn, learn_mix
from bench.gpu.recording import Prefill, Recording
from bench.gpu.shape import H100_FLOPS, LLAMA_8B
from services.router.placement.cost_model import PRIOR

LEAST: Final = (1, 256)
"""Least numbers of tokens that a prefill counts as.

1 is that of the router. With fewer than about 256 tokens, an H100 mostly reads the weights, whatever the number.
"""
SHOWN: Final = (1, 16, 64, 128, 192, 256, 257, 512, 768, 1024, 2048, 4096, 8192, 16_384, 32_768)
ASKED: Final = (1024, 4096, 8192, 16_384)
"""Lengths of prompts without cached tokens that the cost model estimates after each run, seen or unseen."""


def of_recording(recording: Recording, runs: int = RUNS) -> dict[str, Any]:
    """Return sizes, fits, errors of the learned model and, if there are any, decode steps."""
    asked = [one for one in recording.prefills if not one.cached and one.uncached in ASKED]
    found: dict[str, Any] = {
        "name": recording.name,
        "about": recording.about,
        "prefills": [_size(prefill) for prefill in recording.prefills],
        "fits": fits(recording.prefills),
        "learnt": [
            {
                "mix": mix.name,
                "least": least,
                **_learnt(learn_mix(recording.prefills, mix, asked, least, runs)),
            }
            for mix in MIXES
            if mix.inside(recording.prefills)
            for least in LEAST
        ],
    }
    if recording.sequence:
        starts = range(0, len(recording.sequence), SEEN)
        parts = [recording.sequence[start : start + SEEN] for start in starts]
        found["learnt"] += [
            {"mix": "as it ran", "least": least, **_learnt(learn(parts, asked, least=least))}
            for least in LEAST
        ]
    if recording.steps:
        found["steps"] = _steps(recording)
    return found


def fits(prefills: Sequence[Prefill]) -> list[dict[str, Any]]:
    """Return the prior and the best fits with their errors."""
    prior = Fit(*PRIOR)
    lines = [("as shipped", prior), *(("best", fit(prefills, least)) for least in LEAST)]
    return [
        {"fit": name, **asdict(line), **line.errors(prefills)._asdict(), "worst_at": _worst(line, prefills)}
        for name, line in lines
    ]


def attention(prefills: Sequence[Prefill]) -> list[dict[str, Any]]:
    """Return one layer's attention cost per pair of tokens, by cached tokens."""
    return [
        {
            "uncached": prefill.uncached,
            "cached": prefill.cached,
            "seconds": prefill.median_s,
            "pair_s": prefill.median_s / (prefill.uncached * (prefill.total - prefill.uncached / 2)),
        }
        for prefill in prefills
    ]


def _size(prefill: Prefill) -> dict[str, Any]:
    flops = LLAMA_8B.prefill_flops(prefill.uncached, prefill.total)
    return {**asdict(prefill), "of_peak": flops / prefill.median_s / H100_FLOPS}


def _worst(line: Fit, prefills: Sequence[Prefill]) -> dict[str, Any]:
    worst = max(prefills, key=lambda prefill: abs(line.off(prefill)))
    return {"cached": worst.cached, "uncached": worst.uncached, "off": line.off(worst)}


def _learnt(learnt: Learnt) -> dict[str, Any]:
    return {
        "after": {str(count): errors._asdict() for count, errors in learnt.after.items()},
        "asked": {str(tokens): off for tokens, off in learnt.beyond.items()},
    }


def _steps(recording: Recording) -> dict[str, Any]:
    line = fit_steps(recording.steps)
    return {
        "timed": [asdict(step) for step in recording.steps],
        "base_s": line.base_s,
        "stream_s": line.stream_s,
        "token_s": line.token_s,
        **line.errors._asdict(),
        "constant_s": line.constant_s,
        "constant": line.constant_errors._asdict(),
    }
