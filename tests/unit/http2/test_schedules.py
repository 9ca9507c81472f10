"""Random schedules of a client's actions against the echo handlers: each call ends once, and windows are conserved."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hyperframe.frame import DataFrame, SettingsFrame
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmesh.http2.connection import CONNECTION_WINDOW
from tests.raw_frames import framed
from tests.raw_http2 import RawStream
from tests.unit.http2.siege import BOTH, JOIN, LARGE, SPLIT, UNARY, Siege, besieged

STREAM_WINDOW = 10_000
METHODS = (UNARY, SPLIT, LARGE, JOIN, BOTH)
SIZES = (0, 1, 4, 700, 16_384, 40_000)

Action = tuple[str, int, int]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ("open", "piece", "piece", "padded", "end", "reset", "grant", "settings", "deadline", "turn")
        ),
        st.integers(0, 7),
        st.integers(0, 7),
    ),
    min_size=5,
    max_size=60,
)


@dataclass(slots=True)
class Body:
    """What is left to send of a call."""

    stream: RawStream
    left: bytes
    is_over: bool = False


@dataclass(slots=True)
class Client:
    """Takes the actions, and keeps to the windows of the server."""

    siege: Siege
    bodies: list[Body] = field(default_factory=list)

    async def take(self, action: Action) -> None:
        """Do one action. Those that cannot be done now are left out."""
        kind, which, size = action
        connection = self.siege.attacker
        if kind in ("open", "deadline"):
            path = METHODS[which % len(METHODS)]
            stream = connection.call(path, deadline_s=0.001 if kind == "deadline" else None)
            message = b"3" if path == LARGE else bytes(SIZES[size % len(SIZES)])
            self.bodies.append(Body(stream, framed(message)))
            return
        if kind == "settings":
            self.resize((0, STREAM_WINDOW, 1_000, 70_000)[size % 4])
            return
        if kind == "turn":
            await connection.ping()
            return
        open_ones = [body for body in self.bodies if not body.stream.has_ended]
        if not open_ones:
            return
        body = open_ones[which % len(open_ones)]
        if kind == "reset":
            body.stream.reset()
        elif kind == "grant":
            body.stream.grant(1 + 9_000 * size)
        elif not body.is_over:
            self.send(body, kind, size)

    def resize(self, window: int) -> None:
        """Change the window of all streams."""
        self.siege.attacker.send(SettingsFrame(0, {SettingsFrame.INITIAL_WINDOW_SIZE: window}))

    def send(self, body: Body, kind: str, size: int) -> None:
        """Send a piece of a body, or its end."""
        connection, stream = self.siege.attacker, body.stream
        padding = 100 if kind == "padded" else 0
        room = min(stream.send_window, connection.send_window) - padding - 1
        part = body.left[: max(0, min(room, (1, 3, 5, 1_000, 16_000)[size % 5]))]
        if room < 0:
            return
        body.left = body.left[len(part) :]
        body.is_over = kind == "end"
        cost = len(part) + (padding + 1 if padding else 0)
        stream.send_window -= cost
        connection.send_window -= cost
        flags = [*(["PADDED"] if padding else []), *(["END_STREAM"] if body.is_over else [])]
        connection.send(DataFrame(stream.number, part, pad_length=padding, flags=flags))

    async def finish(self) -> None:
        """Send what is left, read everything, and wait for the end of each call."""
        connection = self.siege.attacker
        self.resize(1 << 24)
        connection.grant(1 << 28)
        for body in self.bodies:
            if not body.stream.has_ended:
                body.stream.grant(1 << 24, connection=False)
                if not body.is_over:
                    try:
                        await body.stream.send_data(body.left, end=True)
                    except ConnectionError:
                        continue
        for body in self.bodies:
            await body.stream.ended()
        await connection.ping()


def held_window(siege: Siege) -> int:
    """Return the connection's window: what the client may send, and what it will be granted."""
    manager = siege.target._codec._h2._inbound_flow_control_window_manager  # type: ignore[attr-defined]
    return int(manager.current_window_size + manager._bytes_processed + siege.target._ungranted)


@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(ACTIONS)
def test_each_schedule_ends_each_call_once_and_conserves_the_windows(schedule: list[Action]) -> None:
    asyncio.run(run(schedule))


async def run(schedule: list[Action]) -> None:
    """Run one schedule, and check it."""
    async with besieged(stream_window=STREAM_WINDOW) as siege:
        client = Client(siege)
        connection = siege.attacker
        for action in schedule:
            await client.take(action)
            assert not connection.is_closed, connection.goaway
        await client.finish()
        assert not connection.is_closed, connection.goaway
        assert held_window(siege) == CONNECTION_WINDOW
        # The server's view of the client's window is the client's own, also for bytes of streams that were reset.
        assert siege.target._codec.sendable(0) == connection.window
        for body in client.bodies:
            stream = body.stream
            assert stream.has_ended
            if stream.reset_code is None and stream.status == 0:
                assert not stream.partial
        assert not siege.target.streams
