"""Polls Triton's /metrics for the load of an engine that does not report it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvmesh.metrics_page import NoMetrics, read_page
from kvmesh.triton.port import EngineLoad
from kvmesh.triton.server_metrics import PAGE_BYTES_MAX, ServerMetrics, measured_load, read_metrics

log = logging.getLogger(__name__)

POLL_S: Final = 0.5
"""Interval of the polls. A load is stale after kvmesh.replica.engine_view.FRESH_S."""


class MetricsPoll:
    """The polls of one engine. The task of `run` owns them.

    `take` gets each load. `open_calls` returns the calls of this replica in the engine.
    """

    def __init__(
        self, address: str, model: str, take: Callable[[EngineLoad], None], open_calls: Callable[[], int]
    ) -> None:
        self._address = address
        self._model = model
        self._take = take
        self._open_calls = open_calls

    async def run(self) -> None:
        """Poll until cancelled. A page that cannot be read is logged once; without it the load is unknown."""
        before: ServerMetrics | None = None
        logged = ""
        while True:
            reason = ""
            try:
                page = await read_page(self._address, bytes_max=PAGE_BYTES_MAX)
                found = read_metrics(page, self._model)
                load = measured_load(found, before, self._open_calls())
                before = found
                if load is not None:
                    self._take(load)
            except NoMetrics as error:
                reason = str(error)
            if reason and reason != logged:
                log.warning("http://%s/metrics cannot be read: %s", self._address, reason)
            logged = reason
            await asyncio.sleep(POLL_S)
