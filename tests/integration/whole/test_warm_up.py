"""The start of frontends in a whole mesh: golden requests through each hop, counted as no user's, and bounded."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.health import Probe, health
from kvmesh.redis_link import RedisLink
from kvmesh.start_conditions import START_WAIT_S
from tests.integration.generation import generate, token_request
from tests.integration.harness import Mesh, Part, configure, running_mesh, until
from tests.integration.scraped import sample, settled

pytestmark = pytest.mark.mesh

RESTARTS = 3

USERS: dict[str, tuple[str, ...]] = {
    "frontend-0": ("kvmesh_frontend_requests_total", "kvmesh_frontend_output_tokens_total"),
    "router-0": ("kvmesh_router_prompt_tokens_total", "kvmesh_router_placements_total"),
    "prefill-0": ("kvmesh_prefill_computed_tokens_total", "kvmesh_prefill_cached_tokens_total"),
    "decode-0": ("kvmesh_decode_generated_tokens_total", "kvmesh_decode_sent_tokens_total"),
}
"""Counters of the requests of users."""

CALLS = {f"{role}-0": f"kvmesh_{role}_control_calls_total" for role in ("router", "prefill", "decode")}
"""Counters of the requests that no user waits for."""


def started(mesh: Mesh, name: str) -> dict[str, Any]:
    """Return the log line with the durations of the last start of process `name`."""
    lines = [json.loads(line) for line in mesh.parts[name].log.read_text().splitlines() if line[:1] == "{"]
    return next(line for line in reversed(lines) if line.get("logger") == "kvmesh.start")


async def test_golden_requests_reach_every_hop_and_are_no_users(tmp_path: Path) -> None:
    """Each restart sends one through router, prefill and decode. Redis and all counters of users stay as they were."""
    config = configure(
        engine={"arithmetic": "hashed"},
        prefill={"replicas": 1},
        decode={"replicas": 1},
    )
    async with running_mesh(config, tmp_path) as mesh:
        frontend = mesh.parts["frontend-0"]
        redis = RedisLink(f"redis://{mesh.parts['redis'].address}")
        await frontend.end()
        is_counted = await has(mesh, "decode-0", CALLS["decode-0"])
        already = await sample(mesh, "decode-0", CALLS["decode-0"]) if is_counted else 0.0
        for number in range(1, RESTARTS + 1):
            await mesh.start("frontend-0")
            line = started(mesh, "frontend-0")
            assert line["event"] == "start conditions hold", line
            assert set(line["seconds"]) == {"tokenizers", "snapshot", "router link", "golden request"}
            for name, counter in CALLS.items():
                wanted = already + number
                await until(partial(reached, mesh, name, counter, wanted), 5, f"{wanted} at {name}")
            assert not await counted(mesh)
            if number < RESTARTS:
                await frontend.end()
        budgets = [
            key
            for key in await redis.execute("KEYS", f"{config.mesh.name}:*")
            if b"ledger" in key or b"exec" in key
        ]
        assert budgets == []
        assert (await settled(mesh)) == {"prompt": 0, "output": 0, "recomputed": 0}
        answer = await generate(mesh.client(), token_request([7] * 40, max_output_tokens=3), timeout_s=20)
        assert answer.error is None
        assert await sample(mesh, "frontend-0", "kvmesh_frontend_requests_total") == 1.0
        assert await sample(mesh, "router-0", "kvmesh_router_prompt_tokens_total") == 40.0
        await mesh.idle(5)
        await redis.close()


async def test_a_frozen_router_holds_a_frontend_back_for_the_bound(tmp_path: Path) -> None:
    """`kvmesh health` names the condition meanwhile. Then the frontend serves, and its log says without what."""
    config = configure(engine={"arithmetic": "hashed"}, prefill={"replicas": 1}, decode={"replicas": 1})
    async with running_mesh(config, tmp_path) as mesh:
        frontend, router = mesh.parts["frontend-0"], mesh.parts["router-0"]
        assert router.process is not None
        router.process.send_signal(signal.SIGSTOP)
        # Its lease would end within seconds. Then the frontend would know no router, and would not wait for one.
        redis = RedisLink(f"redis://{mesh.parts['redis'].address}")
        assert await redis.execute("PERSIST", f"{config.mesh.name}:proc:router-0") == 1
        await redis.close()
        try:
            said = set[str]()
            # A busy machine may answer no check within the bound.
            while not any("does not serve now" in each for each in said):
                await frontend.end()
                began_s = time.monotonic()
                frontend.start()
                said = await reasons_of_start(mesh, frontend)
                took_s = time.monotonic() - began_s
        finally:
            router.process.send_signal(signal.SIGCONT)
        # A tokenizer that a busy machine runs for two seconds may be named, too.
        assert any(
            re.search(r"does not serve now: starting: waits for (tokenizers, )?router link", each)
            for each in said
        ), said
        assert took_s >= START_WAIT_S
        line = started(mesh, "frontend-0")
        assert re.fullmatch(
            r"start timed out: serving without (tokenizers, )?router link, golden request", line["event"]
        )
        await until(lambda: serves(mesh), 20, "requests are served again")


async def reasons_of_start(mesh: Mesh, frontend: Part) -> set[str]:
    """Return what `kvmesh health` says about `frontend` until it serves."""
    starting = asyncio.create_task(mesh.ready(frontend))
    said = set[str]()
    host, _, port = frontend.address.rpartition(":")
    while not starting.done():
        # gRPC keeps a refused connection for seconds, so it is asked once something listens.
        if listens(host, int(port)):
            said.add(await asyncio.to_thread(health, Probe(frontend.address)))
        await asyncio.sleep(0.02)
    await starting
    return said


def listens(host: str, port: int) -> bool:
    """Return True if a process listens at the address."""
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


async def has(mesh: Mesh, name: str, metric: str) -> bool:
    """Return True if process `name` exports `metric`."""
    try:
        await sample(mesh, name, metric)
    except AssertionError:
        return False
    return True


async def reached(mesh: Mesh, name: str, metric: str, count: float) -> bool:
    """Return True if counter `metric` of process `name` is exactly `count`."""
    return await has(mesh, name, metric) and await sample(mesh, name, metric) == count


async def counted(mesh: Mesh) -> list[str]:
    """Return the counters of requests of users that are not zero."""
    return [
        metric for name, metrics in USERS.items() for metric in metrics if await sample(mesh, name, metric)
    ]


async def serves(mesh: Mesh) -> bool:
    """Return True if a request completes."""
    answer = await generate(mesh.client(), token_request([7] * 40, max_output_tokens=3), timeout_s=5)
    return answer.error is None
