"""Interface of an HTTP/2 codec: bytes in and events out, calls in and bytes out. Sans-IO: it opens no socket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final, NamedTuple, Protocol, TypeAlias

Fields: TypeAlias = Sequence[tuple[bytes, bytes]]
"""Names and values of a header block, pseudo-header fields first."""

WINDOW: Final = 65_535
"""Initial flow-control window in bytes of a connection and, without a setting, of each stream (RFC 9113, 6.9.2)."""

CONNECTION: Final = 0
"""Stream number of the connection itself in a `WindowOpened`."""

EVERY: Final = -1
"""Stream number in a `WindowOpened` that a setting of the peer causes: the windows of all streams changed."""


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY that kvmesh sends or tells apart (RFC 9113, 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    REFUSED_STREAM = 7
    CANCEL = 8
    ENHANCE_YOUR_CALM = 11


class Headers(NamedTuple):
    """A header block: a request, a response or trailers. `is_end`: the peer sends nothing more on the stream."""

    stream: int
    fields: Fields
    is_end: bool


class Data(NamedTuple):
    """Bytes of a body. `credit`: bytes that they took from the flow-control windows, with padding."""

    stream: int
    data: bytes
    credit: int
    is_end: bool


class Reset(NamedTuple):
    """The peer ended a stream by RST_STREAM, or the codec did because the peer broke the rules of the stream."""

    stream: int
    code: int


class WindowOpened(NamedTuple):
    """The peer enlarged its flow-control window of a stream, of the CONNECTION, or of EVERY stream."""

    stream: int


class GoneAway(NamedTuple):
    """The peer takes no streams above `last_stream` (GOAWAY). Others run on if `code` is NO_ERROR."""

    last_stream: int
    code: int


class Control(Enum):
    """Frames without content, which cost their sender nothing. The connection limits their rate."""

    PING = "PING"
    PONG = "PING acknowledgement"
    SETTINGS = "SETTINGS"
    SETTINGS_TAKEN = "SETTINGS acknowledgement"
    OTHER = "frames without content"


Event: TypeAlias = Headers | Data | Reset | WindowOpened | GoneAway | Control


class ProtocolFault(Exception):
    """The peer broke the protocol of its connection. `Codec.take` then has the GOAWAY that says so."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecLimits:
    """Limits that a codec advertises to its peer."""

    streams_max: int
    """Streams that the peer may have open at once. The connection refuses further ones; the codec does not."""
    header_bytes_max: int
    """Size of a header list, as HPACK counts it: 32 bytes for each field beside its name and value."""
    connection_window: int
    """Flow-control window in bytes of the whole connection."""


class Codec(Protocol):
    """One end of one connection.

    INVARIANT: after an `Event` with `is_end`, no further Data or Headers of the stream follow. After a Reset no event of it
    follows.
    """

    def start(self) -> None:
        """Put the connection preface and the settings into the output."""
        ...

    def receive(self, data: bytes) -> Sequence[Event]:
        """Take bytes of the peer. Raises ProtocolFault; the events of these bytes are lost then."""
        ...

    def new_stream(self) -> int:
        """Return the number of the next stream of this side. Clients only."""
        ...

    def streams_allowed(self) -> int:
        """Return how many streams of this side the peer allows at once (SETTINGS_MAX_CONCURRENT_STREAMS)."""
        ...

    def send_headers(self, stream: int, fields: Fields, *, is_end: bool) -> None:
        """Send a header block. Its fields have lower-case names."""
        ...

    def sendable(self, stream: int) -> int:
        """Return the bytes that the peer's flow-control windows allow now; 0 or less: none. `stream`: or CONNECTION."""
        ...

    def send_data(self, stream: int, data: bytes | memoryview) -> None:
        """Send `data`, which has at most `sendable` bytes, as DATA frames."""
        ...

    def half_close(self, stream: int) -> None:
        """Send an empty DATA frame that ends this side of `stream`. A closed stream is ignored."""
        ...

    def reset(self, stream: int, code: int) -> None:
        """End `stream` with RST_STREAM. A stream that is closed is ignored."""
        ...

    def grant(self, stream: int, size: int) -> None:
        """Let the peer send `size` further bytes on `stream`, or on the CONNECTION. A closed stream is ignored."""
        ...

    def ping(self, payload: bytes) -> None:
        """Send a PING with 8 bytes."""
        ...

    def go_away(self, last_stream: int, code: int, text: str = "") -> None:
        """Send GOAWAY. Streams run on."""
        ...

    def close(self) -> None:
        """Free the memory of the connection without a garbage collection. Nothing may be received afterwards."""
        ...

    def waiting_bytes(self) -> int:
        """Return the size of the output."""
        ...

    def take(self) -> bytes:
        """Return the output, and empty it."""
        ...
