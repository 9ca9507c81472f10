"""Reads the facts of an engine from its model, the configuration, and Triton's /metrics."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvmesh.attach import frames
from kvmesh.metrics_page import NoMetrics, read_page
from kvmesh.triton.capabilities import ModelFacts, ModelRefused
from kvmesh.triton.client import TritonClient
from kvmesh.triton.fact_sources import NO_METRICS, ConfiguredFacts, MetricsFound
from kvmesh.triton.port import CallKind, EngineCall
from kvmesh.triton.server_metrics import PAGE_BYTES_MAX, read_metrics
from kvmesh.triton.tensors import RequestTensors

log = logging.getLogger(__name__)

FIRST_ITERATION_S: Final = 3.0
"""Time after one request until /metrics must tell the sizes of the KV cache. TensorRT-LLM sets them each 100 ms."""

POLL_S: Final = 0.1

PAGE_TRIES: Final = 4
"""Reads of /metrics until the engine is refused for a page that cannot be read. A loaded server may be slow once."""

PAGE_RETRY_S: Final = 0.5
"""Time from a failed read of the page to the next one."""

_FIRST_TOKEN: Final = 1
"""The prompt of that request: any token id that each vocabulary has."""


class FactsReader:
    """Reads the facts of one engine, as often as asked for."""

    def __init__(
        self,
        client: TritonClient,
        *,
        role: str,
        model_version: str,
        block_tokens: int,
        configured: ConfiguredFacts,
        metrics_address: str,
    ) -> None:
        """`model_version` and `block_tokens` are those of the mesh. `metrics_address`: "host:port"; empty: unknown."""
        self._client = client
        self._role = role
        self._model_version = model_version
        self._block_tokens = block_tokens
        self._configured = configured
        self._address = metrics_address

    async def read(self) -> ModelFacts:
        """Return the facts. Raises ModelRefused, or CallError if the engine does not answer.

        If facts are missing and /metrics cannot be read, the page is read again, up to PAGE_TRIES times in all. The
        gauges of TensorRT-LLM are 0 before the first iteration of the engine. If only they are missing, the engine gets
        one request for one token.
        """
        found = await self._metrics()
        for _ in range(PAGE_TRIES - 1):
            try:
                return await self._facts(found)
            except ModelRefused as refused:
                if not refused.lacks_metrics or not found.address:
                    raise
                if found.metrics is not None:
                    break
            log.info("http://%s/metrics is read again: %s", found.address, found.reason)
            await asyncio.sleep(PAGE_RETRY_S)
            found = await self._metrics()
        if found.metrics is not None and not found.metrics.blocks_total:
            await self._run_one_iteration()
            found = await self._metrics_after_iteration()
        return await self._facts(found)

    async def _facts(self, found: MetricsFound) -> ModelFacts:
        return await self._client.facts(
            role=self._role,
            model_version=self._model_version,
            block_tokens=self._block_tokens,
            configured=self._configured,
            metrics=found,
        )

    async def _metrics(self) -> MetricsFound:
        if not self._address:
            return NO_METRICS
        try:
            page = await read_page(self._address, bytes_max=PAGE_BYTES_MAX)
        except NoMetrics as error:
            return MetricsFound(self._address, reason=str(error))
        return MetricsFound(self._address, read_metrics(page, self._client.model))

    async def _metrics_after_iteration(self) -> MetricsFound:
        found = NO_METRICS
        for _ in range(round(FIRST_ITERATION_S / POLL_S)):
            found = await self._metrics()
            if found.metrics is not None and found.metrics.blocks_total:
                break
            await asyncio.sleep(POLL_S)
        return found

    async def _run_one_iteration(self) -> None:
        log.info("the engine gets one request: its /metrics tells the KV cache after the first iteration")
        metadata, _ = await self._client.describe()
        tensors = RequestTensors(frozenset(one.name for one in metadata.inputs))
        call = EngineCall(
            CallKind.CONTEXT_AND_GENERATION, "first-iteration", frames.pack_ids((_FIRST_TOKEN,)), 1
        )
        await self._client.request_once(tensors.of_call(call), request_id=call.request_id)
