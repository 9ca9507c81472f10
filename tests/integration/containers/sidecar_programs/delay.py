"""Holds every packet that iptables queues for a fixed time, in order: what tc netem does, where the kernel lacks it.

Runs inside a sidecar of a part, as `python3 delay.py QUEUE SECONDS`, and needs CAP_NET_ADMIN and nothing installed.
Packets stay in the kernel; it tells us their numbers (nfnetlink_queue, numbers rise by one), and one verdict lets go
of all up to a number. So a packet costs one short read, and a burst one write. Prints "ready" when it is bound.

The first SIGTERM makes the delay 0, so that packets stay in order while the rules are taken away; the second ends it
when it holds none. When it dies otherwise the kernel drops what is queued; `--queue-bypass` of the iptables rule
lets later packets through undelayed.
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
from typing import Final

_NETLINK_NETFILTER: Final = 12
_QUEUE_PACKET, _QUEUE_CONFIG, _QUEUE_VERDICT_BATCH = 0x300, 0x302, 0x303
_FLAGS_REQUEST, _FLAGS_REQUEST_ACK = 1, 5
_ERROR: Final = 2
_CONFIG_COMMAND, _CONFIG_PARAMETERS, _CONFIG_LENGTH, _CONFIG_MASK, _CONFIG_FLAGS = 1, 2, 3, 4, 5
_BIND, _COPY_METADATA, _FAIL_OPEN = 1, 1, 1
_PACKET_HEADER, _VERDICT_HEADER = 1, 2
_ACCEPT: Final = 1

_NETLINK = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_GENERIC = struct.Struct("!BBH")  # family, version, queue
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_PACKET = struct.Struct("!IHB")  # number, protocol, hook

_HELD_MAX: Final = 1 << 20
_SO_RCVBUFFORCE: Final = 33
_BUFFER_BYTES: Final = 32 << 20
_READS_MAX: Final = 256
"""Packets read between two looks at the clock."""


class Queue:
    """One netfilter queue, bound to this process."""

    def __init__(self, number: int) -> None:
        """Bind it. Raises OSError when somebody has it, or without CAP_NET_ADMIN."""
        self._number = number
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        self._socket.bind((0, 0))
        self._configure(_CONFIG_COMMAND, struct.pack("!BxH", _BIND, 0))
        self._configure(_CONFIG_PARAMETERS, struct.pack("!IB", 0, _COPY_METADATA))
        self._configure(_CONFIG_LENGTH, struct.pack("!I", _HELD_MAX))
        # A packet that finds the queue full goes on instead of being lost.
        self._send(
            _QUEUE_CONFIG,
            _FLAGS_REQUEST_ACK,
            _attribute(_CONFIG_FLAGS, struct.pack("!I", _FAIL_OPEN))
            + _attribute(_CONFIG_MASK, struct.pack("!I", _FAIL_OPEN)),
        )
        self._await_ack()
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> int | None:
        """Return the number of the next packet, None when there is none now."""
        while True:
            try:
                message = self._socket.recv(4096)
            except BlockingIOError:
                return None
            except OSError:  # ENOBUFS: more came than the socket holds; the kernel let the rest go on
                continue
            if _NETLINK.unpack_from(message)[1] != _QUEUE_PACKET:
                continue
            at = _NETLINK.size + _GENERIC.size
            while at < len(message):
                length, kind = _ATTRIBUTE.unpack_from(message, at)
                if kind == _PACKET_HEADER:
                    return int(_PACKET.unpack_from(message, at + _ATTRIBUTE.size)[0])
                at += (length + 3) & ~3

    def let_go(self, number: int) -> None:
        """Let every packet up to `number` go on."""
        self._send(
            _QUEUE_VERDICT_BATCH,
            _FLAGS_REQUEST,
            _attribute(_VERDICT_HEADER, struct.pack("!II", _ACCEPT, number)),
        )

    def _configure(self, kind: int, value: bytes) -> None:
        self._send(_QUEUE_CONFIG, _FLAGS_REQUEST_ACK, _attribute(kind, value))
        self._await_ack()

    def _send(self, kind: int, flags: int, attributes: bytes) -> None:
        body = _GENERIC.pack(socket.AF_UNSPEC, 0, self._number) + attributes
        self._socket.send(_NETLINK.pack(_NETLINK.size + len(body), kind, flags, 0, 0) + body)

    def _await_ack(self) -> None:
        while True:
            message = self._socket.recv(4096)
            if _NETLINK.unpack_from(message)[1] == _ERROR:
                (code,) = struct.unpack_from("=i", message, _NETLINK.size)
                if code:
                    raise OSError(-code, f"netfilter queue {self._number} cannot be had")
                return


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def run(queue: Queue, delay_s: float, signals: list[int]) -> None:
    """Hold packets of `queue` for `delay_s` each, until there were two `signals` and none is left."""
    held: deque[tuple[float, int]] = deque()
    poll = select.poll()
    poll.register(queue, select.POLLIN)
    while held or len(signals) < 2:
        wait_ms = 50.0 if not held else max(0.0, (held[0][0] - time.monotonic()) * 1000)
        if poll.poll(0 if signals and held else wait_ms):
            due_s = time.monotonic() + delay_s
            for _ in range(_READS_MAX):
                number = queue.read()
                if number is None:
                    break
                held.append((due_s, number))
        now_s, last = time.monotonic(), None
        while held and (signals or held[0][0] <= now_s):
            last = held.popleft()[1]
        if last is not None:
            queue.let_go(last)


def main(queue: int, delay_s: float) -> int:
    bound = Queue(queue)
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    print("ready", flush=True)
    run(bound, delay_s, signals)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2])))
