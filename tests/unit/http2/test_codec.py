"""Both ends of the codec against each other, with their bytes cut at random: what goes in comes out, within the windows."""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from h2.stream import StreamState
from hpack import Decoder, Encoder

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
from kvmesh.http2.direct_codec import DirectCodec, literal_block
from kvmesh.http2.h2_codec import H2Codec

LIMITS = CodecLimits(streams_max=1_000, header_bytes_max=8_192, connection_window=1 << 20)
REQUEST = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/B"), (b":authority", b"x"))
RESPONSE = ((b":status", b"200"),)
NARROW = CodecLimits(streams_max=1_000, header_bytes_max=8_192, connection_window=WINDOW)
CODECS = (H2Codec, DirectCodec)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
UNKNOWN = 0x20


class Pair:
    """Two codecs and the events that each got. Each is one of both implementations, by the seed."""

    def __init__(self, seed: int = 0) -> None:
        self.client = CODECS[seed % 2](LIMITS, is_client=True)
        self.server = CODECS[seed // 2 % 2](LIMITS, is_client=False)
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


@pytest.mark.parametrize("seed", range(4))
def test_streams_run_on_after_a_goaway_of_either_side(seed: int) -> None:
    pair = Pair(seed)
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


@pytest.mark.parametrize("seed", range(4))
def test_a_closed_stream_takes_resets_and_grants_without_an_effect(seed: int) -> None:
    pair = Pair(seed)
    stream = pair.open()
    pair.client.reset(stream, ErrorCode.CANCEL)
    pair.move()
    assert Reset(stream, ErrorCode.CANCEL) in pair.at_server
    for codec in (pair.client, pair.server):
        codec.reset(stream, ErrorCode.CANCEL)
        codec.grant(stream, 5)
    pair.move()


@pytest.mark.parametrize("seed", range(8))
def test_many_streams_leave_no_state(seed: int) -> None:
    pair = Pair(seed)
    for _ in range(600):
        stream = pair.client.new_stream()
        pair.client.send_headers(stream, REQUEST, is_end=seed < 4)
        if seed >= 4:
            pair.client.half_close(stream)
        pair.move()
        pair.server.send_headers(stream, RESPONSE, is_end=True)
        pair.move()
        pair.at_client.clear()
        pair.at_server.clear()
    assert len(pair.server._h2.streams) <= 300  # the table of the library
    assert len(pair.client._h2.streams) <= 300


@pytest.mark.parametrize("seed", range(4))
def test_controls_and_faults_are_told(seed: int) -> None:
    pair = Pair(seed)
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
        CODECS[seed % 2](LIMITS, is_client=False).receive(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")


class Peer:
    """A client whose frames are right, but for one in twenty of every second seed."""

    def __init__(self, seed: int) -> None:
        self.random, self.encoder, self.last = random.Random(seed), Encoder(), 1
        self.open: list[int] = []
        self.wrong = 0.05 * (seed % 2)
        self.sizes = (0, 1, 5, 300) if seed % 4 < 3 else (300, 16_384)

    def frame(self) -> bytes:
        """Return the next frame."""
        choose = self.random
        if choose.random() < self.wrong:
            return self._wrong()
        kind = choose.choices(
            (DATA, HEADERS, PRIORITY, SETTINGS, PING, WINDOW_UPDATE, UNKNOWN), (40, 30, 1, 2, 9, 30, 1)
        )[0]
        if not self.open and kind in (DATA, PRIORITY, WINDOW_UPDATE, UNKNOWN):
            kind = HEADERS
        stream, flags = choose.choice(self.open[-4:]) if self.open else 0, 0
        if kind == HEADERS:
            stream, flags, payload = self.last + 2, choose.choice((4, 4, 4, 5)), self._block()
            self.last = stream
            self.open += [stream] * (flags == 4)
        elif kind == WINDOW_UPDATE:
            stream, payload = choose.choice((0, stream)), struct.pack(">I", choose.choice((1, 100, 65_535)))
        elif kind == PING:
            payload, flags, stream = choose.randbytes(8), choose.choice((0, 1)), 0
        elif kind == SETTINGS:
            payload, stream = struct.pack(">HI", choose.choice((1, 4)), choose.randint(0, 9_999)), 0
        elif kind == PRIORITY:
            payload = bytes(4) + b"\x10"
        else:
            payload, flags = (
                choose.randbytes(choose.choice((0, 1, 5, 300))),
                kind == DATA and choose.random() < 0.1,
            )
            if flags:
                self.open.remove(stream)
        return frame(kind, flags, stream, payload)

    def _wrong(self) -> bytes:
        choose = self.random
        kind, stream = (
            choose.choice(
                (DATA, DATA, HEADERS, WINDOW_UPDATE, RST_STREAM, PING, SETTINGS, PUSH, CONTINUATION)
            ),
            0,
        )
        if choose.random() < 0.9:
            stream = choose.randint(max(0, self.last - 12), self.last + 4)
        payload = choose.randbytes(choose.choice((0, 4, 8, 16_384, 16_385)))
        if kind == HEADERS:
            payload = self._block()
        elif kind == WINDOW_UPDATE:
            payload = struct.pack(">I", choose.choice((0, 2**31 - 1, 2**31 + 7)))
        return frame(kind, choose.choice((0, 0, 1, 4, 8, 12, 32)), stream, payload)

    def _block(self) -> bytes:
        fields = [*REQUEST, (b"grpc-timeout", b"%dS" % self.random.randint(1, 99))]
        if self.random.random() < self.wrong:
            fields.append((b"content-length", b"%d" % self.random.choice((0, 5, 1_000))))
        return self.encoder.encode(fields)


@pytest.mark.parametrize("seed", range(60))
def test_both_codecs_take_the_same_from_any_peer(seed: int) -> None:
    """The same events, the same faults and the same windows, however the frames are cut and whatever the server does."""
    peer = Peer(seed)
    codecs = [kind(NARROW, is_client=False) for kind in CODECS]
    for codec in codecs:
        codec.start()
    data = PREFACE
    for _ in range(100):
        # h2 finds a wrong header of a frame before its end, `DirectCodec` at its end.
        cut = len(data) if peer.wrong else peer.random.randint(0, len(data))
        now, data = data[:cut], data[cut:] + b"".join(peer.frame() for _ in range(peer.random.randint(0, 3)))
        got = [taken(codec, now) for codec in codecs]
        assert got[0] == got[1]
        if isinstance(got[0], int):
            return
        act(codecs, peer)
        for stream in range(peer.last + 2):
            assert windows(codecs[0], stream) == windows(codecs[1], stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame (RFC 9113, 4.1)."""
    return struct.pack(">BHBBI", len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def request(stream: int, *fields: tuple[bytes, bytes], flags: int = 4) -> bytes:
    """Return the HEADERS frame of a request."""
    return frame(HEADERS, flags, stream, literal_block((*REQUEST, *fields)))


def data(stream: int, size: int, flags: int = 0) -> bytes:
    """Return a DATA frame."""
    return frame(DATA, flags, stream, bytes(size))


@pytest.mark.parametrize("wide", [1, WINDOW])
@pytest.mark.parametrize(
    "frames",
    [
        (data(3, 0, flags=1), data(3, 4)),
        (request(5, flags=0), frame(PING, 0, 0, bytes(8))),
        (request(1),),
        (frame(RST_STREAM, 0, 3, bytes(4)), request(3)),
        (frame(RST_STREAM, 0, 3, bytes(4)), data(3, 4)),
        (request(2),),
        (request(0),),
        (frame(HEADERS, 4, 5, b"\xff\xff\xff"),),
        tuple(data(3, 16_384) for _ in range(4)),
        (request(5), *(data(3 + 2 * (number % 2), 16_384) for number in range(10))),
        (frame(PING, 0, 3, bytes(8)),),
        (frame(PING, 0, 0, bytes(7)),),
        (frame(WINDOW_UPDATE, 0, 0, bytes(4)),),
        (frame(WINDOW_UPDATE, 0, 3, bytes(4)),),
        (frame(WINDOW_UPDATE, 0, 3, b"\x7f\xff\xff\xff"),),
        (data(0, 1),),
        (data(9, 1),),
        (frame(DATA, 8, 3, b"\x09short"),),
        (request(5, (b"content-length", b"2")), data(5, 3)),
        (data(3, 16_385),),
        (request(5 | 1 << 31), data(5, 3), frame(PING, 0, 0, bytes(8))),
    ],
)
def test_both_codecs_refuse_the_same(frames: tuple[bytes, ...], wide: int) -> None:
    """The events and the fault are the same, and the peer is told the same."""
    answers: list[tuple[list[list[Event] | int], bytes]] = []
    for kind in CODECS:
        codec = kind(NARROW, is_client=False)
        codec.start()
        codec.receive(PREFACE + request(3))
        codec.grant(CONNECTION, wide)
        codec.take()
        answers.append(([taken(codec, each) for each in frames], codec.take()))
    assert answers[0] == answers[1]
    assert answers[0][1]


def answer(chance: random.Random) -> bytes:
    """Return a frame of a server to the client of the next test, which may come at a wrong moment."""
    stream = chance.choice((1, 1, 1, 3, 5, 7))
    reserved = chance.choice((0, 0, 1 << 31))
    field = (b"x-number", b"%d" % chance.randint(0, 9))
    return chance.choice(
        (
            frame(HEADERS, 4, stream | reserved, literal_block((*RESPONSE, field))),
            frame(HEADERS, 4, stream, literal_block(RESPONSE)),
            frame(HEADERS, 4, stream, literal_block(((b":status", b"103"), field))),
            frame(HEADERS, 5, stream, literal_block((field,))),
            frame(DATA, chance.choice((0, 0, 1)), stream | reserved, bytes(chance.choice((0, 5, 16_000)))),
            frame(RST_STREAM, 0, stream, struct.pack(">I", 8)),
            frame(WINDOW_UPDATE, 0, chance.choice((0, stream)), struct.pack(">I", 70_000)),
            frame(SETTINGS, 0, 0, struct.pack(">HI", 4, chance.choice((0, 100, 200_000)))),
            frame(PUSH, 4, stream, struct.pack(">I", 2) + literal_block(REQUEST)),
            frame(GOAWAY, 0, 0, struct.pack(">II", stream, 0)),
        )
    )


@pytest.mark.parametrize("seed", range(100))
def test_both_clients_take_the_same_from_any_server(seed: int) -> None:
    """Stream 1 is open, 3 was reset by the client, 5 is half-closed, and 7 was never opened."""
    chance = random.Random(seed)
    codecs = [kind(NARROW, is_client=True) for kind in CODECS]
    for codec in codecs:
        codec.start()
        codec.receive(frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0))
        for stream in (1, 3, 5):
            codec.send_headers(stream, REQUEST, is_end=False)
        codec.reset(3, ErrorCode.CANCEL)
        codec.half_close(5)
        codec.send_data(1, bytes(200))
    for _ in range(20):
        now = answer(chance)
        got = [taken(codec, now) for codec in codecs]
        assert got[0] == got[1]
        assert codecs[0].take() == codecs[1].take()
        if isinstance(got[0], int):
            return
        for stream in (CONNECTION, 1, 3, 5, 7):
            assert windows(codecs[0], stream) == windows(codecs[1], stream)


@pytest.mark.parametrize("kind", CODECS)
def test_an_answer_on_a_stream_that_the_peer_reset_is_dropped(kind: type[H2Codec]) -> None:
    codec = kind(NARROW, is_client=False)
    codec.start()
    codec.receive(PREFACE + request(3) + frame(RST_STREAM, 0, 3, bytes(4)))
    codec.take()
    codec.send_headers(3, RESPONSE, is_end=True)
    assert not codec.waiting_bytes()


@pytest.mark.parametrize("seed", range(4))
def test_a_header_block_above_the_size_of_a_frame_is_sent_in_parts(seed: int) -> None:
    pair = Pair(seed)
    stream = pair.client.new_stream()
    pair.client.send_headers(stream, REQUEST, is_end=False)
    pair.move()
    fields = (*RESPONSE, *((b"n", pair.random.randbytes(5_000)) for _ in range(4)))
    pair.client._h2.decoder.max_header_list_size = 1 << 20
    pair.server.send_headers(stream, fields, is_end=False)
    pair.move()
    (event,) = (each for each in pair.at_client if isinstance(each, Headers))
    assert tuple(map(tuple, event.fields)) == fields


@pytest.mark.parametrize("before", [b"", request(5, flags=0)], ids=["alone", "in a header block"])
@pytest.mark.parametrize("kind", CODECS)
def test_a_frame_above_the_limit_is_refused_by_its_header(kind: type[H2Codec], before: bytes) -> None:
    """Nothing of it is kept: it may have 16 MiB."""
    codec = kind(NARROW, is_client=False)
    codec.start()
    codec.receive(PREFACE + request(3) + before)
    codec.receive(data(3, 16_385)[:8])
    assert taken(codec, data(3, 16_385)[8:9]) == 6  # FRAME_SIZE_ERROR


def test_a_change_of_the_table_is_told_in_the_next_header_block() -> None:
    """RFC 7541, 4.2. Blocks behind it are read by the smaller table."""
    codec = DirectCodec(NARROW, is_client=False)
    codec.start()
    codec.receive(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 1, 0)) + request(3))
    codec.take()
    codec.send_headers(3, RESPONSE, is_end=False)
    codec.send_headers(3, ((b"grpc-status", b"0"),), is_end=True)
    first, second = codec.take()[9:].split(frame(HEADERS, 5, 3, b"")[3:], 1)
    decoder = Decoder()
    decoder.max_allowed_table_size = 0
    assert first[0] & 0xE0 == 0x20
    assert list(decoder.decode(first[:-3], raw=True)) == list(RESPONSE)
    assert list(decoder.decode(second, raw=True)) == [(b"grpc-status", b"0")]


def windows(codec: H2Codec, stream: int) -> tuple[int, int]:
    """Return the bytes that each side may send on `stream`."""
    found: Any = codec._h2 if stream == CONNECTION else codec._h2.streams.get(stream)
    if found is None:
        return 0, 0
    own = (
        found._inbound_flow_control_window_manager if stream == CONNECTION else found._inbound_window_manager
    )
    return codec.sendable(stream), own.current_window_size


def taken(codec: H2Codec, data: bytes) -> list[Event] | int:
    """Return the events of `data`, or the code of the fault."""
    try:
        return list(codec.receive(data))
    except ProtocolFault as fault:
        assert codec.waiting_bytes()
        return fault.code


def act(codecs: list[H2Codec], peer: Peer) -> None:
    """Let both servers do the same on one stream. Its frames hold the same, but for the code of header blocks."""
    stream, what = peer.random.randint(max(0, peer.last - 12), peer.last), peer.random.randrange(5)
    for codec in codecs:
        found = codec._h2.streams.get(stream)
        if found is None or found.state_machine.state not in (
            StreamState.OPEN,
            StreamState.HALF_CLOSED_REMOTE,
        ):
            continue
        if what == 0 and found.state_machine.headers_sent is None:
            codec.send_headers(stream, RESPONSE, is_end=False)
        elif what == 1 and found.state_machine.headers_sent:
            codec.send_headers(stream, ((b"grpc-status", b"0"),), is_end=True)
        elif what == 2:
            codec.grant(stream, 500)
            codec.grant(CONNECTION, 500)
        elif what == 3 and codec.sendable(stream) >= 5:
            codec.send_data(stream, b"hello")
        elif what == 4 and stream % 3 == 0:
            codec.reset(stream, ErrorCode.CANCEL)


def test_literal_blocks_are_read_by_any_decoder() -> None:
    """Lengths at both sides of the borders of HPACK's integers."""
    fields = [
        (b":status", b"200"),
        *((b"n" * size, b"v" * size) for size in (1, 126, 127, 128, 254, 255, 300, 20_000)),
    ]
    decoder = Decoder()
    decoder.max_header_list_size = 1 << 20
    for _ in range(2):
        assert [tuple(each) for each in decoder.decode(literal_block(fields), raw=True)] == fields
