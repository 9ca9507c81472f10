"""When a subscription to load reports or KV events is renewed, and the position at which the next stream continues. Pure.

tritonserver keeps all responses of a request in one queue until the request ends. In tritonserver 2.51, a subscription
that had brought 417 MB of KV events held 409 MB (measured once, by hand). So each subscription must end after some
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

RENEW_BYTES: Final = 2 << 20
"""Bytes after which an engine shall end a subscription (`max_bytes`). The next subscription takes one request."""

ABANDON_BYTES: Final = 2 * RENEW_BYTES
"""Bytes, without a snapshot, after which the client ends a subscription that its engine does not end."""

RESPONSE_BYTES: Final = 1024
"""Memory of the server for one response in addition to its payload; 1.1 KB were measured once, by hand."""


class SubscriptionPolicy:
    """One subscription over consecutive streams."""

    __slots__ = ("_after", "_received_bytes", "_snapshot_bytes", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._after = ""
        """Boot id and number of the last KV event. Empty: unknown, or inside a snapshot."""
        self._snapshot_bytes = 0
        self._received_bytes = 0

    def open(self) -> dict[str, str]:
        """Begin a stream, and return the parameters of its request.

        An engine that does not know `after` sends a snapshot. An engine that does not know `max_bytes` does not end the
        stream.
        """
        self._snapshot_bytes = self._received_bytes = 0
        parameters = {"request_type": self._what, "max_bytes": str(RENEW_BYTES)}
        if self._after:
            parameters["after"] = self._after
        return parameters

    def reset(self) -> None:
        """Forget the position after a broken or unreadable stream. The next stream starts with a snapshot."""
        self._after = ""

    def record(self, message: Mapping[str, Any], size: int) -> bool:
        """Count one decoded message of `size` bytes. Return True if the client must end the stream and open the next.

        This is for engines that do not end a stream at RENEW_BYTES. A stream is never ended inside a snapshot. After a
        large snapshot it ends only after as many further bytes. So an engine that starts each stream with a snapshot does
        not send snapshots without end.
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
        """True if the stream has brought the requested bytes. Its end is then a renewal, and no loss of the engine."""
        return self._received_bytes > RENEW_BYTES
