"""Both ends of the codec against each other, with their bytes cut at random: what goes in comes out, within the windows."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest

from kvmesh.http2.codec import (
    CONNECTION,
    WINDOW,
    CodecLimits,
    Control,
    Data,
    ErrorCode,
    Event,
    GoneAway,
    Headers,
    ProtocolFault,
    Reset,
)
from kvmesh.http2.h2_codec import H2Codec

LIMITS = CodecLimits(streams_max=1_000, header_bytes_max=8_192, connection_window=1 << 20)
REQUEST = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/B"), (b":authority", b"x"))
RESPONSE = ((b":status", b"200"),)


class Pair:
    """Two codecs and the events that each got."""

    def __init__(self, seed: int = 0) -> None:
        self.client, self.server = H2Codec(LIMITS, is_client=True), H2Codec(LIMITS, is_client=False)
        self.at_client: list[Event] = []
        self.at_server: list[Event] = []
        self.random = random.Random(seed)
        self.client.start()
        self.server.start()
        self.move()

    def move(self) -> None:
        """Move all bytes between them, cut at random."""
        while self.client.waiting_bytes() or self.server.waiting_bytes():
            for source, sink, into in (
                (self.client, self.server, self.at_server),
                (self.server, self.client, self.at_client),
            ):
                data = source.take()
                cuts = sorted({0, len(data), *(self.random.randint(0, len(data)) for _ in range(3))})
                for start, end in pairwise(cuts):
                    into.extend(sink.receive(data[start:end]))

    def open(self) -> int:
        stream = self.client.new_stream()
        self.client.send_headers(stream, REQUEST, is_end=False)
        self.server_ready(stream)
        return stream

    def server_ready(self, stream: int) -> None:
        self.move()
        self.server.send_headers(stream, RESPONSE, is_end=False)
        self.move()


@pytest.mark.parametrize("seed", range(20))
def test_each_stream_gets_its_bytes_in_order_and_never_more_than_its_window(seed: int) -> None:
    pair = Pair(seed)
    streams = [pair.open() for _ in range(pair.random.randint(1, 6))]
    sent: dict[int, bytes] = defaultdict(bytes)
    granted = dict.fromkeys(streams, WINDOW)
    for _ in range(120):
        stream = pair.random.choice(streams)
        if pair.random.random() < 0.7:
            size = min(pair.random.randint(0, 40_000), max(0, pair.server.sendable(stream)))
            data = pair.random.randbytes(size)
            if size:
                pair.server.send_data(stream, data)
                sent[stream] += data
        else:
            size = pair.random.randint(1, 50_000)
            pair.client.grant(stream, size)
            pair.client.grant(CONNECTION, size)
            granted[stream] += size
        pair.move()
        assert len(sent[stream]) <= granted[stream]
    for stream in streams:
        pair.server.send_headers(stream, ((b"grpc-status", b"0"),), is_end=True)
    pair.move()
    got: dict[int, bytes] = defaultdict(bytes)
    for event in pair.at_client:
        if isinstance(event, Data):
            got[event.stream] += event.data
            assert event.credit == len(event.data)
    assert got == {stream: data for stream, data in sent.items() if data}
    ends = [event.stream for event in pair.at_client if isinstance(event, Headers) and event.is_end]
    assert sorted(ends) == sorted(streams)


def test_streams_run_on_after_a_goaway_of_either_side() -> None:
    pair = Pair()
    stream = pair.open()
    pair.server.go_away(stream, ErrorCode.NO_ERROR)
    pair.move()
    assert GoneAway(stream, 0) in pair.at_client
    pair.client.go_away(0, ErrorCode.NO_ERROR)
    pair.client.send_data(stream, b"up")
    pair.server.send_data(stream, b"down")
    pair.move()
    assert Data(stream, b"up", 2, False) in pair.at_server
    assert Data(stream, b"down", 4, False) in pair.at_client


def test_a_closed_stream_takes_resets_and_grants_without_an_effect() -> None:
    pair = Pair()
    stream = pair.open()
    pair.client.reset(stream, ErrorCode.CANCEL)
    pair.move()
    assert Reset(stream, ErrorCode.CANCEL) in pair.at_server
    for codec in (pair.client, pair.server):
        codec.reset(stream, ErrorCode.CANCEL)
        codec.grant(stream, 5)
    pair.move()


def test_many_streams_leave_no_state() -> None:
    pair = Pair()
    for _ in range(600):
        stream = pair.client.new_stream()
        pair.client.send_headers(stream, REQUEST, is_end=True)
        pair.move()
        pair.server.send_headers(stream, RESPONSE, is_end=True)
        pair.move()
        pair.at_client.clear()
        pair.at_server.clear()
    assert len(pair.server._h2.streams) <= 300  # the table of the library
    assert len(pair.client._h2.streams) <= 300


def test_controls_and_faults_are_told() -> None:
    pair = Pair()
    pair.client.ping(b"12345678")
    pair.move()
    assert Control.PING in pair.at_server
    assert Control.PONG in pair.at_client
    assert Control.SETTINGS_TAKEN in pair.at_server
    assert Control.SETTINGS_TAKEN in pair.at_client
    with pytest.raises(ProtocolFault):
        pair.server.receive(b"\0\0\4\3\0\0\0\0\0abcd")  # RST_STREAM of stream 0
    assert pair.server.waiting_bytes()
    with pytest.raises(ProtocolFault):
        H2Codec(LIMITS, is_client=False).receive(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
