"""The load of the engine: TensorRT-LLM's iteration statistics and own counts in, load reports out. Pure.

The JSON of an iteration has "iter", "iterLatencyMS" and "kvCacheStats" with "maxNumBlocks", "freeNumBlocks" and
"tokensPerBlock" (docs/source/commands/trtllm-serve/trtllm-serve.rst; base_worker.py@000bd1a6, _stats_serializer). Only an
iteration makes statistics, so those of an idle engine are old.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.contract.outputs import LoadReport

_SMOOTHING = 0.1


@dataclass(slots=True)
class Load:
    """Counts of one engine. `blocks_total`: blocks that the model's configuration tells."""

    boot_id: str
    blocks_total: int
    sequences_max: int
    transfer_timeout_s: float
    open_requests: int = 0  # submitted to TensorRT-LLM and not ended there, cancelled ones included
    prefill_tokens_computed: int = 0
    prefill_tokens_cached: int = 0
    tokens_generated: int = 0
    _blocks_free: int | None = None
    _steps: int = 0
    _step_s_ewma: float = 0.0
    _held_until_s: float = float("-inf")  # no handoff is held from here on

    def add_iteration(self, told: Mapping[str, Any]) -> None:
        """Take the statistics of one iteration."""
        self._steps = int(told.get("iter", self._steps))
        step_s = float(told.get("iterLatencyMS", 0.0)) / 1000
        if step_s > 0.0:
            share = _SMOOTHING if self._step_s_ewma else 1.0
            self._step_s_ewma += (step_s - self._step_s_ewma) * share
        cache = told.get("kvCacheStats") or {}
        if "maxNumBlocks" in cache and "freeNumBlocks" in cache:
            self.blocks_total = int(cache["maxNumBlocks"])
            self._blocks_free = int(cache["freeNumBlocks"])

    def add_handoff(self, now_s: float) -> None:
        """Record that a handoff was made: its blocks are held until they are fetched, or until the transfer timeout."""
        self._held_until_s = now_s + self.transfer_timeout_s

    def report(self, cached: int, now_s: float) -> LoadReport:
        """Return the load at `now_s`. `cached`: known blocks of the prefix cache.

        TensorRT-LLM does not tell which handoffs are held. Their blocks are missing among the free ones. An engine without
        requests and handoffs has all blocks free, whatever its last iteration said.
        """
        is_idle = not self.open_requests and now_s >= self._held_until_s
        free = self.blocks_total if is_idle or self._blocks_free is None else self._blocks_free
        return LoadReport(
            boot_id=self.boot_id,
            blocks_total=self.blocks_total,
            blocks_free=min(free, self.blocks_total),
            blocks_cached=cached,
            sequences_running=min(self.open_requests, self.sequences_max),
            sequences_waiting=max(0, self.open_requests - self.sequences_max),
            handoffs_held=0,
            handoff_blocks=0,
            prefill_tokens_computed_total=self.prefill_tokens_computed,
            prefill_tokens_cached_total=self.prefill_tokens_cached,
            steps_total=self._steps,
            step_s_ewma=self._step_s_ewma,
            tokens_generated_total=self.tokens_generated,
        )
