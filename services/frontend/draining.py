"""Graceful shutdown of a frontend: it refuses new requests, hands over streams that can move, and waits for all others.

A stream can move if its client can (`RequestSpec.can_move`), its attempt has a token, and another frontend is there. The
client then continues at that frontend, which takes over the running attempt. No token is computed again. Any other
stream stays until it ends or the drain ends.

A gRPC client sends all calls to one address over one connection, and a long stream keeps that connection. So a client with
the address of a load balancer alone would send each new request to this frontend. Therefore the connections are ended for
new calls (GOAWAY). New connections are taken: clients check the health of a frontend whose stream is silent.

The end of a whole mesh drains all frontends at once. Each one therefore waits for the news that the others drain, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvmesh.clock import Clock
from services.frontend.requests.core import FrontendCore

CHECK_INTERVAL_S: Final = 0.05
NEWS_S: Final = 1.0
"""Time until streams are handed over. Leases of frontends that drain at the same time say so well before."""
BATCH: Final = 32
"""Most streams that are handed over at one check, because their takeovers arrive together."""


async def drain(
    core: FrontendCore,
    clock: Clock,
    has_other: Callable[[], bool],
    timeout_s: float,
    send_clients_on: Callable[[], None] | None = None,
) -> None:
    """Return when no request and no handler is left, at most after `timeout_s`.

    Streams that still run then are handed over, movable or not. `has_other`: True if another frontend takes requests.
    `send_clients_on`: ends the present connections for new calls. Called at most once. None: the frontend may take
    requests again.
    """
    core.is_draining = True
    news_s = clock.now_s() + NEWS_S
    until_s = clock.now_s() + timeout_s
    while core.admitted.serving or core.admitted.leaving or core.admitted.has_handlers:
        now_s = clock.now_s()
        if now_s >= until_s:
            core.hand_over(list(core.admitted.serving), now_s)
            return
        if now_s >= news_s and has_other():
            # A request that still waits for its first token keeps its position in the queue.
            movable = [
                each
                for each in core.admitted.serving
                if each.spec.execution.can_move and each.location is not None
            ]
            core.hand_over(movable[:BATCH], now_s)
            if send_clients_on is not None:
                send_clients_on()
                send_clients_on = None
        await asyncio.sleep(CHECK_INTERVAL_S)
