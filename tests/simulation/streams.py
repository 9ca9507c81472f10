"""Attach streams without sockets: the schedule decides when messages travel and where streams break.

Messages cross as bytes, in order. The two ends of a stream notice a break each in their own time.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kvmesh.attach.frames import FrameError
from kvmesh.attach.outbox import DownwardOutbox, UpwardOutbox
from kvmesh.attach.v1 import attach_pb2 as pb


class ServerEnd:
    """The server's end of one stream."""

    def __init__(self, service: Any, hello: pb.Hello) -> None:
        self.service = service
        self.outbox = DownwardOutbox(hello)
        self.session: Any = None

    def take(self, data: bytes, now_s: float) -> None:
        """Hand one message to the session; the first one opens it."""
        message = pb.AttachRequest.FromString(data)
        if self.session is None:
            self.session = self.service.open_session(message.hello, self.outbox, now_s)
        self.session.on_request(message, now_s)
        settle(self.service, now_s)

    def close(self, now_s: float) -> None:
        """Let the server notice that the stream is lost."""
        if self.session is not None:
            self.session.on_closed(now_s)
            self.session = None
            settle(self.service, now_s)


class Stream:
    """A caller's link (like an AttachLink to its sink), and the connection to the server.

    `frozen`: no message travels, as if the peer were stopped.
    """

    def __init__(self, name: str, caller: str, sink: Any) -> None:
        self.name = name
        self.is_up = False
        self.is_open = False
        self.frozen = False
        self.caller = caller
        self.sink = sink
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.server: ServerEnd | None = None
        self.half_dead: list[ServerEnd] = []
        """Server ends that have not noticed that their caller is lost."""
        self.outbox = self._new_outbox()

    def __repr__(self) -> str:
        return f"Stream({self.caller}->{self.name}, {'up' if self.is_up else 'down'})"

    def _new_outbox(self) -> UpwardOutbox:
        return UpwardOutbox(pb.Hello(process_id=self.caller, boot_id="b", protocol_version=1))

    def open(self, service: Any, boot_id: str) -> None:
        """Connect to `service`, unless connected."""
        if not self.is_open:
            self.is_open = True
            self.server = ServerEnd(
                service, pb.Hello(process_id=self.name, boot_id=boot_id, protocol_version=1)
            )

    def cut(self, now_s: float, *, server_knows: bool = True) -> None:
        """Break the stream: messages on the way are lost, the caller notices now, the server now or later."""
        if not self.is_open:
            return
        server, self.server = self.server, None
        self.is_open = self.is_up = False
        self.up.clear()
        self.down.clear()
        self.outbox = self._new_outbox()
        self.sink.on_lost(self, "cut", now_s)
        if server is not None:
            if server_knows:
                server.close(now_s)
            else:
                self.half_dead.append(server)

    def write_up(self, now_s: float) -> None:
        """Let the caller's writer take its outbox."""
        message = self.outbox.take(now_s) if self.is_open else None
        if message is not None:
            self.up.append(message.SerializeToString())

    def write_down(self, now_s: float) -> None:
        """Let the server's writer take its outbox."""
        if self.server is not None and self.server.session is not None:
            message = self.server.outbox.take(now_s)
            if message is not None:
                self.down.append(message.SerializeToString())

    def arrive_up(self, now_s: float) -> None:
        """Let the server read one message."""
        if self.up and self.server is not None and not self.frozen:
            try:
                self.server.take(self.up.popleft(), now_s)
            except FrameError as error:
                raise AssertionError(f"{self} broke the protocol upward: {error}") from error

    def arrive_down(self, now_s: float) -> None:
        """Let the caller read one message."""
        if self.down and not self.frozen:
            message = pb.AttachResponse.FromString(self.down.popleft())
            if message.HasField("hello"):
                self.is_up = True
                self.sink.on_attached(self, message.hello, now_s)
            self.sink.on_response(self, message, now_s)

    def notice(self, now_s: float) -> None:
        """Let servers notice lost callers."""
        for server in self.half_dead:
            server.close(now_s)
        self.half_dead.clear()


def settle(service: Any, now_s: float) -> None:
    """Do the work of a shell after each event."""
    after_event = getattr(service, "after_event", None)
    if after_event is not None:
        after_event(now_s)


def tick(core: Any, now_s: float) -> None:
    """Run the timers of `core` that are due."""
    for _ in range(1000):
        wake_s = core.next_wake_s()
        if wake_s is None or wake_s > now_s:
            return
        core.on_timer(now_s)
    raise AssertionError(f"{core} wants to be called at {core.next_wake_s()} again and again at {now_s}")
