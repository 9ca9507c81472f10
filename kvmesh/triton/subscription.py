"""A stream of load reports or KV events from an engine. `subscription_policy` decides when it is renewed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from kvmesh.triton.client import Responses, TritonClient, opened
from kvmesh.triton.errors import CallError
from kvmesh.triton.service_messages import decoder
from kvmesh.triton.subscription_policy import SubscriptionPolicy
from kvmesh.triton.tensors import RequestTensors, payload_of

log = logging.getLogger(__name__)

RETRY_S: Final = 0.25
REPLY_TIMEOUT_S: Final = 1.5
"""An awaited stream without a message for this long is opened again on another connection."""

REPLY_TIMEOUT_S_MAX: Final = 12.0
"""The time doubles up to this after each silent stream. On a busy machine an engine that comes back answers slowly."""


class Subscription:
    """One stream, opened again after it breaks or has brought the bytes that `SubscriptionPolicy` allows.

    The task of `run` owns the subscription.

    `take` gets each message. An error of `take` breaks the stream. `reconnect` replaces the connection.
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
        """True while a silent stream means that its connection is dead."""
        self.on_broken: Callable[[], None] = lambda: None
        self._client = client
        self._tensors = tensors
        self._what = what
        self._decode = decoder(what)
        self._take = take
        self._reconnect = reconnect
        self._policy = SubscriptionPolicy(what)
        self._timeout_s = REPLY_TIMEOUT_S
        self._stream: Responses | None = None

    def reopen(self) -> None:
        """End the stream, and open it again after RETRY_S."""
        if self._stream is not None and self._stream.is_sent:
            self._stream.cancel()

    async def run(self) -> None:
        """Follow the stream until cancelled."""
        logged, what = "", self._what
        while True:
            try:
                stream = self._client.subscription(
                    self._tensors.of_service(), parameters=self._policy.open(), request_id=what
                )
                self._stream = stream
                async with opened(stream):
                    is_long_enough = await self._read(stream)
                    logged = ""
                if is_long_enough:
                    continue
                reason = "the stream ended"
            except CallError as error:
                reason = str(error)
            except TimeoutError:
                reason = f"no {what} for {self._timeout_s:g} s"
                self._timeout_s = min(2 * self._timeout_s, REPLY_TIMEOUT_S_MAX)
                self._reconnect()
            except Exception as error:
                log.exception("engine stream %s cannot be read", what)
                reason = f"{type(error).__name__}"
            if reason != logged:
                log.info("engine stream %s broke: %s", what, reason)
            logged = reason
            self._policy.reset()
            self.on_broken()
            await asyncio.sleep(RETRY_S)

    async def _read(self, stream: Responses) -> bool:
        """Read until the stream ends. Return True if the next stream follows at once: a renewal, not a loss."""
        while True:
            try:
                async with asyncio.timeout(self._timeout_s if self.is_awaited() else None):
                    response = await anext(stream)
            except StopAsyncIteration:
                return self._policy.is_at_limit()
            payload = payload_of(response, self._what)
            if payload is None:
                continue
            message = self._decode(payload)
            self._take(message)
            self._timeout_s = REPLY_TIMEOUT_S
            if self._policy.record(message, len(payload)):
                return True
