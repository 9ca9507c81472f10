"""Holds every packet queued by iptables for a fixed time, in order: tc netem for kernels without it.

Runs inside a sidecar of a part, as `python3 -m sidecar_programs.delay SECONDS`, or inside a link, as
`python3 -m sidecar_programs.delay SECONDS QUEUE` for forwarded packets. Needs CAP_NET_ADMIN, CAP_NET_RAW and
no installed packages. Prints "ready" when it is bound.

Inbound and forwarded packets stay in the kernel meanwhile. The kernel reports their numbers, which rise by one
(nfnetlink_queue), and one verdict releases all packets up to a number. Outbound packets cannot stay in the
kernel: a packet that waits below TCP counts as not yet sent. TCP keeps only a few of those (TCP small
queues), which would throttle a connection to some packets per delay: 4 MB took 75 s. So outbound packets are
taken out at once and sent again later. They carry a mark, so that no rule queues them again. A packet costs
some 12 us in either direction.

SIGUSR1 makes the delay 0, so that packets stay in order while the rules are removed. SIGTERM ends the program
once it holds no packet. These are two signals, because two of the same kind merge if they arrive together. If
the program dies otherwise, its packets are lost. `--queue-bypass` of the iptables rule lets later packets
pass without delay.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from typing import Final, Protocol

IN_QUEUE, OUT_QUEUE, MARK = 0, 1, 1

_NETLINK_NETFILTER: Final = 12
_QUEUE_PACKET, _QUEUE_CONFIG, _QUEUE_VERDICT_BATCH = 0x300, 0x302, 0x303
_FLAGS_REQUEST, _FLAGS_REQUEST_ACK = 1, 5
_ERROR: Final = 2
_CONFIG_COMMAND, _CONFIG_PARAMETERS, _CONFIG_LENGTH, _CONFIG_MASK, _CONFIG_FLAGS = 1, 2, 3, 4, 5
_BIND, _FAIL_OPEN = 1, 1
_COPY_METADATA, _COPY_PACKET = 1, 2
_PACKET_HEADER, _VERDICT_HEADER, _PAYLOAD = 1, 2, 10
_DROP, _ACCEPT = 0, 1

_NETLINK = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_GENERIC = struct.Struct("!BBH")  # family, version, queue
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_PACKET = struct.Struct("!IHB")  # number, protocol, hook

_PACKET_BYTES_MAX: Final = 0xFFFF
_HELD_MAX: Final = 1 << 20
_SO_RCVBUFFORCE: Final = 33
_SO_MARK: Final = 36
_BUFFER_BYTES: Final = 32 << 20
_READS_MAX: Final = 256
"""Packets read between two reads of the clock."""


class Queue:
    """One netfilter queue, bound to this process."""

    def __init__(self, number: int, copy: int) -> None:
        """Bind the queue. Raises OSError if another process has bound it, or without CAP_NET_ADMIN."""
        self._number = number
        self._buffer = bytearray(2 * _PACKET_BYTES_MAX)
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        self._socket.bind((0, 0))
        self._configure(_attribute(_CONFIG_COMMAND, struct.pack("!BxH", _BIND, 0)))
        self._configure(_attribute(_CONFIG_PARAMETERS, struct.pack("!IB", _PACKET_BYTES_MAX, copy)))
        self._configure(_attribute(_CONFIG_LENGTH, struct.pack("!I", _HELD_MAX)))
        # A packet that finds the queue full passes instead of being lost.
        fail_open = struct.pack("!I", _FAIL_OPEN)
        self._configure(_attribute(_CONFIG_FLAGS, fail_open) + _attribute(_CONFIG_MASK, fail_open))
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> tuple[int, bytes] | None:
        """Return number and bytes of the next packet, or None if none waits.

        The bytes are empty if none are copied.
        """
        while True:
            try:
                end = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return None
            except OSError:  # ENOBUFS: more came than the socket holds; the kernel passed the rest
                continue
            if _NETLINK.unpack_from(self._buffer)[1] != _QUEUE_PACKET:
                continue
            number, packet, at = 0, b"", _NETLINK.size + _GENERIC.size
            while at < end:
                length, kind = _ATTRIBUTE.unpack_from(self._buffer, at)
                if kind == _PACKET_HEADER:
                    number = _PACKET.unpack_from(self._buffer, at + _ATTRIBUTE.size)[0]
                elif kind == _PAYLOAD:
                    packet = bytes(self._buffer[at + _ATTRIBUTE.size : at + length])
                at += (length + 3) & ~3
            return number, packet

    def decide(self, verdict: int, number: int) -> None:
        """Give `verdict` on every packet up to `number`."""
        attribute = _attribute(_VERDICT_HEADER, struct.pack("!II", verdict, number))
        self._send(_QUEUE_VERDICT_BATCH, _FLAGS_REQUEST, attribute)

    def _configure(self, attributes: bytes) -> None:
        self._send(_QUEUE_CONFIG, _FLAGS_REQUEST_ACK, attributes)
        while True:
            message = self._socket.recv(4096)
            if _NETLINK.unpack_from(message)[1] == _ERROR:
                (code,) = struct.unpack_from("=i", message, _NETLINK.size)
                if code:
                    raise OSError(-code, f"netfilter queue {self._number} cannot be bound")
                return

    def _send(self, kind: int, flags: int, attributes: bytes) -> None:
        body = _GENERIC.pack(socket.AF_UNSPEC, 0, self._number) + attributes
        self._socket.send(_NETLINK.pack(_NETLINK.size + len(body), kind, flags, 0, 0) + body)


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


class Direction(Protocol):
    """Packets of one direction."""

    queue: Queue

    def take(self, due_s: float) -> None:
        """Take the waiting packets, to be released at `due_s`."""
        ...

    def let_go(self, now_s: float) -> float | None:
        """Release packets due by `now_s`; return the time of the next one, None if none is held."""
        ...


class Incoming:
    """Inbound or forwarded packets, which wait in the kernel."""

    def __init__(self, number: int = IN_QUEUE) -> None:
        self.queue = Queue(number, _COPY_METADATA)
        self._held: deque[tuple[float, int]] = deque()

    def take(self, due_s: float) -> None:
        for _ in range(_READS_MAX):
            packet = self.queue.read()
            if packet is None:
                return
            self._held.append((due_s, packet[0]))

    def let_go(self, now_s: float) -> float | None:
        last = None
        while self._held and self._held[0][0] <= now_s:
            last = self._held.popleft()[1]
        if last is not None:
            self.queue.decide(_ACCEPT, last)
        return self._held[0][0] if self._held else None


class Outgoing:
    """Outbound packets, which wait in this process and are sent again."""

    def __init__(self) -> None:
        self.queue = Queue(OUT_QUEUE, _COPY_PACKET)
        self._held: deque[tuple[float, bytes]] = deque()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_MARK, MARK)

    def take(self, due_s: float) -> None:
        last = None
        for _ in range(_READS_MAX):
            packet = self.queue.read()
            if packet is None:
                break
            last = packet[0]
            self._held.append((due_s, packet[1]))
        if last is not None:
            self.queue.decide(_DROP, last)

    def let_go(self, now_s: float) -> float | None:
        while self._held and self._held[0][0] <= now_s:
            packet = self._held.popleft()[1]
            # EPERM: a later rule drops the packet, as intended.
            with contextlib.suppress(OSError):
                self._socket.sendto(packet, (socket.inet_ntoa(packet[16:20]), 0))
        return self._held[0][0] if self._held else None


def run(directions: tuple[Direction, ...], delay_s: float, signals: set[int]) -> None:
    """Hold each packet for `delay_s`, without a delay after the first of `signals`; return after SIGTERM."""
    poll = select.poll()
    by_file = {direction.queue.fileno(): direction for direction in directions}
    for file in by_file:
        poll.register(file, select.POLLIN)
    next_s: float | None = None
    while next_s is not None or signal.SIGTERM not in signals:
        # A signal between two polls may wait this long, which only delays the end of a test's fault.
        wait_ms = 50.0 if next_s is None else max(0.0, (next_s - time.monotonic()) * 1000)
        for file, _ in poll.poll(wait_ms):
            by_file[file].take(time.monotonic() + delay_s)
        now_s = time.monotonic() if not signals else float("inf")
        due = [direction.let_go(now_s) for direction in directions]
        next_s = min((each for each in due if each is not None), default=None)


def main(delay_s: float, directions: tuple[Direction, ...]) -> None:
    signals: set[int] = set()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.add(number))
    print("ready", flush=True)
    run(directions, delay_s, signals)


if __name__ == "__main__":
    queues = [int(number) for number in sys.argv[2:]]
    main(float(sys.argv[1]), tuple(map(Incoming, queues)) or (Incoming(), Outgoing()))
