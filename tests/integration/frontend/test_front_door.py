"""Memory that unauthenticated callers can make a frontend and a router hold: real processes, raw HTTP/2.

Covers the connection limit, slowloris, and the bound on unread messages.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2, status_pb2

from kvmesh.child import bound_command
from kvmesh.config import ROOT
from kvmesh.errors import from_rpc_error
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc
from kvmesh.ports import free_ports
from tests.patience import patience
from tests.raw_frames import Metadata, data_frames, framed, headers_frames, request_block
from tests.raw_http2 import RawConnection, RawStream

GENERATE = "/kvmesh.inference.v1.InferenceService/Generate"
ATTACH = "/kvmesh.attach.v1.AttachService/Attach"
MB = 1 << 20
TENANTS = f"""
[tenants.search]
[keys.search]
tenant = "search"
sha256 = "{"0" * 64}"
"""
WRONG_KEY: Metadata = (("authorization", "Bearer kvm_wrong"),)
WAIT_S = 30.0


@dataclass
class Process:
    """One process of the mesh and its memory."""

    address: str
    log: Path
    _process: psutil.Process
    started_bytes: int = 0

    def grown_mb(self) -> float:
        """Return the growth of the process since its start."""
        return (int(self._process.memory_info().rss) - self.started_bytes) / MB

    async def peak_mb(self, seconds: float) -> float:
        """Return the largest growth seen during `seconds`."""
        peak, loop = 0.0, asyncio.get_running_loop()
        until_s = loop.time() + seconds
        while loop.time() < until_s:
            peak = max(peak, self.grown_mb())
            await asyncio.sleep(0.02)
        return peak

    async def shrunk(self, limit_mb: float) -> None:
        """Wait until the growth since the start is at most `limit_mb`."""
        await until(lambda: self.grown_mb() < limit_mb, lambda: f"{self.grown_mb():.0f} MB stay")


async def until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    """Wait until `condition` is true. Raises AssertionError with the result of `what`."""
    try:
        async with patience(WAIT_S):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(what()) from None


def start(command: Sequence[str], log: Path) -> subprocess.Popen[str]:
    """Start a process that dies with the test run."""
    with log.open("wb") as errors:
        return subprocess.Popen(
            bound_command(command), cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        )


@asynccontextmanager
async def running(role: str, folder: Path, config: str = "") -> AsyncIterator[Process]:
    """Run a service without Redis; it dies with the test."""
    file, log = folder / "kvmesh.toml", folder / "log"
    file.write_text(config)
    redis_url = f"redis://127.0.0.1:{next(free_ports('127.0.0.1', 1))}"
    command = [sys.executable, "-m", f"services.{role}", "--redis", redis_url, "--config", str(file)]
    child = start(command, log)
    try:
        assert child.stdout is not None
        line = await asyncio.to_thread(child.stdout.readline)
        made = Process(json.loads(line)["address"], log, psutil.Process(child.pid))
        made.started_bytes = made._process.memory_info().rss
        yield made
    finally:
        child.kill()
        await asyncio.to_thread(child.communicate)


async def answered(address: str, count: int = 10) -> Counter[str]:
    """Return the errors of calls with too large requests; a call is repeated while the frontend is full."""
    reasons = Counter[str]()
    wrong = pb.GenerateRequest(text="x", limits=pb.Limits(max_output_tokens=1 << 30))
    async with patience(WAIT_S), grpc.aio.insecure_channel(address) as channel:
        while reasons.total() - reasons["CALLS_FULL"] < count:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(inference_pb2_grpc.InferenceServiceStub(channel).Generate(wrong)))
            details = from_rpc_error(caught.value)
            reasons[details.reason] += 1
            await asyncio.sleep((details.retry_after_s or 0.0) * (details.reason == "CALLS_FULL"))
    return reasons


async def send_half(stream: RawStream, size: int) -> None:
    """Send most of a message with the stated length `size`, as far as the peer allows."""
    try:
        await stream.send_data(framed(bytes(size - 1), length=size))
    except (ConnectionError, TimeoutError):
        return


@asynccontextmanager
async def half_bodies(address: str, count: int, path: str, metadata: Metadata = ()) -> AsyncIterator[None]:
    """Open calls, each on a connection of its own, with messages of just below 4 MB that never end."""
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(RawConnection.connect(address)) for _ in range(count)]
        sending = [
            asyncio.create_task(send_half(each.call(path, metadata), 4 * MB - 16)) for each in connections
        ]
        yield
        for each in sending:
            each.cancel()
        await asyncio.gather(*sending, return_exceptions=True)


async def flood(connection: RawConnection, path: str, count: int, metadata: Metadata = ()) -> None:
    """Open streams that send headers and nothing else."""
    block = request_block(path, metadata)
    await connection.flood(
        (headers_frames(2 * each + 1, block)[0].serialize() for each in range(count)), batch=500
    )


@pytest.mark.parametrize("caller", ["anybody", "wrong key"])
async def test_unfinished_messages_use_little_memory(caller: str, tmp_path: Path) -> None:
    """A limited number is read at once, none of unknown callers; legitimate calls are answered meanwhile."""
    tenants = "" if caller == "anybody" else TENANTS
    metadata = WRONG_KEY if caller == "wrong key" else ()
    async with (
        running("frontend", tmp_path, tenants) as process,
        half_bodies(process.address, 40, GENERATE, metadata),
    ):
        peak = asyncio.create_task(process.peak_mb(2.0))
        reasons = await answered(process.address)
        assert set(reasons) == {"FIELD_OUT_OF_RANGE" if caller == "anybody" else "CREDENTIALS_MISSING"}
        assert await peak < (110 if caller == "anybody" else 30)


async def test_a_message_with_too_large_a_length_is_refused(tmp_path: Path) -> None:
    """The error does not wait for any byte of the message."""
    async with (
        running("frontend", tmp_path) as process,
        RawConnection.connect(process.address) as connection,
    ):
        stream = connection.call(GENERATE)
        await stream.send_data(framed(b"", length=64 * MB))
        await stream.ended()
        assert stream.status == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert "larger than max" in stream.message


@pytest.mark.parametrize("tenants", ["", TENANTS], ids=["anybody", "without key"])
async def test_headers_without_a_message_use_little_memory_for_a_short_time(
    tenants: str, tmp_path: Path
) -> None:
    """Calls beyond the bound are refused at once, and the held memory is freed. The bound is lower than gRPC's own."""
    config = "[frontend]\nrequest_timeout_s = 2\nunread_calls_max = 500\n" + tenants
    async with AsyncExitStack() as stack:
        process = await stack.enter_async_context(running("frontend", tmp_path, config))
        connections = [
            await stack.enter_async_context(RawConnection.connect(process.address)) for _ in range(8)
        ]
        peak = asyncio.create_task(process.peak_mb(3.0))
        await asyncio.gather(*(flood(each, GENERATE, 450) for each in connections))
        reasons = await answered(process.address)
        assert set(reasons) - {"CALLS_FULL"} == {"CREDENTIALS_MISSING" if tenants else "FIELD_OUT_OF_RANGE"}
        assert await peak < 150
        if not tenants:
            await process.shrunk(32)


async def test_a_client_that_acknowledges_no_limit_is_closed(tmp_path: Path) -> None:
    """Until the SETTINGS are acknowledged, gRPC's own defaults apply to the client: 16 MB of metadata per call."""
    async with (
        running("frontend", tmp_path) as process,
        RawConnection.connect(process.address) as connection,
    ):
        connection.answers = False
        connection.call(GENERATE)
        await connection.closed(WAIT_S)
    assert connection.is_closed


async def test_calls_beyond_the_limit_are_refused_with_a_status(tmp_path: Path) -> None:
    """Thousands at once on one connection: each gets RESOURCE_EXHAUSTED with RetryInfo, and no call ends without a
    status.
    """
    count, live = 2_400, 8
    config = f"[frontend]\nmax_live_requests = {live}\nunread_calls_max = {count}\n"
    async with (
        running("frontend", tmp_path, config) as process,
        RawConnection.connect(process.address) as connection,
    ):
        await connection.ping()
        block = request_block(GENERATE)
        body = framed(pb.GenerateRequest(text="x").SerializeToString())
        streams = [connection.open() for _ in range(count)]
        connection.send(
            *(
                frame.serialize()
                for each in streams
                for frame in (
                    *headers_frames(each.number, block),
                    *data_frames(each.number, body, end_stream=True),
                )
            )
        )
        for each in streams:
            await each.ended(WAIT_S)
    found = Counter((each.status, retries(each)) for each in streams)
    # These were accepted, and there is no router. On a slow machine others follow those whose wait has ended.
    assert live <= found[14, True] < count // 10, found
    assert found[8, True] == count - found[14, True], found


def retries(stream: RawStream) -> bool:
    """Return whether the status of `stream` has RetryInfo."""
    found: Iterable[object] = status_pb2.Status.FromString(stream.details).details
    return any(each.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for each in found)  # type: ignore[attr-defined]


async def test_an_attach_port_uses_little_memory_and_names_the_error(tmp_path: Path) -> None:
    """Hellos that never end, streams without a hello, and bytes that are no message."""
    async with AsyncExitStack() as stack:
        process = await stack.enter_async_context(running("router", tmp_path))
        connection = await stack.enter_async_context(RawConnection.connect(process.address))
        junk = connection.call(ATTACH)
        await junk.send_message(b"\xff" * 20)
        await junk.ended()
        assert junk.status == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        lines = [line for line in process.log.read_text().splitlines() if ATTACH in line]
        assert len(lines) == 1 and json.loads(lines[0])["level"] == "warning"
        await stack.enter_async_context(half_bodies(process.address, 40, ATTACH))
        silent = await stack.enter_async_context(RawConnection.connect(process.address))
        await flood(silent, ATTACH, 900)
        assert await process.peak_mb(2.0) < 110
