"""Snapshots: the time from publication to acknowledgement (ACK) by 16 receivers, and the cost of an idle control plane.

The process under test is a real control process. The receivers are those of kvmesh.snapshot, with leases in Redis, all in
one process on the other core. Cordons of a process that does not matter cause the publications.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import grpc

from bench import accounting, aims, control
from bench.processes import ANY_PORT, LOAD_CORE, TEST_CORE, Fleet, Process
from bench.results import BenchError, ScenarioResults, quantile
from bench.windows import Pace
from kvmesh.clock import MonotonicClock
from kvmesh.config import load
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import control_pb2_grpc
from kvmesh.membership.member import POOLS, Member
from kvmesh.membership.registration import Registration
from kvmesh.pools import pool_settings, version_names
from kvmesh.redis_link import RedisLink
from kvmesh.snapshot.dialing import ControlDialer
from kvmesh.snapshot.fence import Fence
from kvmesh.snapshot.identity import Identity
from kvmesh.snapshot.receiver import Receiver
from kvmesh.trust.networks import Networks
from kvmesh.trust.peers import Trust

RECEIVERS: Final = (
    *(("frontend", f"frontend-{number}", "") for number in range(4)),
    *(
        (role, f"stable-{role}-{number}", "stable")
        for role in ("router", "prefill", "decode")
        for number in range(3)
    ),
    *((role, f"next-{role}-0", "next") for role in ("router", "prefill", "decode")),
)
"""Role, name and pool of the 16 receivers."""

CORDONED: Final = "stable-decode-2"
PUBLICATIONS: Final = 200
QUICK_PUBLICATIONS: Final = 40
PAUSE_S: Final = 0.05
"""Time between a change and the next one, longer than most acknowledgements take."""

IDLE_S: Final = 20.0
QUICK_IDLE_S: Final = 5.0
CONNECT_S: Final = 30.0
CALL_S: Final = 10.0
TIMEOUT_S: Final = 120.0

TABLES: Final[dict[str, dict[str, Any]]] = {
    "engine": {"arithmetic": "hashed"},
    "versions.v1": {},
    "versions.v2": {},
    "pools.stable": {"version": "v1"},
    "pools.next": {"version": "v2"},
}


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    with Fleet() as fleet:
        fleet.configure(TABLES)
        times = fleet.folder / "times"
        tested = _start_control(fleet, times)
        receivers = fleet.start_ready(
            "receivers", __name__, LOAD_CORE, redis=fleet.redis_url, config=fleet.config_path
        )
        receivers.ask("connect", timeout_s=CONNECT_S + CALL_S)
        _add_idle(results, tested, QUICK_IDLE_S if pace.is_quick else IDLE_S)
        wanted = QUICK_PUBLICATIONS if pace.is_quick else PUBLICATIONS
        receivers.ask("publish", address=tested.address, count=wanted, timeout_s=TIMEOUT_S)
        _add_times(results, times, wanted)


def _start_control(fleet: Fleet, times: Path) -> Process:
    words = ("--times", str(times), "--config", str(fleet.config_path), "--id", "control-0")
    command = [sys.executable, "-m", "bench.timed_control", *words, "--listen", ANY_PORT]
    process = fleet.start("control-0", [*command, "--redis", fleet.redis_url], TEST_CORE)
    process.wait_ready()
    return process


def _add_idle(results: ScenarioResults, tested: Process, seconds: float) -> None:
    began_s, began_ns = time.monotonic(), accounting.cpu_ns(tested.pid)
    time.sleep(seconds)
    busy_s, took_s = (accounting.cpu_ns(tested.pid) - began_ns) / 1e9, time.monotonic() - began_s
    results.add(aims.CONNECTED, aims.CORE_SHARE, "%", 100 * busy_s / took_s)
    results.add(aims.CONNECTED, aims.IDLE, "MB", accounting.rss_bytes(tested.pid) / 1e6)


def _add_times(results: ScenarioResults, file: Path, wanted: int) -> None:
    """Add the figures of the last `wanted` publications. Raises BenchError if an acknowledgement is missing."""
    by_version: dict[int, list[float]] = {}
    for line in file.read_text(encoding="ascii").splitlines():
        version, seconds = line.split()
        by_version.setdefault(int(version), []).append(float(seconds))
    latest = [by_version[version] for version in sorted(by_version)[-wanted:]]
    short = [found for found in latest if len(found) != len(RECEIVERS)]
    if len(latest) < wanted or short:
        raise BenchError(f"{len(short)} of {len(latest)} snapshots were not acknowledged by all receivers")
    every = [seconds for found in latest for seconds in found]
    for metric, values in (
        (aims.ACK, every),
        ("publication to the last ACK", [max(found) for found in latest]),
    ):
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            results.add(aims.CONNECTED, f"{metric}, {name}", "ms", 1e3 * quantile(values, share))


class Receivers:
    """The receivers of one process: each has its lease, its stream and its fence."""

    def __init__(self, redis_url: str, config: Path) -> None:
        self._config = load(config)
        self._redis = RedisLink(redis_url)
        self._clock = MonotonicClock()
        trust, networks = Trust(self._config, "frontend"), Networks(())
        self._dialer = ControlDialer(trust, self._clock, networks)
        self._receivers = [self._receiver(*each) for each in RECEIVERS]
        self._registrations = [self._registration(*each) for each in RECEIVERS]
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self) -> Mapping[str, Any]:
        """Register all, and return when each has a stream to the leader and a snapshot."""
        for receiver in self._receivers:
            await receiver.start()
        self._tasks = [
            *(asyncio.create_task(each.run()) for each in self._receivers),
            *(asyncio.create_task(each.run()) for each in self._registrations),
        ]
        async with asyncio.timeout(CONNECT_S):
            while not all(each.is_connected and each.current is not None for each in self._receivers):
                await asyncio.sleep(0.1)
        return {}

    async def publish(self, address: str, count: int) -> Mapping[str, Any]:
        """Cause `count` publications, each once all receivers have the one before."""
        async with grpc.aio.insecure_channel(address) as channel:
            # The stub's types are those of the sync API.
            stub: Any = control_pb2_grpc.ControlPlaneServiceStub(channel)
            for number in range(count):
                before = self._versions()
                if number % 2:
                    await stub.UncordonReplica(pb.UncordonReplicaRequest(process_id=CORDONED), timeout=CALL_S)
                else:
                    await stub.CordonReplica(pb.CordonReplicaRequest(process_id=CORDONED), timeout=CALL_S)
                async with asyncio.timeout(CALL_S):
                    while any(now <= was for now, was in zip(self._versions(), before, strict=True)):
                        await asyncio.sleep(0.002)
                await asyncio.sleep(PAUSE_S)
        return {}

    def _versions(self) -> list[int]:
        return [each.current.name.version if each.current is not None else 0 for each in self._receivers]

    def _receiver(self, role: str, name: str, pool: str) -> Receiver:
        versions = tuple(version_names(self._config)) if role == "frontend" else ()
        return Receiver(
            self._redis,
            self._config.mesh.name,
            Identity(name, f"boot of {name}", role, pool, (POOLS,), versions),
            Fence(),
            self._dialer,
            state_dir=None,
            on_change=lambda _: None,
            clock=self._clock,
        )

    def _registration(self, role: str, name: str, pool: str) -> Registration:
        version = pool_settings(self._config, pool).version.name if pool else ""
        member = Member(
            process_id=name,
            role=role,  # type: ignore[arg-type]  # one of the roles
            address="127.0.0.1:1",
            boot_id=f"boot of {name}",
            model_version=version,
            block_tokens=self._config.engine.block_tokens,
            capabilities=(POOLS,),
            pool=pool,
        )
        return Registration(self._redis, self._config.mesh.name, member)


async def serve(redis: str, config: Path) -> None:
    """Serve until stdin ends."""
    receivers = Receivers(redis, config)
    await control.serve_commands(receivers.connect, receivers.publish)


if __name__ == "__main__":
    control.main(serve, __doc__)
