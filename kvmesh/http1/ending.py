"""The end of a client's connection: its last response is sent and can be read, within bounds on time and bytes.

A close with unread input would reset the connection, and the client would lose the response. So input is first dropped for
a while (lingering close). A client that does not take the response is cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

LINGER_S: Final = 1.0
LINGER_BYTES: Final = 8 << 20
"""Bounds on input that is read and dropped only so that its client can read the last response."""

FLUSH_S: Final = 30.0
"""Longest time until a client has taken the last response, as `TAIL_S` of slow readers."""


class EndingTransport:
    """The transport of one connection, with such a close. The protocol calls `drop` with input after it, and `lost`.

    `has_input_left()`: the client still sends a request, or is about to.
    """

    def __init__(self, transport: asyncio.Transport, has_input_left: Callable[[], bool]) -> None:
        self._transport = transport
        self._has_input_left = has_input_left
        self._is_closing = False
        self._left = 0
        self._flush: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self.write = transport.write
        self.abort = transport.abort
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See asyncio.BaseTransport."""
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """See asyncio.BaseTransport."""
        return self._is_closing or self._transport.is_closing()

    def close(self) -> None:
        """Send what was written, then close the connection. Idempotent."""
        if self.is_closing():
            return
        self._is_closing = True
        self.bound_flush()
        if not self._has_input_left():
            self._transport.close()
            return
        self._left = LINGER_BYTES
        self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._transport.close)
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def bound_flush(self) -> None:
        """Cut the connection after FLUSH_S, because it ends now."""
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(FLUSH_S, self._transport.abort)

    def drop(self, size: int) -> None:
        """Note that `size` bytes of input were dropped."""
        self._left -= size
        if self._left <= 0:
            self._transport.close()

    def lost(self) -> None:
        """Stop the timers. The connection is gone. Without a cycle of references it is freed at once."""
        self._has_input_left = _nothing_left
        for timer in (self._flush, self._linger):
            if timer is not None:
                timer.cancel()


def _nothing_left() -> bool:
    return False
