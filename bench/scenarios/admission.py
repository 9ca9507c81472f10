"""The cost of budgets in the frontend: admission from a quota lease, admission by Redis, and refusal.

The process under test is this module as a process. It calls the budgets of a frontend as the service does, over a real
Redis. CPU is that of the whole process per request: admission, settlement, and the frontend's side of all round trips.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import hiredis
import redis.asyncio

from bench import aims, control
from bench.processes import TEST_CORE, Fleet
from bench.results import ScenarioResults
from bench.windows import Pace
from kvmesh.buckets.ledger import Ledger
from kvmesh.buckets.limits import Account, Limit, Scope
from kvmesh.clock import MonotonicClock
from kvmesh.errors import MeshError
from kvmesh.metrics import Metrics
from kvmesh.redis_link import RedisLink
from kvmesh.redis_script import Script
from kvmesh.tenants.caller import Caller, ServiceClass, Tenant
from services.frontend.accounts.budgets.account_state import Reservation
from services.frontend.accounts.budgets.budgets import Budgets
from services.frontend.accounts.budgets.metrics import BudgetMetrics

REQUESTS = 20_000
QUICK_REQUESTS = 5_000
TIMEOUT_S = 120.0
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 200
MAX_OUTPUT_TOKENS = 1024
EMPTY_SCRIPT = Script("return 1")
WARM_TRIPS = 100
WARM_S = 1.5
"""Time of load before a measurement: a quota lease opens when the demand is known."""
ANSWER_S = 0.8
"""Timeout of Redis. On a busy machine a shorter one would measure the local fallback."""
BATCH = 64
"""Requests per iteration of the event loop in measurements of throughput."""


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        redis_url = fleet.redis()
        probe = fleet.start_ready("admission", __name__, TEST_CORE)
        requests = QUICK_REQUESTS if pace.is_quick else REQUESTS
        told = probe.ask("admission", redis=redis_url, requests=requests, timeout_s=TIMEOUT_S)
    leased, unleased, many, refused = (told[name] for name in ("leased", "unleased", "many", "refused"))
    results.add(aims.LEASED, aims.ADMISSION, "us", many["admit_us"])
    results.add(aims.LEASED, "CPU of a settlement", "us", many["settle_us"])
    results.add(aims.LEASED, "CPU of both, round trips and timers included", "us", many["cpu_us"])
    results.add(aims.LEASED, aims.ADMISSION_LATENCY, "us", leased["latency_us"])
    results.add(aims.UNLEASED, aims.ADMISSION_LATENCY, "us", unleased["latency_us"])
    results.add(aims.UNLEASED, "CPU of both, round trips and timers included", "us", unleased["cpu_us"])
    results.add("refused", aims.REFUSAL, "us", refused["cpu_us"])
    for way, trip in told["trips"].items():
        case = f"an empty script, by {way}"
        results.add(case, "round trip, p50", "us", trip["latency_us"])
        results.add(case, "CPU of a round trip", "us", trip["cpu_us"])


class Probe:
    """Budgets over one Redis."""

    def __init__(self, redis_url: str) -> None:
        self.link = RedisLink(redis_url)
        metrics = BudgetMetrics(Metrics("frontend"), lambda _: "bench")
        self.budgets = Budgets(
            Ledger(self.link, "bench"), f"{os.getpid()}", MonotonicClock(), metrics, answer_s=ANSWER_S
        )
        self.budgets.on_members(FRONTENDS)
        self.running = asyncio.create_task(self.budgets.run())
        self._numbers = itertools.count(1)

    async def close(self) -> None:
        """Settle all and end."""
        await self.budgets.flush(5)
        self.running.cancel()
        await asyncio.wait([self.running])
        await self.link.close()

    async def reserve(self, account: Caller) -> Reservation:
        """Admit a request as the frontend does: at once if possible, otherwise by Redis."""
        of_request = (account, f"r{next(self._numbers)}", PROMPT_TOKENS, MAX_OUTPUT_TOKENS)
        return self.budgets.try_reserve(*of_request) or await self.budgets.reserve(*of_request)

    def settle(self, reservation: Reservation) -> None:
        """Settle a request with a typical output."""
        self.budgets.settle(reservation, PROMPT_TOKENS, 0, OUTPUT_TOKENS)

    async def one(self, account: Caller, requests: int) -> dict[str, float]:
        """Warm up, then reserve and settle `requests` requests one after another (closed loop).

        Return microseconds: `cpu_us`, CPU of the process per request, and `latency_us`, the median time of `reserve`.
        """
        await self.warm(account)
        latencies = []
        cpu_ns = time.process_time_ns()
        for _ in range(requests):
            began_ns = time.perf_counter_ns()
            reservation = await self.reserve(account)
            latencies.append(time.perf_counter_ns() - began_ns)
            self.settle(reservation)
            await asyncio.sleep(0)
        cpu_us = (time.process_time_ns() - cpu_ns) / 1e3 / requests
        return {"latency_us": statistics.median(latencies) / 1e3, "cpu_us": cpu_us}

    async def many(self, account: Caller, requests: int) -> dict[str, float]:
        """Warm up, then reserve and settle BATCH requests at a time.

        Return microseconds of CPU per request: `cpu_us` of the process, `admit_us` of reserve, `settle_us` of settle.
        """
        await self.warm(account)
        admit_ns = settle_ns = 0
        began_ns = time.process_time_ns()
        for _ in range(requests // BATCH):
            rids = [f"r{next(self._numbers)}" for _ in range(BATCH)]
            at_ns = time.process_time_ns()
            held = [self.budgets.try_reserve(account, rid, PROMPT_TOKENS, MAX_OUTPUT_TOKENS) for rid in rids]
            admit_ns += time.process_time_ns() - at_ns
            rest = [rid for rid, reservation in zip(rids, held, strict=True) if reservation is None]
            asked = [self.budgets.reserve(account, rid, PROMPT_TOKENS, MAX_OUTPUT_TOKENS) for rid in rest]
            given = [reservation for reservation in held if reservation is not None]
            if asked:
                given += await asyncio.gather(*asked)
            at_ns = time.process_time_ns()
            for reservation in given:
                self.settle(reservation)
            settle_ns += time.process_time_ns() - at_ns
            await asyncio.sleep(0.002)
        per = 1e3 * (requests // BATCH * BATCH)
        return {
            "cpu_us": (time.process_time_ns() - began_ns) / per,
            "admit_us": admit_ns / per,
            "settle_us": settle_ns / per,
        }

    async def refuse(self, account: Caller, requests: int) -> dict[str, float]:
        """Send requests of an exhausted account. Return `cpu_us`, CPU per request, and `refused`, the share refused."""
        refused, cpu_ns = 0, time.process_time_ns()
        for number in range(requests):
            try:
                await self.reserve(account)
            except MeshError:
                refused += 1
            if not number % BATCH:
                await asyncio.sleep(0)
        return {"cpu_us": (time.process_time_ns() - cpu_ns) / 1e3 / requests, "refused": refused / requests}

    async def warm(self, account: Caller) -> None:
        """Send requests until the demand is known."""
        end_s = time.monotonic() + WARM_S
        while time.monotonic() < end_s:
            reservation = await self.budgets.reserve(account, f"w{next(self._numbers)}", PROMPT_TOKENS, 16)
            self.settle(reservation)
            await asyncio.sleep(0.0005)


def caller(name: str, limit: Limit) -> Caller:
    """Return a caller with its own organisation, tenant and key, each with `limit`."""
    scopes = tuple(Scope(f"{scope}:{name}", limit) for scope in ("organisation", "tenant", "key"))
    return Caller(
        tenant=Tenant(name=name, organisation=name),
        service_class=ServiceClass(
            name="standard", runtime_max_s=300, default_deadline_s=60, max_output_tokens=4096
        ),
        account=Account(name, scopes),
    )


PLENTY = Limit(6e7, 1e7, 6e10, 1e10, 0)
FRONTENDS = 16
"""Number of frontends that share the limits."""

NO_LEASE = Limit(6e7, 100, 6e10, 1e10, 0)
"""A burst too small for a quota lease of each frontend: every request goes to Redis."""
NOTHING = Limit(60, 1, 60_000, 2_000, 0)


class _Bare(asyncio.Protocol):
    """A connection with one request at a time."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self.transport: Any = None
        self.answer: asyncio.Future[object] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        answer = self._reader.gets()
        if answer is not False and self.answer is not None:
            self.answer.set_result(answer)


async def round_trips(redis_url: str, trips: int) -> dict[str, dict[str, float]]:
    """Return median latency and CPU of an empty script's round trip for each client, in microseconds."""
    link = RedisLink(redis_url)
    client: Any = redis.asyncio.Redis.from_url(redis_url, protocol=2)
    loop, place = asyncio.get_running_loop(), urlsplit(redis_url)
    _, bare = await loop.create_connection(_Bare, place.hostname or "", place.port or 6379)
    words: Any = ("EVALSHA", EMPTY_SCRIPT.digest, 0)
    packed = hiredis.pack_command(words)

    async def by_library() -> None:
        await client.execute_command("EVALSHA", EMPTY_SCRIPT.digest, 0)

    async def by_protocol() -> None:
        bare.answer = loop.create_future()
        bare.transport.write(packed)
        await bare.answer

    async def by_link() -> None:
        await link.scripts(EMPTY_SCRIPT, [((), ())])

    try:
        await by_link()  # this loads the script
        return {
            "redis-py": await _round_trip(by_library, trips),
            "a bare protocol": await _round_trip(by_protocol, trips),
            "kvmesh's connection": await _round_trip(by_link, trips),
        }
    finally:
        bare.transport.abort()
        await client.aclose()
        await link.close()


async def _round_trip(trip: Callable[[], Awaitable[None]], trips: int) -> dict[str, float]:
    for _ in range(WARM_TRIPS):
        await trip()
    latencies = []
    cpu_ns = time.process_time_ns()
    for _ in range(trips):
        began_ns = time.perf_counter_ns()
        await trip()
        latencies.append(time.perf_counter_ns() - began_ns)
        await asyncio.sleep(0)
    cpu_us = (time.process_time_ns() - cpu_ns) / 1e3 / trips
    return {"latency_us": statistics.median(latencies) / 1e3, "cpu_us": cpu_us}


async def serve() -> None:
    """Answer commands until stdin ends."""

    async def admission(redis: str, requests: int) -> Mapping[str, Any]:
        probe = Probe(redis)
        try:
            leased, unleased = caller("leased", PLENTY), caller("unleased", NO_LEASE)
            gc.collect()
            gc.freeze()
            one = {
                "leased": await probe.one(leased, requests),
                "unleased": await probe.one(unleased, requests // 10),
            }
            many = await probe.many(leased, requests)
            refused = await probe.refuse(caller("nothing", NOTHING), requests)
            if probe.budgets.outage.total:
                raise RuntimeError("Redis did not answer in time")
            trips = await round_trips(redis, requests // 5)
            return {**one, "many": many, "refused": refused, "trips": trips}
        finally:
            await probe.close()

    await control.serve_commands(admission)


if __name__ == "__main__":
    control.main(serve, __doc__)
