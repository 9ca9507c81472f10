"""The mock worker and the client over a real connection: nothing but a whole answer is done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench.peers import chat, chat_client
from bench.peers.chat_client import ChatConnection
from bench.peers.routers import POLICIES, ROUTERS
from bench.peers.streams import Outcome, Stream
from bench.peers.worker import Worker, made_up_ids
from bench.processes import ANY_CORE, Fleet, prepare_kill
from kvmesh.ports import free_ports
from tests.patience import patience

TOKENS = 10
Tamper = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def worker(interval_s: float = 0.001) -> AsyncIterator[int]:
    """Serve as worker-0 and yield the port; every connection has ended behind it."""
    made = Worker("worker-0", interval_s)
    async with await made.serve(0) as server:
        yield server.sockets[0].getsockname()[1]
        async with patience(10):
            while made.connection_count:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def between(port: int, tamper: Tamper) -> AsyncIterator[int]:
    """Pass requests on to the worker at `port`, its answers through `tamper`, and yield the port of that."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_worker, to_worker = await asyncio.open_connection("127.0.0.1", port)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        to_worker.write(head + await reader.readexactly(length))
        await tamper(from_worker, writer)
        for end in (to_worker, writer):
            end.close()

    server = await asyncio.start_server(connection, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def asked(port: int, times: int = 1) -> list[Stream]:
    """Send some requests over one connection, one after another."""
    began_s = asyncio.get_running_loop().time()
    client = ChatConnection(port)
    streams = [Stream(0.0) for _ in range(times)]
    for one in streams:
        await client.stream("a prompt", TOKENS, one, began_s)
    client.close()
    return streams


async def test_the_worker_answers_over_one_connection_at_its_pace() -> None:
    """Three requests on one kept-alive connection are done, each token at its time."""
    async with worker(0.01) as port:
        streams = await asked(port, 3)
    for one in streams:
        assert (one.outcome, one.token_count, one.workers) == (Outcome.DONE, TOKENS, ["worker-0"]), one.detail
        assert one.first_s is not None and one.last_token_s is not None
        # Each token has its time from the request on; a busy machine is late with the first one and hurries after it.
        assert one.last_token_s - one.sent_s >= 0.01 * (TOKENS - 1)


@pytest.mark.parametrize(
    "path", ["/health", "/v1/models", "/get_model_info", "/get_server_info", "/model_info"]
)
async def test_the_worker_answers_the_calls_of_routers(path: str) -> None:
    """Health, models and facts are JSON with status 200."""
    async with worker() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nconnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 200")
    assert json.loads(body)


@pytest.mark.parametrize("lines", [9, 14, 25])
async def test_a_stream_cut_on_the_way_is_lost(lines: int) -> None:
    """A router that closes the connection in the middle of an answer has lost the stream."""

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(lines):
            writer.write(await reader.readline())

    async with worker() as port, between(port, cut) as middle:
        (one,) = await asked(middle)
    assert (one.outcome, one.detail) == (Outcome.LOST, "connection cut")
    assert 0 < one.token_count < TOKENS


async def test_a_stream_ended_early_as_http_asks_is_lost() -> None:
    """A last chunk in its right form does not make half an answer whole."""

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readuntil(b"\r\n\r\n"))
        for _ in range(4 * 3):  # a chunk: its size, two lines of the event, the end
            writer.write(await reader.readline())
        writer.write(b"0\r\n\r\n")

    async with worker() as port, between(port, end) as middle:
        (one,) = await asked(middle)
    assert (one.outcome, one.detail, one.token_count) == (Outcome.LOST, "ended without [DONE]", 3)


async def test_a_mute_stream_is_given_up_and_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that stays open and brings nothing ends at the client."""
    monkeypatch.setattr(chat_client, "MUTE_S", 0.2)
    hold = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(14):
            writer.write(await reader.readline())
        await hold.wait()

    async with worker() as port, between(port, mute) as middle:
        (one,) = await asked(middle)
        hold.set()
    assert (one.outcome, one.detail) == (Outcome.LOST, "mute for 0.2 s")
    assert one.pause_s >= 0.2


async def test_an_error_status_is_a_refusal_and_the_next_request_goes_through() -> None:
    """Before the first token nothing is lost; the client opens another connection."""
    refusals = iter([True])

    async def refuse_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if next(refusals, False):
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
            return
        while data := await reader.read(1 << 16):
            writer.write(data)
            if b"0\r\n\r\n" in data:
                return

    async with worker() as port, between(port, refuse_once) as middle:
        first, second = await asked(middle, 2)
    assert (first.outcome, first.detail) == (Outcome.REFUSED, "status 503")
    assert second.outcome is Outcome.DONE


async def test_a_worker_killed_under_a_stream_loses_it() -> None:
    """The experiment's own fault, without a router: SIGKILL in the middle of an answer."""
    (port,) = free_ports("127.0.0.1", 1)
    with Fleet() as fleet:
        options = {"port": port, "name": "worker-2", "interval_s": 0.1}
        process = fleet.module("worker-2", "bench.peers.worker", ANY_CORE, **options)
        await asyncio.to_thread(process.wait_for_port, port)

        async def kill(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for number in range(100):
                if number == 14:
                    prepare_kill(process)()
                writer.write(await reader.readline())

        async with between(port, kill) as middle:
            (one,) = await asked(middle)
    assert (one.outcome, one.detail) == (Outcome.LOST, "connection cut")
    assert 0 < one.token_count < TOKENS


async def test_made_up_ids_tell_prompts_apart() -> None:
    """A router that routes by ids would send all prompts to one worker if all had the same ids."""
    first, second, longer = (
        made_up_ids(chat.request_body(text, TOKENS)) for text in ("aaaabbbb", "aaaacccc", "aaaabbbbdddd")
    )
    assert first[0] == second[0] and first[1] != second[1]
    assert longer[:2] == first
    assert made_up_ids(b'{"prompt": "aaaabbbb"}') == first


def test_every_router_is_told_its_workers_and_stays_on_loopback(tmp_path: Path) -> None:
    """The command line names each worker, the policy, and no address but loopback."""
    ports = (1, 2, 3, 4)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    for router in ROUTERS:
        command = router.command(tmp_path, 5, 6, POLICIES[1], ports)
        assert [word for word in command if word.startswith("http")] == urls
        assert "round_robin" in command
        assert [command[at + 1] for at, word in enumerate(command) if word.endswith("host")] == [
            "127.0.0.1"
        ] * 2
