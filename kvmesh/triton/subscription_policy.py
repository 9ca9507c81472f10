"""How long a stream of the engine's own - load, KV events - is read before it is opened anew, and where it goes on. Pure.

tritonserver keeps every response of a request until that request ends, in one queue that is emptied only then: seen with
2.51, where a subscription that had brought 417 MB of KV events held 409 MB. So no subscription may live for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

RENEW_BYTES: Final = 2 << 20
"""What an engine is asked to tell in one subscription. Opening the next costs one request."""

ABANDON_BYTES: Final = 2 * RENEW_BYTES
"""What a server may keep of one whose engine does not end it, a snapshot aside."""

RESPONSE_BYTES: Final = 1024
"""What a response is kept with beside its payload; 1.1 KB were measured."""


class SubscriptionPolicy:
    """One subscription, on one stream after the other."""

    __slots__ = ("_after", "_received_bytes", "_snapshot_bytes", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._after = ""
        """Boot id and number of the last KV event; empty: unknown, or in the middle of a snapshot."""
        self._snapshot_bytes = 0
        self._received_bytes = 0

    def open(self) -> dict[str, str]:
        """A stream begins: return the parameters of its request. An engine that does not know `after` sends a
        snapshot; one that does not know `max_bytes` does not end it."""
        self._snapshot_bytes = self._received_bytes = 0
        parameters = {"request_type": self._what, "max_bytes": str(RENEW_BYTES)}
        if self._after:
            parameters["after"] = self._after
        return parameters

    def reset(self) -> None:
        """The stream broke, or could not be read: begin anew, with a snapshot."""
        self._after = ""

    def record(self, message: Mapping[str, Any], size: int) -> bool:
        """Count one message of `size` bytes that was read and understood. Return whether to leave the stream for the next.

        Only where the engine does not end it as it was asked to. Never in the middle of a snapshot; and after a large one
        not before as much again has come, so that an engine that always begins with one does not send it over and over.
        """
        self._received_bytes += size + RESPONSE_BYTES
        if "snapshot" in message:
            self._snapshot_bytes += size + RESPONSE_BYTES
            self._after = "" if message.get("more", False) else f"{message['boot_id']}:{message['event_id']}"
            return False
        if events := message.get("events"):
            self._after = f"{message['boot_id']}:{events[-1]['event_id']}"
        return self._received_bytes - self._snapshot_bytes > max(ABANDON_BYTES, self._snapshot_bytes)

    def is_at_limit(self) -> bool:
        """Whether the engine has told as much as it was asked to, so that the end of the stream is none of the engine."""
        return self._received_bytes > RENEW_BYTES
