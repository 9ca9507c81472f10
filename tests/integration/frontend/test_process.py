"""The frontend as a process: start, registration, address, drain on SIGTERM; a wrong start gives one sentence."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.child import bound_command
from kvmesh.config import ROOT
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc
from kvmesh.membership.member import Member
from kvmesh.membership.membership import read_members
from kvmesh.membership.registration import Registration
from kvmesh.redis_link import RedisLink
from services.frontend.requests.retry_state import ROUTER_WAIT_S
from services.frontend.surface.service import SERVICE_NAME
from tests.integration.frontend.scripted_router import Pool, serving_router
from tests.one_redis import ONE_REDIS
from tests.patience import patience

COMMAND = [sys.executable, "-m", "services.frontend"]


def start(redis_url: str) -> subprocess.Popen[bytes]:
    """Start a frontend that dies with the test run."""
    return subprocess.Popen(
        bound_command([*COMMAND, "--redis", redis_url, "--id", "frontend-7"]),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


async def test_a_process_serves_and_stops_cleanly(redis_url: str, pool: Pool) -> None:
    """From its ready line to exit 0; it finds its router through Redis."""
    redis = RedisLink(redis_url)
    process = start(redis_url)
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.to_thread(process.stdout.readline))
        assert (ready["role"], ready["id"]) == ("frontend", "frontend-7")
        async with serving_router(pool, "router-0") as address:
            member = Member(
                process_id="router-0",
                role="router",
                address=address,
                boot_id="1",
                model_version="kvmesh-1",
                block_tokens=32,
            )
            lease = asyncio.create_task(Registration(redis, "kvmesh", member).run())
            async with grpc.aio.insecure_channel(ready["address"]) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                call = stub.Generate(pb.GenerateRequest(text="Hello"), timeout=10)
                replies = [reply async for reply in call]  # waits for the router
            assert replies[-1].finished.usage.output_token_count == 256
            names = {member.process_id for member in await read_members(redis, "kvmesh")}
            assert names == {"frontend-7", "router-0"}
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 10) == 0
            names = {member.process_id for member in await read_members(redis, "kvmesh")}
            assert "frontend-7" not in names
            lease.cancel()
            await asyncio.gather(lease, return_exceptions=True)
    finally:
        process.kill()
        process.communicate()
        await redis.close()


@ONE_REDIS
async def test_health_follows_the_routers_and_not_their_restarts(redis_url: str, pool: Pool) -> None:
    """Without a router for some seconds it is NOT_SERVING, with a router SERVING again at once; draining keeps its
    meaning.
    """
    redis = RedisLink(redis_url)
    process = start(redis_url)
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.to_thread(process.stdout.readline))
        began_s = time.monotonic()
        async with grpc.aio.insecure_channel(ready["address"]) as channel:
            health = health_pb2_grpc.HealthStub(channel)

            async def until(expected: int, timeout_s: float) -> float:
                """Wait for that status of the process and of its service; return the seconds since the start."""
                async with patience(timeout_s):
                    for service in ("", SERVICE_NAME):
                        asked = health_pb2.HealthCheckRequest(service=service)
                        while (await health.Check(asked, timeout=20)).status != expected:
                            await asyncio.sleep(0.02)
                return time.monotonic() - began_s

            await until(serving, 2.0)
            assert await until(not_serving, ROUTER_WAIT_S + 5.0) >= ROUTER_WAIT_S - 0.5
            async with serving_router(pool, "router-0") as address:
                member = Member(
                    process_id="router-0",
                    role="router",
                    address=address,
                    boot_id="1",
                    model_version="kvmesh-1",
                    block_tokens=32,
                )
                lease = asyncio.create_task(Registration(redis, "kvmesh", member).run())
                await until(serving, ROUTER_WAIT_S - 1.0)
                pool.hold_at = "placed"
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                call = stub.Generate(pb.GenerateRequest(text="Hello"), timeout=20)
                await call.read()
                process.send_signal(signal.SIGTERM)
                await until(not_serving, 2.0)
                pool.hold_at = ""
                assert await asyncio.to_thread(process.wait, 10) == 0
                lease.cancel()
                await asyncio.gather(lease, return_exceptions=True)
    finally:
        process.kill()
        process.communicate()
        await redis.close()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[frontend]\nmax_live_request = 3\n", "did you mean frontend.max_live_requests?"),
        ('[mesh]\nmodel_dir = "no/such/model"\n', "no/such/model does not exist"),
    ],
)
def test_a_wrong_start_is_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    """Exit 2, and the message says what to change."""
    path = tmp_path / "kvmesh.toml"
    path.write_text(text)
    done = subprocess.run(
        [*COMMAND, "--config", str(path), "--redis", "redis://127.0.0.1:1/0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert sentence in done.stderr and "Traceback" not in done.stderr
