"""KV transfer over TCP: a decode engine pulls KV blocks from the listener of a prefill engine.

One connection per pull, little-endian lengths:

    puller    u32 length, JSON {boot_id, handoff_id, first_block, block_bytes, digest}
    listener  u32 length, JSON {blocks, error}; error is null or the reason
    listener  the raw bytes of that many blocks, in order
    puller    b"ACK!"          the listener may free the blocks; without an ACK they stay held until they expire

Both ends stop at their deadline, or earlier if no byte moves for `STALL_TIMEOUT_S`. A dead, frozen or unreachable peer
therefore delays the other end by at most `STALL_TIMEOUT_S`. The module frees blocks and changes the engine's state
through callbacks only.
"""

import contextlib
import errno
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engines.contract import errors
from engines.contract.errors import TransferError
from engines.reference.blocks import Blocks
from engines.reference.handoff import Handoff

_ACK = b"ACK!"
_HEADER_BYTES_MAX = 4096
_CONNECTIONS_MAX = 256  # connection limit; further connections are closed at once, and their pulls fail
_SEND_TIMEOUT_S = 10.0
STALL_TIMEOUT_S = 2.5  # longest time without a byte; allows two lost handshake packets, resent after 1 s each
BIND_S = 5.0  # wait for the port of an engine that was killed: its process for the model ends a moment later
_BIND_EVERY_S = 0.05
_CHUNK_BYTES = 256 << 10  # bytes per send; a sent chunk counts as progress


class _PullRequest(msgspec.Struct):
    boot_id: str
    handoff_id: int
    first_block: int
    block_bytes: int
    digest: str


class _PullResponse(msgspec.Struct):
    blocks: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class KvSource:
    """The source of a listener's blocks. Blocks do not change during a send."""

    boot_id: str
    digest: str
    blocks: Blocks
    begin_send: Callable[[int], list[int] | None]  # handoff id -> block ids, None if unknown
    end_send: Callable[[int, bool], None]  # (handoff id, is_acknowledged), once per begun send


@dataclass(slots=True)
class KvListener:
    """Serves pulls from `source`, one thread per connection. `close` ends all connections."""

    source: KvSource
    host: str
    port: int
    _socket: socket.socket = field(init=False)
    _connections: set[socket.socket] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    def start(self) -> None:
        """Bind and listen; raises OSError if the port stays taken for BIND_S. Afterwards `port` is the bound port."""
        self._socket = _bound((self.host, self.port), time.monotonic() + BIND_S)
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="kv-listener", daemon=True).start()

    def close(self) -> None:
        """Stop listening and break every connection."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        for one in (self._socket, *connections):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(
                    0.01
                )  # out of file descriptors, or the peer has disconnected: the listener continues
                continue
            with self._lock:
                is_accepted = not self._is_closed and len(self._connections) < _CONNECTIONS_MAX
                if is_accepted:
                    self._connections.add(connection)
            if is_accepted:
                threading.Thread(target=self._serve, args=(connection,), name="kv-send", daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, TransferError, msgspec.MsgspecError):
                self._respond(connection, time.monotonic() + _SEND_TIMEOUT_S)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _respond(self, connection: socket.socket, deadline_s: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = msgspec.json.decode(_read_message(connection, deadline_s), type=_PullRequest)
        if request.digest != self.source.digest or request.block_bytes != self.source.blocks.block_bytes:
            return _write_message(
                connection, _PullResponse(error=f"arithmetic is {self.source.digest}"), deadline_s
            )
        block_ids = (
            self.source.begin_send(request.handoff_id) if request.boot_id == self.source.boot_id else None
        )
        if block_ids is None:
            return _write_message(connection, _PullResponse(error="unknown"), deadline_s)
        is_acknowledged = False
        try:
            wanted = block_ids[request.first_block :]
            _write_message(connection, _PullResponse(blocks=len(wanted)), deadline_s)
            for block_id in wanted:
                _send(connection, self.source.blocks.read(block_id), deadline_s)
            is_acknowledged = _read(connection, len(_ACK), deadline_s) == _ACK
        finally:
            self.source.end_send(request.handoff_id, is_acknowledged)


@dataclass(slots=True)
class KvPuller:
    """One pull of KV blocks, run by a thread of its owner. `abort`, from any thread, makes `pull` fail."""

    handoff: Handoff
    first_block: int
    block_count: int
    timeout_s: float
    _socket: socket.socket | None = None
    _is_aborted: bool = False

    def abort(self) -> None:
        """Break the connection. A `pull` that starts later fails; after the end of `pull` the call has no effect."""
        self._is_aborted = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def pull(self, take: Callable[[bytearray], None]) -> None:
        """Fetch the blocks, pass their bytes (block_count * block_bytes) to `take`, acknowledge.

        Raises TransferError with the reason. The caller must not use the bytes then; the blocks stay held at the source
        until they expire or are released.
        """
        handoff, deadline_s = self.handoff, time.monotonic() + self.timeout_s
        host, _, port = handoff.address.rpartition(":")
        try:
            connect_timeout_s = min(STALL_TIMEOUT_S, self.timeout_s)
            with socket.create_connection((host, int(port)), timeout=connect_timeout_s) as connection:
                self._socket = connection
                if self._is_aborted:
                    raise TransferError(errors.TRANSFER_FAILED.format(reason="aborted"))
                take(self._exchange(connection, deadline_s))
                _send(connection, memoryview(_ACK), deadline_s)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            reason = f"{handoff.address}: {str(error) or type(error).__name__}"
            raise TransferError(errors.TRANSFER_FAILED.format(reason=reason)) from error

    def _exchange(self, connection: socket.socket, deadline_s: float) -> bytearray:
        handoff = self.handoff
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = _PullRequest(
            handoff.boot_id, handoff.handoff_id, self.first_block, handoff.block_bytes, handoff.digest
        )
        _write_message(connection, request, deadline_s)
        response = msgspec.json.decode(_read_message(connection, deadline_s), type=_PullResponse)
        if response.error == "unknown":
            text = errors.HANDOFF_UNKNOWN.format(handoff=handoff.handoff_id, peer=handoff.address)
            raise TransferError(text)
        if response.error is not None:
            raise TransferError(errors.TRANSFER_FAILED.format(reason=f"{handoff.address}: {response.error}"))
        if response.blocks != self.block_count:
            reason = f"{handoff.address} has {response.blocks} blocks, {self.block_count} wanted"
            raise TransferError(errors.TRANSFER_FAILED.format(reason=reason))
        return _read(connection, response.blocks * handoff.block_bytes, deadline_s)


def _write_message(connection: socket.socket, message: msgspec.Struct, deadline_s: float) -> None:
    body = msgspec.json.encode(message)
    _send(connection, memoryview(struct.pack("<I", len(body)) + body), deadline_s)


def _read_message(connection: socket.socket, deadline_s: float) -> bytearray:
    (size,) = struct.unpack("<I", _read(connection, 4, deadline_s))
    if size > _HEADER_BYTES_MAX:
        raise TransferError(errors.TRANSFER_FAILED.format(reason=f"header of {size} bytes"))
    return _read(connection, size, deadline_s)


def _send(connection: socket.socket, data: memoryview, deadline_s: float) -> None:
    # The timeout of sendall covers the whole call, so data is sent in chunks with a timeout each.
    for at in range(0, len(data), _CHUNK_BYTES):
        connection.settimeout(_socket_timeout_s(deadline_s))
        connection.sendall(data[at : at + _CHUNK_BYTES])


def _read(connection: socket.socket, size: int, deadline_s: float) -> bytearray:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        connection.settimeout(_socket_timeout_s(deadline_s))
        count = connection.recv_into(view[filled:])
        if count == 0:
            raise TransferError(
                errors.TRANSFER_FAILED.format(reason=f"connection ended after {filled} of {size} bytes")
            )
        filled += count
    return data


def _socket_timeout_s(deadline_s: float) -> float:
    """Return the timeout of the next socket call: the time to the deadline, at most STALL_TIMEOUT_S."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0.0:
        raise TimeoutError("deadline exceeded")
    return min(left_s, STALL_TIMEOUT_S)


def _bound(address: tuple[str, int], end_s: float) -> socket.socket:
    """Return a listening socket. Raises OSError if the port is still taken at `end_s`, of the monotonic clock."""
    while True:
        try:
            return socket.create_server(address, backlog=128)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= end_s:
                raise
        time.sleep(_BIND_EVERY_S)
