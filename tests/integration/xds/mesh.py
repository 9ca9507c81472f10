"""Regions, ADS servers and clients for the tests: all are processes of one fleet."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.processes import ANY_CORE, Fleet, Process
from kvmesh.config import ROOT
from kvmesh.ports import free_ports
from tests.integration.harness import own_loopback

OPTIONS: Final = {
    "grpc.keepalive_time_ms": 5000,
    "grpc.keepalive_timeout_ms": 2000,
    "grpc.http2.ping_timeout_ms": 2000,
    "grpc.priority_failover_timeout_ms": 2000,
}
"""Options of docs/xds.md, by which a client leaves a frozen region."""


@dataclass(frozen=True)
class Region:
    """The frontends of one region."""

    name: str
    addresses: Sequence[str]
    process: Process

    def told(
        self, *, is_draining: bool = False, is_out: bool = False, draining: Sequence[str] = ()
    ) -> Mapping[str, Any]:
        """Return the region as the ADS server is told. `draining`: addresses of frontends that drain."""
        endpoints = [(address, address in draining) for address in self.addresses]
        return {"name": self.name, "endpoints": endpoints, "is_draining": is_draining, "is_out": is_out}


@dataclass
class Mesh:
    """Starts the processes."""

    fleet: Fleet
    host: str = field(default_factory=own_loopback)
    _number: int = 0

    def start(self, count: int = 1, *, own: str = "eu") -> tuple[Region, Region, Process]:
        """Start `count` frontends in each of the regions eu and us, and an ADS server of the region `own`."""
        eu, us = (self._region(name, count) for name in ("eu", "us"))
        ads = self._start("ads", own=own, listen=f"{self.host}:0")
        for process in (eu.process, us.process, ads):
            process.wait_ready()
        return eu, us, ads

    def restarted(self, region: Region) -> Region:
        """Start the frontends of a region again, at the same addresses."""
        process = self._backends(region.name, region.addresses)
        process.wait_ready()
        return Region(region.name, region.addresses, process)

    def ads(self, own: str, listen: str = "") -> Process:
        """Start an ADS server for the region `own`, at `listen` or at a free port."""
        process = self._start("ads", own=own, listen=listen or f"{self.host}:0")
        process.wait_ready()
        return process

    def client(
        self, *servers: Process, region: str = "eu", options: Mapping[str, int] | None = None
    ) -> Process:
        """Start a client of `region` that asks the first of `servers` that answers. Return when it is ready."""
        process = self.starting_client(*servers, region=region, options=options)
        process.wait_ready()
        return process

    def starting_client(
        self, *servers: Process, region: str = "eu", options: Mapping[str, int] | None = None
    ) -> Process:
        """Start a client, without waiting for it."""
        found = bootstrap([server.address for server in servers], region)
        return self._start("client", bootstrap=json.dumps(found), options=json.dumps(options or {}))

    def _start(self, module: str, **options: object) -> Process:
        self._number += 1
        return self.fleet.module(
            f"{module}-{self._number}", f"tests.integration.xds.{module}", ANY_CORE, **options
        )

    def _backends(self, name: str, addresses: Sequence[str]) -> Process:
        return self._start("backend", region=name, addresses=",".join(addresses))

    def _region(self, name: str, count: int) -> Region:
        addresses = [f"{self.host}:{port}" for port in free_ports(self.host, count)]
        return Region(name, addresses, self._backends(name, addresses))


@dataclass(frozen=True)
class Lent:
    """Two regions and an ADS server."""

    mesh: Mesh
    eu: Region
    us: Region
    ads: Process


def bootstrap(servers: Sequence[str], region: str, authority: str = "") -> dict[str, Any]:
    """Return the bootstrap of deploy/xds for `servers`. `authority`: the file with that of their certificates."""
    found: dict[str, Any] = json.loads((ROOT / "deploy" / "xds" / "bootstrap.json").read_text("utf-8"))
    (one,) = found["xds_servers"]
    if authority:
        one["channel_creds"] = [{"type": "tls", "config": {"ca_certificate_file": authority}}]
    found["xds_servers"] = [{**one, "server_uri": server} for server in servers]
    found["node"]["locality"]["region"] = region
    return found


def publish(ads: Process, *regions: Mapping[str, Any]) -> None:
    """Publish `regions`, which must be good."""
    assert ads.ask("publish", regions=regions)["fault"] == ""


def kill(process: Process) -> None:
    """End a process at once."""
    os.kill(process.pid, signal.SIGKILL)


def freeze(process: Process) -> None:
    """Stop a process: its connections stay open, and it answers nothing."""
    os.kill(process.pid, signal.SIGSTOP)


def thaw(process: Process) -> None:
    """Let a frozen process go on."""
    os.kill(process.pid, signal.SIGCONT)


def calls(client: Process, count: int = 100, *, deadline_s: float = 5.0, target: str = "") -> dict[str, int]:
    """Make calls, and return their number by the region that answered, or by status."""
    by: dict[str, int] = {}
    for name, number in named(client, count, deadline_s=deadline_s, target=target).items():
        where = name.partition("-")[0]
        by[where] = by.get(where, 0) + number
    return by


def named(client: Process, count: int, *, deadline_s: float = 5.0, target: str = "") -> dict[str, int]:
    """Make calls, and return their number by the frontend that answered, or by status."""
    found: dict[str, int] = client.ask("call", count=count, deadline_s=deadline_s, target=target)["by"]
    return found


def until(client: Process, region: str, within_s: float = 5.0) -> Mapping[str, Any]:
    """Call until `region` answers. Return the seconds and the number of errors."""
    return client.ask("until", region=region, within_s=within_s)
