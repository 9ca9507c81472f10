"""Hostile clients of the HTTP port: typed errors, nothing left behind, and other requests go on."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

from kvmesh.attach.v1 import attach_pb2 as attach
from services.frontend.surface import slow_reader
from services.frontend.surface.openai import app
from tests.integration.frontend.conftest import Serving, serving_frontend, until
from tests.integration.frontend.scripted_router import Pool, oracle, serving_router
from tests.patience import patience
from tests.raw_http1 import Client, connected, get, post

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MIB = 1 << 20


def chat(**fields: Any) -> bytes:
    """Return the body of a conversation."""
    return json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, **fields}).encode()


def with_raw(field: bytes) -> bytes:
    """Return the body of a conversation with a field of any bytes."""
    return chat()[:-1] + b", " + field + b"}"


def saying(content: bytes) -> bytes:
    """Return the body of a conversation with a content of any bytes."""
    return b'{"messages": [{"role": "user", "content": "%b"}]}' % content


def nested(depth: int) -> bytes:
    """Return arrays in each other."""
    return b"[" * depth + b"]" * depth


MALFORMED, RANGE, UNKNOWN = "MESSAGE_MALFORMED", "FIELD_OUT_OF_RANGE", "FIELD_UNKNOWN"
BODY = "(body)"
BAD: dict[str, tuple[bytes, str, str]] = {
    "nothing": (b"", MALFORMED, BODY),
    "no JSON": (b"model=reference&stream=1", MALFORMED, BODY),
    "half of it": (chat()[:-5], MALFORMED, BODY),
    "more behind it": (chat() + b"}", MALFORMED, BODY),
    "an array": (b"[]", RANGE, BODY),
    "null": (b"null", RANGE, BODY),
    "deep nesting": (nested(100_000), RANGE, BODY),
    "deep nesting in a field": (with_raw(b'"metadata":' + nested(100_000)), MALFORMED, BODY),
    "deep nesting in tools": (with_raw(b'"tools":[{"a":' + nested(500) + b"}]"), RANGE, "tools"),
    "deep nesting in arguments": (
        with_raw(b'"chat_template_kwargs":{"a":' + nested(500) + b"}"),
        RANGE,
        "chat_template_kwargs",
    ),
    "a wrong type": (chat(messages="x"), RANGE, "messages"),
    "a wrong type inside": (chat(messages=[{"role": 1, "content": "x"}]), RANGE, "messages[0].role"),
    "text for a number": (chat(max_tokens="3"), RANGE, "max_tokens"),
    "a fraction for a number": (chat(max_tokens=3.5), RANGE, "max_tokens"),
    "true for a number": (chat(max_tokens=True), RANGE, "max_tokens"),
    "a number beyond doubles": (with_raw(b'"temperature": 1e400'), RANGE, "temperature"),
    "a number beyond floats": (with_raw(b'"temperature": 1e300'), RANGE, "temperature"),
    "a long number": (with_raw(b'"seed": ' + b"9" * 5000), RANGE, "seed"),
    "a negative number": (chat(seed=-1), RANGE, "seed"),
    "an endless time": (with_raw(b'"deadline_ms": 1e308'), RANGE, "deadline_ms"),
    "a bias beyond floats": (with_raw(b'"logit_bias": {"5": 1e300}'), RANGE, "logit_bias[5]"),
    "a bias of no token": (with_raw(b'"logit_bias": {"9999999999": 1}'), RANGE, "logit_bias.9999999999"),
    "NaN": (with_raw(b'"temperature": NaN'), MALFORMED, BODY),
    "Infinity": (with_raw(b'"temperature": -Infinity'), MALFORMED, BODY),
    "an unknown field": (chat(max_token=3), UNKNOWN, "max_token"),
    "an unknown field with NUL": (with_raw(b'"a\\u0000`": 1'), UNKNOWN, "a\0`"),
    "a lone surrogate": (saying(b"\\ud800"), MALFORMED, BODY),
    "a lone low surrogate": (saying(b"\\udc00x"), MALFORMED, BODY),
    "a surrogate in UTF-8": (saying(b"\xed\xa0\x80"), "INVALID_UTF8", BODY),
    "broken UTF-8": (saying(b"\xff"), "INVALID_UTF8", BODY),
    "NUL as it is": (saying(b"\0"), MALFORMED, BODY),
    "a byte order mark": (b"\xef\xbb\xbf" + chat(), MALFORMED, BODY),
    "UTF-16": (chat().decode().encode("utf-16"), MALFORMED, BODY),
    "an unknown role": (chat(messages=[{"role": "a\0", "content": "x"}]), "TEMPLATE_REFUSED", "messages"),
}


Visit = Callable[..., Awaitable[Client]]
"""Connects to a serving frontend; a second argument is the size of the client's buffer in the kernel."""


@pytest.fixture
async def visit() -> AsyncIterator[Visit]:
    """Connects clients, and cuts them at the end."""
    clients: list[Client] = []

    async def visited(serving: Serving, receive_buffer: int = 0) -> Client:
        clients.append(await connected(serving.http_address, receive_buffer))
        return clients[-1]

    yield visited
    for client in clients:
        client.writer.transport.abort()


def parsed(received: bytes) -> tuple[int, dict[str, Any]]:
    """Return status and body of the last response."""
    head, _, body = received.rpartition(b"\r\n\r\n")
    return int(head.rpartition(b"HTTP/1.1 ")[2][:3]), json.loads(body)


async def answer(client: Client, data: bytes) -> tuple[int, dict[str, Any]]:
    """Send a request on an open connection; return status and body of its response."""
    client.received.clear()
    client.send(data)
    await client.until(b"}")
    async with patience(20):
        while True:
            with suppress(ValueError):
                return parsed(bytes(client.received))
            client.received += await client.reader.read(1 << 16)


def checked(found: tuple[int, dict[str, Any]]) -> tuple[int, str, str | None]:
    """Return status, code and parameter of an error of OpenAI's form."""
    status, body = found
    error = body["error"]
    assert {"message", "type", "param", "code"} <= set(error) and error["message"]
    return status, error["code"], error["param"]


async def test_bad_bodies_are_refused_by_name(visit: Visit, serving: Serving, pool: Pool) -> None:
    """The connection stays open, and no router hears of any of them."""
    client = await visit(serving)
    for name, (body, code, param) in BAD.items():
        found = checked(await answer(client, post(CHAT, body)))
        assert found == (400, code, param), f"{name}: {found}"
    assert not pool.submits
    assert (await answer(client, post(CHAT, chat())))[0] == 200
    await serving.until_empty()


async def test_of_repeated_fields_the_last_counts(visit: Visit, serving: Serving) -> None:
    client = await visit(serving)
    status, body = await answer(client, post(CHAT, with_raw(b'"max_tokens": 2')))
    assert status == 200 and body["usage"]["completion_tokens"] == 2


async def test_an_encoded_body_is_refused_by_the_name_of_its_coding(visit: Visit, serving: Serving) -> None:
    client = await visit(serving)
    for coding in ("gzip", "br", "gzip, identity"):
        found = await answer(client, post(CHAT, gzip.compress(chat()), f"Content-Encoding: {coding}"))
        assert checked(found) == (400, "FEATURE_UNSUPPORTED", "Content-Encoding")
        assert coding in found[1]["error"]["message"]
    assert (await answer(client, post(CHAT, chat(), "Content-Encoding: identity")))[0] == 200


async def test_unknown_models_paths_and_methods_are_refused_in_the_form_of_all_errors(
    visit: Visit,
    serving: Serving,
) -> None:
    client = await visit(serving)
    for data, wanted in (
        (post(CHAT, chat(model="no")), (404, "MODEL_UNKNOWN", "model")),
        (get("/v1/models/%ff%00x"), (404, "MODEL_UNKNOWN", "model")),
        (get("/v1/chat"), (404, "PATH_UNKNOWN", None)),
        (get("/health/"), (404, "PATH_UNKNOWN", None)),
        (get("//health"), (404, "PATH_UNKNOWN", None)),
        (get(CHAT), (405, "METHOD_NOT_ALLOWED", None)),
        (get(CHAT).replace(b"GET", b"OPTIONS"), (405, "METHOD_NOT_ALLOWED", None)),
        (get(CHAT).replace(b"GET", b"TRACE"), (405, "METHOD_NOT_ALLOWED", None)),
        (post("/health", b""), (405, "METHOD_NOT_ALLOWED", None)),
    ):
        assert checked(await answer(client, data)) == wanted, data
    client.received.clear()
    client.send(get("/health").replace(b"GET", b"HEAD") + get("/v1/models"))
    assert b'{"status":"ok"}' not in await client.until(b"reference")


async def test_bodies_beyond_the_limit_are_refused_while_they_come(visit: Visit, serving: Serving) -> None:
    """With a length at once, without one once the limit is reached. Another stream goes on meanwhile."""
    most = serving.frontend._config.frontend.message_bytes_max
    stated = await visit(serving)
    stated.send(post(CHAT, b"", "Expect: 100-continue").replace(b"Length: 0", b"Length: %d" % (64 * MIB)))
    assert checked(parsed(await stated.rest())) == (413, "MESSAGE_TOO_LARGE", BODY)
    endless = await visit(serving)
    endless.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    flood = asyncio.create_task(endless.flood(b"10000\r\n%b\r\n" % (b" " * 0x10000)))
    other = await visit(serving)
    assert (await answer(other, post(CHAT, chat())))[0] == 200
    await flood
    assert checked(parsed(await endless.rest())) == (413, "MESSAGE_TOO_LARGE", BODY)
    assert str(most) in str(bytes(endless.received))


async def test_a_body_that_does_not_come_is_refused_in_time(visit: Visit, pool: Pool) -> None:
    """Also one that comes a byte at a time (slowloris), or is shorter than its length says."""
    async with serving_at(pool, request_timeout_s=0.2) as serving:
        head, _, body = post(CHAT, chat()).partition(b"\r\n\r\n")
        silent = await visit(serving)
        silent.send(head + b"\r\n\r\n" + body[:-1])
        slow = await visit(serving)
        slow.send(post(CHAT, b"").replace(b"Length: 0", b"Length: %d" % MIB))
        dripping = asyncio.create_task(slow.flood(b" "))
        await dripping
        for client in (silent, slow):
            assert checked(parsed(await client.rest())) == (408, "REQUEST_TIMEOUT", None)
        assert len(serving.frontend._calls._reader.unread) == 0
        assert not pool.submits
        await serving.until_empty()


@asynccontextmanager
async def serving_at(pool: Pool, **section: Any) -> AsyncIterator[Serving]:
    """Serve a frontend with one router, and `section` as its configuration."""
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving_router(pool, "router-0"))
        made = await stack.enter_async_context(serving_frontend(**section))
        made.route([("router-0", address)])
        await made.until_up(1)
        yield made


async def test_a_client_that_leaves_before_its_request_runs_leaves_nothing(
    visit: Visit, serving: Serving, pool: Pool
) -> None:
    """In the middle of its headers, of its body, with a request behind a running one."""
    tasks = asyncio.all_tasks()
    request = post(CHAT, chat(max_tokens=300))
    pool.hold_at = "queued"
    for data, submits in (
        (request[:20], 0),
        (request[:-10], 0),
        (request + request, 1),
        (request + b"\0" * 1000, 1),
    ):
        pool.submits.clear()
        client = await visit(serving)
        client.send(data)
        await until(lambda count=submits: len(pool.submits) >= count, "its first request is submitted")  # type: ignore[misc]
        client.writer.transport.abort()
        await serving.until_empty()
        await until(lambda: len(serving.frontend.http.connections) == 0, "its connection is gone")
        assert len(pool.submits) == submits
    await until(lambda: asyncio.all_tasks() <= tasks, "its tasks have ended")


async def unread(visit: Visit, serving: Serving, data: bytes) -> Any:
    """Send `data` from a client with small buffers that does not read; return the server's end of its connection."""
    known = set(serving.frontend.http.connections.open)
    client = await visit(serving, 4096)
    await until(lambda: set(serving.frontend.http.connections.open) > known, "it is connected")
    (target,) = set(serving.frontend.http.connections.open) - known
    ending: Any = target
    plain = ending.transport.get_extra_info("socket")
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client.send(data)
    return target


async def test_a_client_that_stops_reading_is_cut(
    visit: Visit, serving: Serving, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds some 64 KB beside its tokens, others go on, and then its connection and its request end."""
    monkeypatch.setattr(slow_reader, "TAIL_S", 0.3)
    monkeypatch.setattr(app, "REFUSAL_S", 0.1)
    body = b'{"prompt": [9, 9], "max_tokens": 1000, "return_token_ids": true, "stream": true}'
    target = await unread(visit, serving, post(COMPLETIONS, body))
    await until(lambda: target.flow.write_paused, "its connection takes nothing")
    for run in list(pool.runs):  # as decode does, whose client takes no more
        assert run.session is not None
        run.session.outbox.finish(run.slot, run.log.sent, attach.Finish.REASON_SLOW_READER)
        pool.drop(run)
    held = target.transport._transport.get_write_buffer_size()
    assert held <= 4 * (1 << 16)
    other = await visit(serving)
    status, answered = await answer(
        other, post(COMPLETIONS, b'{"prompt": [8], "max_tokens": 50, "return_token_ids": true}')
    )
    assert status == 200 and answered["choices"][0]["token_ids"] == oracle([8], 50)
    other.writer.transport.abort()
    await until(lambda: len(serving.frontend.http.connections) == 0, "both connections are gone", 20)
    await serving.until_empty()


async def test_an_unread_plain_answer_is_cut(
    visit: Visit, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "TAIL_S", 0.1)
    body = json.dumps({"prompt": "x " * 1900, "return_token_strs": True}).encode()
    await unread(visit, serving, post("/tokenize", body) * 8)
    await until(lambda: len(serving.frontend.http.connections) == 0, "its connection is gone", 20)
