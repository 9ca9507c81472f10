"""Limits of an HTTP server on its clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HEAD_BYTES_MAX: Final = 32_768
"""Bytes of a request's line, headers and trailers, each header with HEADER_BYTES more."""

HEADER_BYTES: Final = 128
"""Bytes that each header counts beside its name and value: it takes as much memory. So a request has 250 at most."""

PIPELINED_MAX: Final = 16
"""Requests that may wait behind another one on their connection. Together their headers have HEAD_BYTES_MAX at most."""

READ_BYTES: Final = 16_384
"""Most bytes of one read. A connection with a request whose body is not wanted yet holds as many."""

IDLE_S: Final = 75.0
"""Time after which a connection without a request is closed. It is longer than the idle time of common proxies (60 s)."""

RECEIVE_BUFFER_BYTES: Final = 65_536
"""Receive buffer of a connection in the kernel, which doubles it."""


UNREAD_BYTES: Final = 16_384
"""Output of a connection that may wait in the kernel, and again in the process. Then its application waits for the client.

Without a bound the kernel takes megabytes of a stream that nobody reads, and the mesh computes them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """See the module."""

    connections_max: int
    """Connection limit. Above it the connection that is idle for longest is closed; without an idle one the new one is."""
    head_s: float
    """Time from the first byte of a request, or from the start of a connection, to the end of its headers."""
    handshake_s: float
    """Time for the TLS handshake of a new connection."""
    head_bytes_max: int = HEAD_BYTES_MAX
    idle_s: float = IDLE_S
