"""Clients that break rules of HTTP/1.1 or bend them: a typed end, bounded memory, nothing left, a bystander is served."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest

from kvmesh.http1 import ending
from kvmesh.http1.limits import HEAD_BYTES_MAX, HEADER_BYTES, PIPELINED_MAX, READ_BYTES
from tests.patience import patience
from tests.raw_http1 import BOUND_S, get, post
from tests.unit.http1.site import serving, until

MALFORMED = (400, "HTTP_MALFORMED")
TOO_LARGE = (431, "HEADERS_TOO_LARGE")
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def echo(*lines: str, version: str = "1.1") -> bytes:
    """Return the head of a request with a body of 5 bytes, and the body."""
    return "\r\n".join([f"POST /echo HTTP/{version}", "Host: x", *lines, "", "0\r\n\r\n"]).encode()


SMUGGLING = {
    "both lengths": echo("Content-Length: 5", "Transfer-Encoding: chunked"),
    "both lengths, the other way": echo("Transfer-Encoding: chunked", "Content-Length: 5"),
    "two lengths": echo("Content-Length: 5", "Content-Length: 0"),
    "two equal lengths": echo("Content-Length: 5", "Content-Length: 5"),
    "a list of lengths": echo("Content-Length: 5, 5"),
    "a length with a sign": echo("Content-Length: +5"),
    "a negative length": echo("Content-Length: -5"),
    "a hexadecimal length": echo("Content-Length: 0x5"),
    "an endless length": echo("Content-Length: " + "9" * 30),
    "an empty length": echo("Content-Length:"),
    "two codings": echo("Transfer-Encoding: gzip, chunked"),
    "two codings, the other way": echo("Transfer-Encoding: chunked, gzip"),
    "two headers of a coding": echo("Transfer-Encoding: chunked", "Transfer-Encoding: identity"),
    "no coding": echo("Transfer-Encoding: identity"),
    "nearly chunked": echo("Transfer-Encoding: xchunked"),
    "chunked behind a vertical tab": echo("Transfer-Encoding: \x0bchunked"),
    "chunked in HTTP/1.0": echo("Transfer-Encoding: chunked", version="1.0"),
    "a space before the colon": echo("Content-Length : 5"),
    "a folded header": echo("A: b", " Content-Length: 5"),
    "a folded header with a tab": echo("A: b", "\tContent-Length: 5"),
    "a space before the first header": b"POST /echo HTTP/1.1\r\n Host: x\r\n\r\n",
    "LF alone": b"POST /echo HTTP/1.1\nHost: x\n\n",
    "LF behind a header": b"POST /echo HTTP/1.1\r\nHost: x\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "LF behind the headers": b"POST /echo HTTP/1.1\r\nHost: x\r\n\n",
    "CR alone": b"POST /echo HTTP/1.1\r\nHost: x\rContent-Length: 5\r\n\r\n",
    "NUL in a header": b"POST /echo HTTP/1.1\r\nHost: x\r\nA: \0\r\n\r\n",
    "no name": b"POST /echo HTTP/1.1\r\nHost: x\r\n: b\r\n\r\n",
    "no colon": b"POST /echo HTTP/1.1\r\nHost: x\r\nabc\r\n\r\n",
    "no host": b"GET /echo HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /echo HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
}
OTHERS = {
    "HTTP/0.9": b"GET /echo\r\n\r\n",
    "HTTP/2.0": b"GET /echo HTTP/2.0\r\nHost: x\r\n\r\n",
    "HTTP/1.2": b"GET /echo HTTP/1.2\r\nHost: x\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    "TLS": bytes.fromhex("1603010200010001fc0303") + bytes(500),
    "an unknown method": b"FOO /echo HTTP/1.1\r\nHost: x\r\n\r\n",
    "a host instead of a path": b"GET http://x HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes in the path": b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "NUL in the path": b"GET /\0 HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("data", [*SMUGGLING.values(), *OTHERS.values()], ids=[*SMUGGLING, *OTHERS])
async def test_what_is_no_clear_request_is_refused_with_a_close(data: bytes) -> None:
    """The application sees no request, and what stands behind it is not read as another one."""
    async with serving() as made:
        client = await made.connect(data + get("/smuggled"))
        assert await client.error() == MALFORMED
        assert not made.site.paths


async def test_connect_is_refused() -> None:
    async with serving() as made:
        client = await made.connect(b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await client.error() == (405, "METHOD_NOT_ALLOWED")
        assert not made.site.paths


HEADS = {
    "a long header": (b"GET / HTTP/1.1\r\nHost: x\r\nA: ", b"a" * 1000),
    "a long name": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"a" * 1000),
    "many headers": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"a: b\r\n" * 10),
    "many empty headers": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"a:\r\n" * 10),
    "spaces before a value": (b"GET / HTTP/1.1\r\nHost: x\r\nA:", b" " * 1000),
    "a long path": (b"GET /", b"a" * 1000),
    "a long query": (b"GET /?", b"a" * 1000),
    "spaces before the path": (b"GET ", b" " * 1000),
    "empty lines": (b"", b"\r\n" * 1000),
}
TRAILERS = {
    "many trailers": (CHUNKED + b"0\r\n", b"a: b\r\n" * 10),
    "a long trailer": (CHUNKED + b"0\r\nA: ", b"a" * 1000),
    "a long extension of a chunk": (CHUNKED + b"1;a=", b"a" * 1000),
}


@pytest.mark.parametrize(("start", "piece"), [*HEADS.values(), *TRAILERS.values()], ids=[*HEADS, *TRAILERS])
async def test_endless_lines_headers_and_trailers_are_refused(start: bytes, piece: bytes) -> None:
    async with serving() as made:
        client = await made.connect(start)
        await client.flood(piece)
        assert await client.error() == TOO_LARGE
        assert not made.site.bodies


async def test_the_number_of_headers_is_bounded() -> None:
    """Each of them takes memory, however short it is."""
    async with serving() as made:
        client = await made.connect(get("/", *["a:b"] * (HEAD_BYTES_MAX // HEADER_BYTES)))
        assert await client.error() == TOO_LARGE
        usual = await made.connect(
            get("/usual", *["name: a value of a gateway, some fifty bytes long"] * 100, "connection: close")
        )
        assert (await usual.rest()).endswith(b"/usual")


async def test_the_server_takes_little_more_than_the_bound_of_the_headers() -> None:
    """The parser itself collects a header until its end. So the bound is on what it is fed, too."""
    async with serving() as made:
        client = await made.connect(b"GET / HTTP/1.1\r\nHost: x\r\nA: ")
        await made.until_open(1)
        (target,) = made.server._open()
        await until(lambda: target._is_in_head)
        fed = 0
        while not target.transport.is_closing():
            target.data_received(b"a" * 1000)
            fed += 1000
        assert fed <= HEAD_BYTES_MAX + 2 * READ_BYTES
        assert await client.error() == TOO_LARGE


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n",
        b"-1\r\n",
        b"0x2\r\nab\r\n",
        b"f" * 17 + b"\r\n",
        b"2\r\nabc\r\n",
        b"2\nab\n",
        b"2 \r\nab\r\n",
    ],
)
async def test_a_broken_chunk_is_refused_and_the_application_hears_of_it(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "LINGER_S", 60.0)
    async with serving() as made:
        client = await made.connect(CHUNKED)
        await until(lambda: made.site.running)
        client.send(body)
        assert await client.error() == MALFORMED
        await until(lambda: made.site.gone == 1)


async def test_bytes_behind_a_body_do_not_hide_its_answer() -> None:
    """A body longer than its Content-Length says: the request is answered, then the connection is closed."""
    async with serving() as made:
        client = await made.connect(post("/echo", b"abc") + b"defg")
        assert (await client.rest()).endswith(b"abc")
        assert made.site.bodies == [b"abc"]


async def test_a_refusal_reaches_a_client_that_still_sends() -> None:
    """Unread bytes would reset the connection, and the client would lose the refusal."""
    async with serving() as made:
        client = await made.connect(b"\0" * (1 << 20))
        assert await client.error() == MALFORMED
        early = await made.connect(post("/early", bytes(1 << 20)))
        assert b"connection: close" in await early.rest()


async def test_a_client_that_sends_on_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "LINGER_BYTES", 1 << 18)
    monkeypatch.setattr(ending, "LINGER_S", 60.0)
    async with serving() as made:
        client = await made.connect(CHUNKED.replace(b"echo", b"early"))
        async with patience(BOUND_S):
            with suppress(OSError):
                while True:
                    client.send(b"8000\r\n%b\r\n" % bytes(0x8000))
                    await client.writer.drain()
        await made.until_open(0)


@pytest.mark.parametrize("data", [b"", b"GET /", get("/")[:-2], b"\r\n", get("/done") + b"GET"])
async def test_headers_that_do_not_come_end_the_connection(data: bytes) -> None:
    async with serving(head_s=0.02) as made:
        client = await made.connect(data)
        found = await client.closed()
        assert (b" 408 " in found) == (b"GET" in data)


async def test_a_drain_closes_a_connection_in_the_middle_of_its_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ending, "LINGER_S", 0.06)
    async with serving(head_s=0.03) as made:
        client = await made.connect(b"GET")
        await made.until_open(1)
        (target,) = made.server._open()
        await until(lambda: target._is_in_head)
        made.server.send_clients_on()
        assert await client.rest() == b""
        await made.until_open(0)


async def test_a_byte_now_and_then_does_not_extend_the_time_of_headers() -> None:
    async with serving(head_s=0.05) as made:
        client = await made.connect(b"GET /")
        await client.flood(b"a")
        assert (await client.error())[0] == 408


async def test_an_idle_connection_is_closed() -> None:
    async with serving(idle_s=0.02) as made:
        client = await made.connect(get("/done"))
        assert (await client.rest()).endswith(b"/done")


async def test_a_body_is_not_read_before_it_is_wanted() -> None:
    """A request that waits for its turn holds one read."""
    async with serving() as made:
        client = await made.connect(post("/later", bytes(1 << 20)))
        await until(lambda: made.site.running)
        (target,) = made.server._open()
        assert len(target.cycle.body) <= READ_BYTES
        made.site.go.set()
        assert (await client.rest()).endswith(b"/later")


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as made:
        count = PIPELINED_MAX
        client = await made.connect(get("/later") + b"".join(get(f"/{number}") for number in range(count)))
        await until(lambda: made.site.running)
        made.site.go.set()
        found = await client.until(b"\r\n\r\n/%d" % (count - 1))
        paths = [part.partition(b"HTTP")[0].decode() for part in found.split(b"\r\n\r\n")[1:]]
        assert paths == ["/later", *(f"/{number}" for number in range(count))]


@pytest.mark.parametrize("path", ["/", "/" + "a" * 4000])
async def test_pipelined_requests_are_bounded_in_number_and_bytes(path: str) -> None:
    """Those that were read are answered, and the connection is closed behind them: the client repeats the others."""
    async with serving() as made:
        client = await made.connect(get("/later") + get(path) * 1000)
        await until(lambda: made.site.running)
        (target,) = made.server._open()
        await until(lambda: target._is_over)
        assert 1 < len(target.pipeline) <= PIPELINED_MAX
        assert sum(len(cycle.scope["raw_path"]) for cycle, _ in target.pipeline) <= HEAD_BYTES_MAX
        made.site.go.set()
        answers = (await client.rest()).count(b"HTTP/1.1 200")
        assert answers == len(made.site.paths) <= 1 + PIPELINED_MAX


async def test_a_client_that_disconnects_with_requests_waiting_is_noticed() -> None:
    async with serving() as made:
        client = await made.connect(get("/watch"))
        await until(lambda: made.site.running)
        client.send(get("/never") * 3)
        (target,) = made.server._open()
        await until(lambda: len(target.pipeline) == 3)
        client.writer.transport.abort()
        await until(lambda: made.site.gone == 1)
        assert made.site.paths == ["/watch"]


async def test_a_half_closed_connection_counts_as_gone() -> None:
    async with serving() as made:
        client = await made.connect(get("/watch"))
        await until(lambda: made.site.running)
        client.writer.write_eof()
        await until(lambda: made.site.gone == 1)
        await made.until_open(0)


async def test_a_half_closed_connection_with_unread_output_is_cut() -> None:
    async with serving() as made:
        client = await made.connect(get("/flood"), receive_buffer=4096)
        await until(lambda: made.site.running)
        (target,) = made.server._open()
        await until(lambda: target.flow.write_paused)
        client.writer.write_eof()
        await until(lambda: made.site.gone == 1)
        await made.until_open(0)


async def test_an_unread_response_ends_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection whose client reads nothing does not stay in the table for ever."""
    monkeypatch.setattr(ending, "FLUSH_S", 0.02)
    async with serving(idle_s=0.02) as made:
        await made.connect(get("/big"), receive_buffer=4096)
        await until(lambda: made.site.paths and not made.site.running)
        await made.until_open(0)


async def test_little_of_an_unread_stream_is_taken() -> None:
    """The kernel would take megabytes, and the mesh would compute them."""
    async with serving() as made:
        await made.connect(get("/flood"), receive_buffer=4096)
        await until(lambda: made.site.running)
        (target,) = made.server._open()
        await until(lambda: target.flow.write_paused)
        assert made.site.sent <= 6 * (1 << 16)


async def test_a_connection_that_is_gone_is_freed_at_once() -> None:
    """Without a wait for the garbage collector, so that many idle connections leave no memory behind."""
    async with serving() as made:
        client = await made.connect(get("/a"))
        await client.until(b"\r\n\r\n/a")
        (target,) = made.server._open()
        freed: list[weakref.ref[Any]] = [weakref.ref(target), weakref.ref(target.cycle)]
        del target
        gc.disable()
        try:
            client.writer.transport.abort()
            await made.until_open(0)
            await until(lambda: not any(each() for each in freed))
        finally:
            gc.enable()


async def test_an_answer_left_unfinished_is_cut() -> None:
    async with serving() as made:
        client = await made.connect(get("/half"))
        assert (await client.closed()).endswith(b"\r\n\r\n/")


async def test_a_bug_of_the_application_is_told_without_its_details() -> None:
    async with serving() as made:
        client = await made.connect(get("/bug"))
        assert await client.error() == (500, "INTERNAL")
        assert b"secret" not in client.received


async def test_the_longest_idle_connection_makes_room() -> None:
    async with serving(connections_max=3) as made:
        busy = await made.connect(get("/later"))
        await until(lambda: made.site.running)
        first = await made.connect(get("/a"))
        await first.until(b"/a")
        second = await made.connect(b"GET")
        await made.until_open(3)
        third = await made.connect(get("/b"))
        await third.until(b"\r\n\r\n/b")
        assert await first.closed()
        assert len(made.server.connections) == 3
        fourth = await made.connect(get("/later"))
        await until(lambda: made.site.running == 2)
        assert await second.closed() == b""
        fifth = await made.connect(get("/later"))
        await until(lambda: made.site.running == 3)
        assert await (await made.connect(get("/c"))).closed() == b""
        assert made.server.connections.refused_total == 1
        made.site.go.set()
        for client in (busy, fourth, fifth):
            await client.until(b"\r\n\r\n/later")


async def test_idle_connections_do_not_push_out_one_with_requests() -> None:
    """However many come: the limit holds, and requests on a connection that is used go on."""
    async with serving(connections_max=20) as made:
        active = await made.connect()
        for number in range(300):
            await made.connect(b"GET"[: number % 4])
            assert len(made.server.connections) <= 20
            if number % 10 == 0:
                active.send(get(f"/{number}"))
                await active.until(b"\r\n\r\n/%d" % number)
        await until(lambda: made.server.connections.evicted_total == 301 - 20)


@pytest.mark.parametrize(
    "offer",
    [
        ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"),
        ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
    ],
)
async def test_an_offer_to_upgrade_is_ignored(offer: tuple[str, ...]) -> None:
    """JDK's client sends one with its first request. A body is a body, and never another request."""
    async with serving() as made:
        inner = get("/smuggled")
        chunked = CHUNKED[:-2] + "".join(f"{line}\r\n" for line in offer).encode() + b"\r\n"
        client = await made.connect(
            get("/a", *offer)
            + post("/echo", inner, *offer)
            + chunked
            + b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)
            + get("/b")
        )
        await client.until(b"\r\n\r\n/b")
        assert made.site.paths == ["/a", "/echo", "/echo", "/b"]
        assert made.site.bodies == [inner, inner]


async def test_a_client_may_wait_for_leave_to_send_its_body() -> None:
    async with serving() as made:
        request = post("/echo", b"abc", "Expect: 100-continue")
        client = await made.connect(request[:-3])
        await client.until(b"HTTP/1.1 100 Continue\r\n\r\n")
        client.send(b"abc" + get("/a"))
        assert b"connection: close" not in await client.until(b"\r\n\r\n/a")
        early = await made.connect(post("/early", b"abc", "Expect: 100-continue")[:-3])
        assert b"connection: close" in await early.rest()


async def test_http_1_0_is_answered_and_closed() -> None:
    async with serving() as made:
        client = await made.connect(b"GET /a HTTP/1.0\r\n\r\n")
        assert b"connection: close" in await client.rest()


async def test_the_pipeline_of_a_request_with_a_broken_body_ends_before_it() -> None:
    async with serving() as made:
        client = await made.connect(get("/later") + get("/a") + CHUNKED + b"zz\r\n" + get("/smuggled"))
        await until(lambda: made.site.running)
        made.site.go.set()
        assert (await client.rest()).endswith(b"\r\n\r\n/a")
        assert made.site.paths == ["/later", "/a"]
