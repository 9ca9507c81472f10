"""One of the streams in which an engine tells of itself: its load, or its KV events. A shell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvmesh.triton.client import Responses, TritonClient, opened
from kvmesh.triton.errors import CallError
from kvmesh.triton.subscription_policy import SubscriptionPolicy
from kvmesh.triton.tensors import RequestTensors, payload_of

log = logging.getLogger(__name__)

RETRY_S: Final = 0.25
REPLY_TIMEOUT_S: Final = 1.5
"""A stream that is awaited and brings nothing for this long is opened again on another connection."""


class Subscription:
    """Opened again whenever it broke, or has brought so much that it costs the server memory. Owned by who calls `run`.

    `take` gets each message; one that it fails at breaks the stream. `reconnect` is to replace the connection.
    """

    def __init__(
        self,
        client: TritonClient,
        tensors: RequestTensors,
        what: str,
        take: Callable[[dict[str, Any]], None],
        reconnect: Callable[[], None],
    ) -> None:
        self.is_awaited: Callable[[], bool] = lambda: False
        """True while silence of this stream says that its connection is of no use."""
        self.on_broken: Callable[[], None] = lambda: None
        self._client = client
        self._tensors = tensors
        self._what = what
        self._take = take
        self._reconnect = reconnect
        self._policy = SubscriptionPolicy(what)

    async def run(self) -> None:
        """Follow until cancelled."""
        told, what = "", self._what
        while True:
            try:
                stream = self._client.stream(
                    self._tensors.of_service(), parameters=self._policy.open(), request_id=what
                )
                async with opened(stream):
                    is_long_enough = await self._read(stream)
                    told = ""
                if is_long_enough:
                    continue
                reason = "the stream ended"
            except CallError as error:
                reason = str(error)
            except TimeoutError:
                reason = f"no {what} for {REPLY_TIMEOUT_S:g} s"
                self._reconnect()
            except Exception as error:
                log.exception("engine stream %s cannot be read", what)
                reason = f"{type(error).__name__}"
            if reason != told:
                log.info("engine stream %s broke: %s", what, reason)
            told = reason
            self._policy.reset()
            self.on_broken()
            await asyncio.sleep(RETRY_S)

    async def _read(self, stream: Responses) -> bool:
        """Read until the stream ends. Return True as soon as the next one is to be opened instead."""
        while True:
            try:
                async with asyncio.timeout(REPLY_TIMEOUT_S if self.is_awaited() else None):
                    response = await anext(stream)
            except StopAsyncIteration:
                return self._policy.is_at_limit()
            payload = payload_of(response, self._what)
            if payload is None:
                continue
            message = msgspec.json.decode(payload, type=dict[str, Any])
            self._take(message)
            if self._policy.record(message, len(payload)):
                return True
