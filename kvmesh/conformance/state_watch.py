"""Watches the load of an engine: by its load reports, or by Triton's page /metrics.

Metrics of TensorRT-LLM change only while the engine runs steps. So this watch sends a call of two tokens before each look,
and allows for its blocks.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, Protocol

from kvmesh.conformance.engine_state import (
    EngineState,
    Freeing,
    Slack,
    Traffic,
    state_of_metrics,
    state_of_report,
)
from kvmesh.conformance.prompts import Prompts
from kvmesh.conformance.session import Session
from kvmesh.conformance.verdict import Judged, not_judged
from kvmesh.metrics_page import NoMetrics, read_page
from kvmesh.triton.errors import EngineLost
from kvmesh.triton.server_metrics import PAGE_BYTES_MAX, ServerMetrics, read_metrics
from kvmesh.triton.subscription_policy import RENEW_BYTES

STABLE_S: Final = 0.15
"""A state counts once it has stayed for this long: a load report follows a change within 50 ms."""

QUIET_S: Final = 3.0
"""Longest wait for an engine without requests before a check."""

RETRY_S: Final = 0.25
HEARTBEAT_S: Final = 1.0
"""Longest time between two load reports."""

STALE_S: Final = 3.0
"""An older load report tells nothing."""

POKE_TOKENS: Final = 8
STATS_S: Final = 0.15
"""TensorRT-LLM's backend publishes its metrics every 100 ms."""

FETCH_S: Final = 3.0


class Source(Protocol):
    """Where states come from."""

    slack: Slack
    look_s: float
    """Time that one look may take."""
    most: int
    """Largest number of requests in a state since it was set to 0."""

    async def look(self) -> EngineState:
        """Return the present state. Raises CallError, or Judged if no state can be read."""
        ...


class ReportSource:
    """States from load reports. `run` follows them until cancelled."""

    slack = Slack()
    look_s = 0.05

    def __init__(self, session: Session) -> None:
        self._session = session
        self.most = 0
        self._state: EngineState | None = None
        self._came = asyncio.Event()
        self._seen_s = 0.0
        """When the last report came."""

    async def run(self) -> None:
        """Follow the reports. A stream that ends is opened again."""
        while True:
            with suppress(KeyError, TypeError, ValueError):
                async with self._session.subscribed("load_report", max_bytes=str(RENEW_BYTES)) as messages:
                    while not messages.is_over:
                        if report := await messages.get(HEARTBEAT_S):
                            self._state = state_of_report(report)
                            self.most = max(self.most, self._state.requests)
                            self._seen_s = asyncio.get_running_loop().time()
                            self._came.set()
            await asyncio.sleep(RETRY_S)

    async def look(self) -> EngineState:
        """See Source. Waits for the first report, and for up to `look_s` for a later one."""
        if self._state and asyncio.get_running_loop().time() - self._seen_s > STALE_S:
            raise Judged(not_judged(f"no load report came for {STALE_S:g} s"))
        try:
            async with asyncio.timeout(self.look_s if self._state else FETCH_S):
                self._came.clear()
                await self._came.wait()
        except TimeoutError:
            if self._state is None:
                fault = f"no load report that can be read came within {FETCH_S:g} s"
                raise Judged(not_judged(fault)) from None
        assert self._state is not None
        return self._state


class MetricsSource:
    """States from /metrics at `address`."""

    slack = Slack(blocks=2, requests=1)
    look_s = STATS_S + 0.1

    def __init__(self, session: Session, address: str, prompts: Prompts) -> None:
        self.most = 0
        self._session = session
        self._address = address
        self._prompts = prompts

    async def look(self) -> EngineState:
        """See Source."""
        state = state_of_metrics(await self.poke())
        if state is None:
            raise EngineLost(f"http://{self._address}/metrics has no KV blocks of the model")
        self.most = max(self.most, state.requests)
        return state

    async def poke(self) -> ServerMetrics:
        """Send a call of two tokens, and return the metrics behind it. Raises CallError."""
        answer = await self._session.ask(self._prompts.draw(POKE_TOKENS), 2)
        if answer.error is not None:
            raise answer.error
        await asyncio.sleep(STATS_S)
        return await metrics_at(self._address, self._session.offer.model)


class StateWatch:
    """Compares states of an engine before and behind a check."""

    def __init__(self, source: Source, session: Session) -> None:
        self.source = source
        self._session = session
        self.was_quiet = False
        """True if no request ran for a while before the last `begin` returned."""

    async def begin(self, wait_s: float = QUIET_S) -> EngineState:
        """Wait until the engine is quiet, for up to `wait_s`, and return its state. Raises CallError."""
        begun_s = quiet_since_s = asyncio.get_running_loop().time()
        state = await self.source.look()
        while True:
            now_s = asyncio.get_running_loop().time()
            if state.requests > self.source.slack.requests:
                quiet_since_s = now_s
            self.was_quiet = now_s - quiet_since_s >= 2 * STABLE_S
            if self.was_quiet or now_s - begun_s >= wait_s:
                break
            before, state = state, await self.source.look()
            if state.blocks_used != before.blocks_used:
                quiet_since_s = asyncio.get_running_loop().time()
        self.source.most = self._session.most_open = 0
        return state

    async def until_back(self, start: EngineState, timeout_s: float) -> Freeing:
        """Watch until the engine is back at `start` and stays so, for up to `timeout_s`. Raises CallError."""
        begun_s = asyncio.get_running_loop().time()
        back_s: float | None = None
        while True:
            state = await self.source.look()
            now_s = asyncio.get_running_loop().time()
            if not self.source.slack.is_back(state, start):
                back_s = None
            elif back_s is None:
                back_s = now_s
            if back_s is not None and now_s - back_s >= STABLE_S:
                return Freeing(start, state, back_s - begun_s, True, self._traffic())
            if now_s - begun_s >= timeout_s and back_s is None:
                return Freeing(start, state, now_s - begun_s, False, self._traffic())

    async def reaches(self, start: EngineState, handoffs: int, timeout_s: float) -> bool:
        """Watch until the engine holds `handoffs` more handoffs than at `start`, or more blocks."""
        begun_s = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() - begun_s < timeout_s:
            state = await self.source.look()
            if state.handoffs >= start.handoffs + handoffs or state.blocks_used > start.blocks_used:
                return True
        return False

    def _traffic(self) -> Traffic:
        most_open = self._session.most_open
        # An engine may still count calls that were cancelled a moment ago, beside their successors.
        own_most = (most_open if most_open <= 1 else 2 * most_open) + self.source.slack.requests
        return Traffic(self.was_quiet, self.source.most, own_most)


async def metrics_at(address: str, model: str) -> ServerMetrics:
    """Return what the page /metrics of the server at `address` ("host:port") tells of a model. Raises EngineLost."""
    try:
        return read_metrics(await read_page(address, FETCH_S, bytes_max=PAGE_BYTES_MAX), model)
    except NoMetrics as error:
        raise EngineLost(f"http://{address}/metrics cannot be read: {error}") from None
