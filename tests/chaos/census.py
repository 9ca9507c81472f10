"""Observes every part of a mesh from outside: state held, health, tasks, descriptors and memory."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import grpc
import redis.asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.buckets.ledger import Ledger
from kvmesh.buckets.operations import Show, Shown
from kvmesh.metrics_page import NoMetrics, read_page
from kvmesh.redis_link import RedisLink, RedisUnavailable
from kvmesh.roles import CONTROL, SERVERS
from kvmesh.server import channel
from kvmesh.tenants.catalogue import Catalogue
from tests.chaos import rollout
from tests.chaos.records import Budget, Census, Placing, Process
from tests.chaos.rig import PAYER, Body, Rig
from tests.family import family
from tests.integration.live_mesh import accepts, engine_ready, role_of

ANSWER_S: Final = 3.0
"""A part that sends no response for this long is unreachable."""

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_FRONTEND_HOLDS: Final = ("live_requests", "draining_requests", "open_slots", "settlements_waiting")


class Unreachable(RuntimeError):
    """A part does not answer; the text names the part and the request."""


async def take(rig: Rig, at_s: float) -> Census:
    """Return the state of the mesh now. Raises Unreachable if a service that should run does not answer."""
    names = list(rig.mesh.parts)
    services = rig.mesh.running(*SERVERS)
    scrapes = dict(
        zip(services, await asyncio.gather(*(scrape(rig, name) for name in services)), strict=True)
    )
    serving = await asyncio.gather(*(is_serving(rig, name) for name in names))
    try:
        held = await rig.mesh.held()
    except grpc.aio.AioRpcError as error:
        raise Unreachable(f"a status was not answered: {error.details()}") from error
    bodies = await asyncio.gather(*(rig.body(name) for name in names))
    frontends = [name for name in services if name.startswith("frontend")]
    for name in frontends:
        for what in _FRONTEND_HOLDS:
            held[f"{name} {what}"] = int(scrapes[name].get(f"kvmesh_frontend_{what}", 0))
    held["open reservations"] = await open_reservations(rig)
    return Census(
        at_s=at_s,
        held={what: count for what, count in held.items() if count},
        processes={
            name: _process(name, body, scrapes.get(name), is_up)
            for name, body, is_up in zip(names, bodies, serving, strict=True)
        },
        budgets={name: _budget(scrapes[name]) for name in frontends},
        keys_for_good=await keys_for_good(rig),
        placings={name: _placing(scrapes[name]) for name in services if role_of(name) == "router"},
        settled={name: _settled(scrapes[name]) for name in frontends},
        rollout=rollout.told(await rollout.content_of(rig.mesh)),
        snapshots=await rollout.snapshots_of(rig.mesh),
    )


async def is_serving(rig: Rig, name: str) -> bool:
    """Return whether part `name` reports SERVING."""
    part = rig.mesh.parts[name]
    if not part.is_running:
        return False
    if name == "redis":
        return await accepts(part.address)
    if name.endswith("-engine"):
        return await engine_ready(part.address)
    # A new connection: a broken one waits before it reconnects.
    async with channel(part.address) as connection:
        try:
            stub = health_pb2_grpc.HealthStub(connection)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def scrape(rig: Rig, name: str) -> dict[str, float]:
    """Return the samples of service `name`. Raises Unreachable.

    Samples with labels are summed. Those with the label `kind` are also returned one by one, as "name kind".
    """
    address = rig.metrics_address(name)
    try:
        page = await read_page(address, ANSWER_S)
    except NoMetrics as error:
        raise Unreachable(f"{name} does not serve metrics at {address}") from error
    samples: dict[str, float] = {}
    for metric in text_string_to_metric_families(page.decode("utf-8", "replace")):
        for sample in metric.samples:
            if not sample.name.endswith("_bucket"):
                samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
                if kind := sample.labels.get("kind"):
                    samples[f"{sample.name} {kind}"] = sample.value
    return samples


async def keys_for_good(rig: Rig) -> list[str]:
    """Return the keys of the mesh's Redis that have no time to live, sorted."""
    host, _, port = rig.mesh.parts["redis"].address.rpartition(":")
    async with redis.asyncio.Redis(host=host, port=int(port), socket_timeout=ANSWER_S) as client:
        try:
            keys = [key async for key in client.scan_iter(count=1000)]
            times = [await client.ttl(key) for key in keys]
        except redis.RedisError as error:
            raise Unreachable(f"Redis does not answer: {error}") from error
    return sorted(key.decode() for key, left in zip(keys, times, strict=True) if left == -1)


async def open_reservations(rig: Rig) -> int:
    """Return how many reservations of the payer's tokens are open in Redis. Raises Unreachable."""
    config = rig.mesh.config
    payer = Catalogue(config).caller(PAYER)
    assert payer is not None, "the mesh has no payer"
    redis_link = RedisLink(f"redis://{rig.mesh.parts['redis'].address}")
    try:
        (shown,) = await Ledger(redis_link, config.mesh.name).run([Show(payer.account)])
    except RedisUnavailable as away:
        raise Unreachable(f"Redis does not answer: {away}") from away
    finally:
        await redis_link.close()
    assert isinstance(shown, Shown)
    return shown.ledger_totals.open_count


async def control_serves(rig: Rig) -> bool:
    """Return whether one control process leads, and every receiver is connected to it and has its snapshot."""
    receivers = len(rig.mesh.running("frontend", "router", "prefill", "decode"))
    leading = []
    for name in rig.mesh.running(CONTROL):
        samples = await scrape(rig, name)
        if samples.get("kvmesh_control_is_leader"):
            leading.append(samples)
    return [
        (one.get("kvmesh_control_receivers"), one.get("kvmesh_control_receivers_behind")) for one in leading
    ] == [(receivers, 0)]


async def registered(rig: Rig, mesh: str) -> set[str]:
    """Return the names of the processes with a lease in Redis; none if Redis does not answer."""
    host, _, port = rig.mesh.parts["redis"].address.rpartition(":")
    prefix = f"{mesh}:proc:"
    async with redis.asyncio.Redis(host=host, port=int(port), socket_timeout=ANSWER_S) as client:
        try:
            return {key.decode().removeprefix(prefix) async for key in client.scan_iter(f"{prefix}*", 1000)}
        except redis.RedisError:
            return set()


def _process(name: str, body: Body, samples: dict[str, float] | None, is_up: bool) -> Process:
    if samples is not None:
        prefix = f"kvmesh_{role_of(name)}_process_"
        tasks, fds, resident = (
            int(samples[prefix + what]) for what in ("tasks", "open_fds", "resident_bytes")
        )
        return Process(body.life, is_up, tasks, fds, resident)
    pid = body.pid
    return Process(body.life, is_up, None, _fds(pid) if pid else None, resident_bytes(pid) if pid else None)


def _budget(samples: dict[str, float]) -> Budget:
    requests = int(samples.get("kvmesh_frontend_requests_total", 0))
    budgeted, every = (
        int(samples.get(f"kvmesh_frontend_{what}_total", 0)) for what in ("budgeted_retries", "retries")
    )
    return Budget(requests, budgeted, every)


def _placing(samples: dict[str, float]) -> Placing:
    attempts, again = (
        int(samples.get(f"kvmesh_router_{what}_total", 0))
        for what in ("forwarded_requests", "rescheduled_requests")
    )
    return Placing(attempts, again)


def _settled(samples: dict[str, float]) -> int:
    """Return the tokens of prompts and outputs. The metric also counts recomputed ones, which are not charged."""
    return sum(int(samples[f"kvmesh_frontend_settled_tokens_total {kind}"]) for kind in ("prompt", "output"))


def resident_bytes(pid: int) -> int:
    """Return the resident memory of `pid` and its descendants. Shared pages count once for each process."""
    total = 0
    for one in family(pid):
        with suppress(OSError, IndexError):
            total += int(Path(f"/proc/{one}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    return total


def _fds(pid: int) -> int | None:
    """Return the open descriptors of `pid` and its descendants; None if they belong to another user."""
    try:
        return sum(sum(1 for _ in Path(f"/proc/{one}/fd").iterdir()) for one in family(pid))
    except OSError:
        return None
