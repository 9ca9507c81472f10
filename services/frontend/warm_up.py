"""The start of a frontend: it serves once its tokenizers ran, the snapshot is in force, and a golden request came back.

`WarmUp` is the sink of the router links: each event goes to the core first, then to the golden requests. Once the start is
over it only passes the events on.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from kvmesh.attach.client import AttachLink
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.clock import Clock
from kvmesh.metrics import Metrics
from kvmesh.start import export_start, wait_for_start
from kvmesh.start_conditions import StartConditions
from services.frontend.golden_requests import COMPLETED, GoldenRequests, Target
from services.frontend.requests.core import FrontendCore
from services.frontend.surface.served_versions import ServedVersions

log = logging.getLogger(__name__)

TOKENIZERS: Final = "tokenizers"
SNAPSHOT: Final = "snapshot"
ROUTER: Final = "router link"
GOLDEN: Final = "golden request"

_OTHER: Final = "failed"


class WarmUp:
    """See the module. Implements attach.client.Sink. `run` is called once, while the links are open.

    `has_snapshot` is true if a snapshot is in force, or none is to be expected. `are_routers_known` is true if the leases
    were read, and each leased router has a link, up or down.
    """

    def __init__(
        self,
        core: FrontendCore,
        versions: ServedVersions,
        block_tokens: int,
        clock: Clock,
        metrics: Metrics,
        *,
        has_snapshot: Callable[[], bool],
        are_routers_known: Callable[[], bool],
    ) -> None:
        self.golden = GoldenRequests(core.peers, block_tokens, lambda: secrets.token_hex(16))
        self.conditions = StartConditions(
            (TOKENIZERS, SNAPSHOT, ROUTER, GOLDEN), clock.now_s(), renewed_by=ROUTER
        )
        self._core = core
        self._versions = versions
        self._clock = clock
        self._has_snapshot = has_snapshot
        self._are_routers_known = are_routers_known
        self._prompt_ids: dict[str, list[int]] = {}
        """Token ids of the fixed text, by version. Empty until the tokenizers ran."""
        export_start(self.conditions, metrics)
        text = "Golden requests of the start of the frontend, by outcome."
        for outcome in (COMPLETED, _OTHER):
            metrics.total("golden_requests", text, partial(self._ended, outcome), outcome=outcome)

    async def run(self, tell: Callable[[str], Awaitable[None]]) -> None:
        """Return once the frontend may serve. `tell` takes the reason why it does not, after each change."""
        running = asyncio.create_task(self._run_tokenizers(), name="tokenizers")
        try:
            await wait_for_start(self.conditions, self._holds, self._clock, tell)
        finally:
            running.cancel()
            self.golden.give_up(self._clock.now_s())
        for each in self.golden.all:
            log.log(
                logging.INFO if each.outcome == COMPLETED else logging.WARNING,
                "golden request ended",
                extra={
                    "pool": each.pool,
                    "router": each.router,
                    "outcome": each.outcome,
                    "first_token_s": round(each.first_token_s, 4),
                    "seconds": round(each.seconds, 4),
                },
            )

    async def _run_tokenizers(self) -> None:
        try:
            self._prompt_ids = await asyncio.to_thread(self._versions.run_tokenizers)
        except Exception:  # the condition stays unmet, and the bound ends the wait
            log.exception("a tokenizer failed")

    def _holds(self, now_s: float) -> dict[str, bool]:
        """Send the golden requests that can be sent, and return the present state of each condition."""
        are_tokenizers_run = bool(self._prompt_ids)
        is_linked = self._is_linked()
        if are_tokenizers_run and is_linked:
            self.golden.send(self._targets(), now_s)
        return {
            TOKENIZERS: are_tokenizers_run,
            SNAPSHOT: self._has_snapshot(),
            ROUTER: is_linked,
            GOLDEN: are_tokenizers_run and is_linked and not len(self.golden),
        }

    def _is_linked(self) -> bool:
        """True if a router of the stable pool is up, or no such router has a lease."""
        routers = self._core.peers.of_pool(self._core.pools.stable)
        return any(peer.link.is_up for peer in routers) or (not routers and self._are_routers_known())

    def _targets(self) -> list[Target]:
        """Return the pools that may get requests."""
        return [
            Target(
                track.pool,
                track.model_version,
                self._prompt_ids[track.model_version],
                self._versions[track.model_version].tokenizer.vocab_size,
            )
            for track in self._core.pools.content.pools
            if track.model_version in self._prompt_ids and not track.is_closed
        ]

    def _ended(self, outcome: str) -> float:
        completed = self.golden.ended[COMPLETED]
        return completed if outcome == COMPLETED else self.golden.ended.total() - completed

    # Sink.

    def on_attached(self, link: AttachLink, peer: pb.Hello, now_s: float) -> None:
        """See attach.client.Sink."""
        self._core.on_attached(link, peer, now_s)

    def on_response(self, link: AttachLink, message: pb.AttachResponse, now_s: float) -> None:
        """See attach.client.Sink."""
        self._core.on_response(link, message, now_s)
        if len(self.golden):
            self.golden.on_response(link.name, message, now_s)

    def on_lost(self, link: AttachLink, reason: str, now_s: float) -> None:
        """See attach.client.Sink."""
        self._core.on_lost(link, reason, now_s)
        self.golden.on_lost(link.name, now_s)
