"""Injected faults of a real tritonserver, begun and ended while it runs."""

import asyncio
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import grpc
from tritonclient.utils import InferenceServerException

from tests.integration.engine.servers import Client, launch, request
from tests.patience import patience


async def _await_report(client: Client, *, resident_min_bytes: int = 1, **wanted: int) -> dict[str, Any]:
    """Return the first load report with these values and this much memory."""
    async with patience(10.0), aclosing(client.subscribe("load_report")) as reports:
        async for report in reports:
            is_large = report["resident_bytes"] >= resident_min_bytes
            if is_large and all(report[name] == value for name, value in wanted.items()):
                return report
    raise AssertionError("subscription ended")


def _write(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


async def _until_error(client: Client, expected: str | None) -> None:
    """Send requests until their error is the expected one."""
    async with patience(5.0):
        while (error := (await client.run([20] * 9, 20)).error) != expected:
            await asyncio.sleep(0.02)
    assert error == expected


async def _until_hung(client: Client) -> dict[str, Any]:
    """Return the first heartbeat of an engine that runs a sequence and computes no step."""
    steps = -1
    async with patience(10.0), aclosing(client.subscribe("load_report")) as reports:
        async for report in reports:
            if report["sequences_running"] == 1 and report["steps_total"] == steps:
                return report
            steps = report["steps_total"]
    raise AssertionError("subscription ended")


async def test_faults_begin_and_end_at_a_running_server(tmp_path: Path) -> None:
    """Errors, a leak and a hang come from the file; cancels free all blocks; a poisoned prompt kills the server."""
    path = tmp_path / "faults"
    server = launch(
        tmp_path / "engine", "--kv-blocks=256", "--block-tokens=8", "--step-s=0.005", f"--faults=@{path}"
    )
    try:
        server.wait_ready()
        client = Client(server.grpc)
        right = await client.run([17, 23, 99], 8)
        assert right.error is None and len(right.tokens) == 8
        before = (await _await_report(client))["resident_bytes"]
        _write(path, "errors=1,leak_bytes=30000000")
        await _until_error(client, "engine fault: injected")
        _write(path, "")
        await _until_error(client, None)
        await _await_report(client, resident_min_bytes=before + 25_000_000)
        call = client.stream(request([5] * 9, 1000))
        await anext(aiter(call))
        _write(path, "hang=1")
        assert (await _until_hung(client))["blocks_free"] < 256
        call.cancel()
        await _await_report(client, sequences_running=0, sequences_waiting=0, blocks_free=256)
        _write(path, "die=17-23-99")
        async with patience(10.0):
            while server.process.poll() is None:
                with suppress(TimeoutError, InferenceServerException, grpc.aio.AioRpcError):
                    await asyncio.wait_for(client.run([17, 23, 99], 8), 1.0)
        await client.close()
    finally:
        server.kill()
