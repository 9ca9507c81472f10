"""Sizes and load of an engine's KV cache, from Triton's /metrics. Pure.

Families: `nv_trt_llm_*` of TensorRT-LLM's C++ backend (NVIDIA/TensorRT-LLM at 0d5352f5, custom_metrics_reporter.cc), and
`nv_inference_pending_request_count` of Triton. The page is input of another process: unknown lines and bad numbers are
skipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvmesh.triton.port import EngineLoad

PAGE_BYTES_MAX: Final = 1 << 20
"""Longest page that is read. A server with one model has some 10 kB."""

LINES_MAX: Final = 10_000
"""Lines of a page that are looked at. A model has some 50."""

SAMPLES_MAX: Final = 500
"""Lines of the model and of a known family that are parsed, each with up to 1,000 characters of labels."""

_BLOCKS: Final = "nv_trt_llm_kv_cache_block_metrics"
_REQUESTS: Final = "nv_trt_llm_request_metrics"
_GENERAL: Final = "nv_trt_llm_general_metrics"
_PENDING: Final = "nv_inference_pending_request_count"
_KINDS: Final = {
    _BLOCKS: "kv_cache_block_type",
    _REQUESTS: "request_type",
    _GENERAL: "general_type",
    _PENDING: "",
}
"""Label with the kind of the value; empty: the family has one value."""

LINE_BYTES_MAX: Final = 4096
"""Beginning of a line that is parsed."""

_LINE: Final = re.compile(rf"({'|'.join(_KINDS)})\{{([^}}]{{0,1000}})\}} ([^ ]{{1,40}})")
_LABEL: Final = re.compile(r'(?:^|,)(\w{1,60})="([^"\\]{0,200})"')
_STARTS: Final = tuple(f"{family}{{".encode() for family in _KINDS)
_COUNT_MAX: Final = 1 << 53


@dataclass(frozen=True, slots=True)
class ServerMetrics:
    """Values of one model. 0 or None: not told.

    TensorRT-LLM sets its values after an iteration. They are 0 before the first one, and old while the engine is idle.
    """

    blocks_total: int = 0
    block_tokens: int = 0
    blocks_free: int | None = None
    running: int | None = None
    """Requests that the engine computes."""
    waiting: int | None = None
    """Requests that wait inside the engine."""
    pending: int = 0
    """Requests that wait in Triton, before the engine."""
    iterations: int | None = None
    """Steps since the engine's start."""


def measured_load(metrics: ServerMetrics, before: ServerMetrics | None, open_calls: int) -> EngineLoad | None:
    """Return the load that `metrics` tell; None: they tell no KV cache.

    `before`: the metrics of the poll before. `open_calls`: calls of this replica in the engine. An engine that made no
    iteration since, and has no call, is idle: its gauges still show its last iteration.
    """
    total, free = metrics.blocks_total, metrics.blocks_free
    if not total or free is None:
        return None
    is_idle = before is not None and metrics.iterations == before.iterations and not open_calls
    if is_idle:
        return EngineLoad("", total, total, sequences_waiting=metrics.pending)
    return EngineLoad(
        "",
        total,
        min(free, total),
        sequences_running=metrics.running or 0,
        sequences_waiting=(metrics.waiting or 0) + metrics.pending,
    )


def read_metrics(page: bytes, model: str) -> ServerMetrics:
    """Return what `page` tells of `model`. The first of several versions counts."""
    told: dict[tuple[str, str], int] = {}
    for family, labels, value in _samples(page[:PAGE_BYTES_MAX], model):
        if labels.get("model") == model:
            told.setdefault((family, labels.get(_KINDS[family], "")), value)
    active = told.get((_REQUESTS, "active"))
    waiting = told.get((_REQUESTS, "waiting"))
    running = told.get((_REQUESTS, "scheduled"))
    if running is None and active is not None:
        running = max(0, active - (waiting or 0))
    return ServerMetrics(
        blocks_total=told.get((_BLOCKS, "max"), 0),
        block_tokens=told.get((_BLOCKS, "tokens_per"), 0),
        blocks_free=told.get((_BLOCKS, "free")),
        running=running,
        waiting=waiting,
        pending=told.get((_PENDING, ""), 0),
        iterations=told.get((_GENERAL, "iteration_counter")),
    )


def _samples(page: bytes, model: str) -> Iterator[tuple[str, dict[str, str], int]]:
    """Yield family, labels and value of each known line that may be of `model`, within LINES_MAX and SAMPLES_MAX."""
    label, parsed = f'model="{model}"'.encode(), 0
    for line in page.split(b"\n", LINES_MAX)[:LINES_MAX]:
        if not line.startswith(_STARTS) or label not in line:
            continue
        parsed += 1
        if parsed > SAMPLES_MAX:
            return
        match = _LINE.match(line[:LINE_BYTES_MAX].decode("utf-8", errors="replace"))
        if match is None:
            continue
        value = _count(match[3])
        if value is not None:
            yield match[1], dict(_LABEL.findall(match[2])), value


def _count(text: str) -> int | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if math.isfinite(value) and 0 <= value < _COUNT_MAX else None
