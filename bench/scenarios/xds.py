"""ADS for 200 clients: memory and CPU of the role `xds`, and the time from a change of a frontend to its arrival.

The process under test is a real xds process. The clients are raw ADS streams in a process on the other core, each with a
connection of its own. Eight leases in Redis stand for frontends. One of them begins to drain and ends it, again and again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

from bench import accounting, aims, control
from bench.ads_client import AdsClient
from bench.processes import LOAD_CORE, Fleet, Process
from bench.results import ScenarioResults, quantile
from bench.windows import Pace
from controlplane.xds import schema
from controlplane.xds.resource_set import ENDPOINTS, TYPES
from kvmesh.membership.member import Member
from kvmesh.membership.registration import Registration
from kvmesh.redis_link import RedisLink
from kvmesh.server import channel

CLIENTS: Final = 200
FRONTENDS: Final = 8
CHANGES: Final = 100
QUICK_CHANGES: Final = 20
IDLE_S: Final = 20.0
QUICK_IDLE_S: Final = 5.0
CONNECT_S: Final = 30.0
CHANGE_S: Final = 10.0
TIMEOUT_S: Final = 120.0
MESH: Final = "kvmesh"
KEEPALIVE_S: Final = 20.0


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        fleet.configure({"engine": {"arithmetic": "hashed"}})
        tested = fleet.service("xds", "xds-0")
        clients = fleet.start_ready("clients", __name__, LOAD_CORE, redis=fleet.redis_url)
        before = accounting.rss_bytes(tested.pid)
        clients.ask("connect", address=tested.address, timeout_s=CONNECT_S + CHANGE_S)
        _add_idle(results, tested, before, QUICK_IDLE_S if pace.is_quick else IDLE_S)
        _add_changes(results, tested, clients, QUICK_CHANGES if pace.is_quick else CHANGES)


def _add_idle(results: ScenarioResults, tested: Process, before: int, seconds: float) -> None:
    began_s, began_ns = time.monotonic(), accounting.cpu_ns(tested.pid)
    time.sleep(seconds)
    busy_s, took_s = (accounting.cpu_ns(tested.pid) - began_ns) / 1e9, time.monotonic() - began_s
    with_clients = accounting.rss_bytes(tested.pid)
    results.add(aims.ADS_CLIENTS, aims.CORE_SHARE, "%", 100 * busy_s / took_s)
    results.add(aims.ADS_CLIENTS, aims.RESIDENT, "MB", with_clients / 1e6)
    results.add(aims.ADS_CLIENTS, "memory per client", "KB", (with_clients - before) / CLIENTS / 1e3)


def _add_changes(results: ScenarioResults, tested: Process, clients: Process, count: int) -> None:
    began_ns = accounting.cpu_ns(tested.pid)
    seconds = clients.ask("change", count=count, timeout_s=TIMEOUT_S)["seconds"]
    busy_ns = accounting.cpu_ns(tested.pid) - began_ns
    results.add(aims.ADS_CLIENTS, "CPU of a change, per client", "us", busy_ns / 1e3 / count / CLIENTS)
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        found = 1e3 * quantile(seconds, share)
        results.add(aims.ADS_CLIENTS, f"{aims.ARRIVAL}, {name}", "ms", found)


class Clients:
    """All clients and the leases of all frontends."""

    def __init__(self, redis_url: str) -> None:
        self._redis = RedisLink(redis_url)
        messages = schema.load()
        self._clients = [AdsClient(messages, MESH, "local") for _ in range(CLIENTS)]
        self._registrations = [
            Registration(self._redis, MESH, _frontend(number)) for number in range(FRONTENDS)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self, address: str) -> Mapping[str, Any]:
        """Register the frontends, and return when each client has all resources with all of them."""
        self._tasks = [asyncio.create_task(each.run()) for each in self._registrations]
        for client in self._clients:
            self._tasks.append(asyncio.create_task(client.run(channel(address, keepalive_s=KEEPALIVE_S))))
        async with asyncio.timeout(CONNECT_S):
            while not all(self._is_complete(client) for client in self._clients):
                await asyncio.sleep(0.1)
        return {}

    async def change(self, count: int) -> Mapping[str, Any]:
        """Let a frontend drain and end it in turn. Return the seconds from each change to its arrival at all clients."""
        seconds = []
        for number in range(count):
            before = self._clients[0].versions[ENDPOINTS]
            began_s = time.monotonic()
            self._registrations[0].update(state="serving", draining=number % 2 == 0)
            async with asyncio.timeout(CHANGE_S):
                while any(client.versions[ENDPOINTS] == before for client in self._clients):
                    await asyncio.sleep(0.002)
            seconds.append(time.monotonic() - began_s)
        return {"seconds": seconds}

    @staticmethod
    def _is_complete(client: AdsClient) -> bool:
        return set(client.versions) == set(TYPES) and len(client.endpoints()[0][1]) == FRONTENDS


def _frontend(number: int) -> Member:
    return Member(
        process_id=f"frontend-{number}",
        role="frontend",
        address=f"10.0.0.{number + 1}:7000",
        boot_id=f"boot of frontend-{number}",
        model_version="v1",
        block_tokens=32,
        pool="",
    )


async def serve(redis: str) -> None:
    """Serve until stdin ends."""
    clients = Clients(redis)
    await control.serve_commands(clients.connect, clients.change)


if __name__ == "__main__":
    control.main(serve, __doc__)
