"""The role xds as a process, under TLS, beside real frontends and a control plane."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from bench.ads_client import AdsClient
from bench.processes import ANY_CORE, Fleet, Process
from controlplane.xds import schema
from kvmesh.cli.dial import Dial
from kvmesh.cli.health import Probe, health
from kvmesh.config import load
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.control.v1 import control_pb2_grpc
from tests.certificates import Folder
from tests.integration.harness import own_loopback, until
from tests.integration.probes import check_pages
from tests.integration.xds.mesh import bootstrap

HEALTHY: Final = 1
DRAINING: Final = 3
WITHIN_S: Final = 20.0
NAMES: Final = ("localhost", "kvmesh")
"""Names in the certificate for clients: the host of the xDS server, and the name that clients dial."""


@dataclass(frozen=True)
class Started:
    """A control process, two frontends and an xDS server of the region eu."""

    fleet: Fleet
    certificates: Path
    control: Process
    frontends: dict[str, Process]
    xds: Process

    @property
    def dial(self) -> Dial:
        """Opens channels to processes."""
        return Dial(load(str(self.fleet.config_path)))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """All processes, at once. Frontends and the xDS server show clients the same certificate."""
    folder = Folder(tmp_path_factory.mktemp("certificates"))
    folder.sign("clients", *NAMES)
    host = own_loopback()
    with Fleet() as fleet:
        fleet.configure(
            {
                "region": {"name": "eu"},
                "engine": {"arithmetic": "hashed"},
                "trust": folder.section(),
                "frontend": {
                    "certificate": str(folder.path / "clients.pem"),
                    "key": str(folder.path / "clients.key"),
                },
            }
        )
        names = ("control-0", "frontend-0", "frontend-1", "xds-0")
        found = {
            name: fleet.start_service(
                name.partition("-")[0], name, listen=f"{'127.0.0.1' if name == 'xds-0' else host}:0"
            )
            for name in names
        }
        for process in found.values():
            process.wait_ready()
        frontends = {name: found[name] for name in names if name.startswith("frontend")}
        yield Started(fleet, folder.path, found["control-0"], frontends, found["xds-0"])


@asynccontextmanager
async def watching(started: Started) -> AsyncIterator[AdsClient]:
    """A client of the xDS server that accepts the frontends' certificate alone."""
    client = AdsClient(schema.load(), "kvmesh", "eu")
    async with started.dial.channel(started.xds.address, "xds") as channel:
        running = asyncio.create_task(client.run(channel))
        try:
            yield client
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, grpc.RpcError):
                await running


async def seen(client: AdsClient, expected: dict[str, int]) -> None:
    """Wait until the only locality is eu with `expected`: the health status by address."""

    async def is_seen() -> bool:
        return client.endpoints() == [("eu", expected)]

    try:
        await until(is_seen, WITHIN_S, f"{expected}")
    except AssertionError as error:
        raise AssertionError(f"{error}, but {client.endpoints()}") from None


def scraped(process: Process) -> dict[str, float]:
    """Return the metrics of a process by series."""
    with urllib.request.urlopen(f"http://{process.metrics_address}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {series: float(value) for series, _, value in pairs}


def test_a_stock_client_calls_a_frontend_over_tls(started: Started) -> None:
    """The bootstrap names the authority for the xDS server; the channel has it for the frontends."""
    authority = str(started.certificates / "authority.pem")
    server = started.xds.address.replace("127.0.0.1", "localhost")
    client = started.fleet.module(
        "client",
        "tests.integration.xds.client",
        ANY_CORE,
        bootstrap=json.dumps(bootstrap([server], "eu", authority)),
        options="{}",
        authority=authority,
    )
    client.wait_ready()
    assert client.ask("check", deadline_s=5)["status"] in (1, 2)
    probe = Probe(started.xds.address, role="xds", config=str(started.fleet.config_path))
    assert health(probe) == ""


async def test_frontends_are_published_as_they_come_drain_and_go(started: Started) -> None:
    """Leases and the control plane's drains reach clients; so does the end of a frontend."""
    first, second = (process.address for process in started.frontends.values())

    async def ended() -> bool:
        return not started.xds.is_running()

    async with watching(started) as client:
        await seen(client, {first: HEALTHY, second: HEALTHY})
        async with started.dial.channel(started.control.address, "control") as channel:
            stub: Any = control_pb2_grpc.ControlPlaneServiceStub(channel)

            async def drains() -> bool:
                with suppress(grpc.RpcError):  # a new leader publishes after some seconds
                    await stub.CordonReplica(
                        pb.CordonReplicaRequest(process_id="frontend-0", drain=True, force=True), timeout=5
                    )
                    return True
                return False

            await until(drains, WITHIN_S, "a drain of frontend-0")
            await seen(client, {first: DRAINING, second: HEALTHY})
            await stub.UncordonReplica(pb.UncordonReplicaRequest(process_id="frontend-0"), timeout=20)
            await seen(client, {first: HEALTHY, second: HEALTHY})
        os.kill(started.frontends["frontend-1"].pid, signal.SIGTERM)
        await seen(client, {first: HEALTHY})
        await check_pages(started.xds.metrics_address, "xds")
        found = scraped(started.xds)
        assert found["kvmesh_xds_streams"] >= 1 and found["kvmesh_xds_control_connected"] == 1
        assert found["kvmesh_xds_refused_topologies_total"] == found["kvmesh_xds_unpublished_frontends"] == 0
        nacks = [value for series, value in found.items() if series.startswith("kvmesh_xds_nacks_total")]
        assert nacks == [0, 0, 0, 0]
        os.kill(started.xds.pid, signal.SIGTERM)
        await until(ended, WITHIN_S, "the end of the xDS server")
