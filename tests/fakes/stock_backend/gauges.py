"""The `nv_trt_llm_*` families of Triton's /metrics, set from the last iteration of the engine.

Source: NVIDIA/TensorRT-LLM at 0d5352f5, custom_metrics_reporter.cc. Values are 0 before the first iteration. The last
iteration of a batch still has its requests, so an idle engine keeps showing them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import triton_python_backend_utils as pb_utils  # provided by Triton's Python stub

from engines.contract.outputs import LoadReport

REQUESTS: Final = "nv_trt_llm_request_metrics"
BLOCKS: Final = "nv_trt_llm_kv_cache_block_metrics"
FAMILIES: Final = {
    REQUESTS: ("request_type", ("active", "max", "scheduled", "context", "waiting")),
    BLOCKS: (
        "kv_cache_block_type",
        ("max", "free", "used", "tokens_per", "reused", "fraction"),
    ),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        ("total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"),
    ),
    "nv_trt_llm_general_metrics": ("general_type", ("timestamp", "iteration_counter")),
}
"""Label and values of each family."""


PERIOD_S: Final = 0.1
"""The stock backend's stats_check_period_ms."""


class StockGauges:
    """The gauges of one model. `requests_max`: largest number of running requests.

    `last_iteration` returns the load in the engine's last step; None before the first one. `start` once, `close` once.
    """

    def __init__(
        self,
        model: str,
        version: str,
        block_tokens: int,
        requests_max: int,
        last_iteration: Callable[[], LoadReport | None],
    ) -> None:
        self._last_iteration = last_iteration
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stock-gauges", daemon=True)
        self._block_tokens = block_tokens
        self._requests_max = requests_max
        self._families: list[Any] = []
        self._gauges: dict[tuple[str, str], Any] = {}
        for name, (label, values) in FAMILIES.items():
            family = pb_utils.MetricFamily(
                name=name, description=f"TRT LLM {label}", kind=pb_utils.MetricFamily.GAUGE
            )
            self._families.append(family)
            for value in values:
                labels = {label: value, "model": model, "version": version}
                self._gauges[name, value] = family.Metric(labels=labels)

    def start(self) -> None:
        """Start the thread that sets the gauges."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        seen = 0
        while not self._closed.wait(PERIOD_S):
            load = self._last_iteration()
            if load is not None and load.steps_total != seen:
                seen = load.steps_total
                self._show(load)

    def _show(self, load: LoadReport) -> None:
        self._set(BLOCKS, max=load.blocks_total, tokens_per=self._block_tokens)
        self._set("nv_trt_llm_general_metrics", iteration_counter=load.steps_total)
        running, waiting = load.sequences_running, load.sequences_waiting
        used = load.blocks_total - load.blocks_free
        self._set(BLOCKS, free=load.blocks_free, used=used, fraction=used / load.blocks_total)
        self._set(
            REQUESTS,
            active=running + waiting,
            max=self._requests_max,
            scheduled=running,
            waiting=waiting,
        )

    def _set(self, family: str, **values: float) -> None:
        for name, value in values.items():
            self._gauges[family, name].set(float(value))
