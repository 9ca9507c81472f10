"""`kvmesh status`: asks every process of the running mesh how it is."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any, Final

import grpc
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvmesh.cli.dial import Dial
from kvmesh.cli.mesh_file import MeshFile, MeshProcess
from kvmesh.cli.readiness import CALL_S, health_of, is_model_ready, redis_fault
from kvmesh.config import MeshConfig
from kvmesh.redis_url import database_of, shown_place
from kvmesh.router.v1 import router_pb2 as router
from kvmesh.router.v1 import router_pb2_grpc as router_grpc

SCRAPE_S: Final = 3.0
_SCRAPE_BYTES_MAX: Final = 4 << 20

_UNITS: Final = (("s", 1.0), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9))

_USAGE_METRICS: Final = {
    "frontend": {"live_requests": "live"},
    "router": {"live_requests": "live", "queued_requests": "queued", "index_blocks": "index blocks"},
    "prefill": {"running_requests": "live", "queued_requests": "queued"},
    "decode": {"running_requests": "live", "pending_slots": "queued"},
}
"""Which metrics of a role tell what it holds, and how they are called."""


class PrefillCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What a router has learnt that prompts take: c0 + u (a + b (T - u/2)) seconds for u uncached of T tokens."""

    c0_s: float
    a_s: float
    b_s: float
    measured_prompts: int
    factors: dict[str, float]
    """Prefill replicas, and times as long as at a usual one; those like all are left out."""

    def words(self) -> list[str]:
        """Return it in words; empty while it is assumed."""
        if not self.measured_prompts:
            return []
        costs = f"c0 {_seconds(self.c0_s)}, a {_seconds(self.a_s)}, b {_seconds(self.b_s)}"
        words = [f"prefill {costs} ({self.measured_prompts:,} prompts)"]
        if self.factors:
            name = max(self.factors, key=lambda one: abs(math.log(self.factors[one])))
            words.append(f"{name} takes {self.factors[name]:.2f} times as long")
        return words


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a metric, as Prometheus has it."""

    name: str
    labels: dict[str, str]
    value: float


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What one process said. `metrics` is None where it offers none or did not answer."""

    name: str
    role: str
    address: str
    is_healthy: bool
    metrics: list[Sample] | None
    redis_connected: bool | None = None
    """What a router says; None where nobody says."""
    prefill_costs: PrefillCosts | None = None
    """The same."""
    eligible_replicas: dict[str, str] | None = None
    """Replicas that a router places new requests on, and their addresses; None where the process is no router."""
    reason: str = ""
    """Why the process does not serve, where it says so."""

    def value(self, name: str) -> float | None:
        """Return the process's own metric `name` without labels, or None."""
        return _value(self.metrics, f"kvmesh_{self.role}_{name}")

    def usage_text(self, addresses: Mapping[str, str] | None = None) -> str:
        """Return what the process holds, in words; empty where it offers no metrics of its own.

        `addresses` by name: a replica that a router knows at another address is shown with it.
        """
        words = [
            f"{value:.0f} {word}"
            for name, word in _USAGE_METRICS.get(self.role, {}).items()
            if (value := self.value(name)) is not None
        ]
        reserved, blocks = self.value("reserved_blocks"), self.value("kv_blocks")
        if reserved is not None and blocks is not None:
            words.append(f"{reserved:.0f} of {blocks:.0f} KV blocks")
        words += self._placement_words()
        words += self.prefill_costs.words() if self.prefill_costs is not None else []
        if self.redis_connected is not None:
            words.append("Redis connected" if self.redis_connected else "Redis away")
        if self.eligible_replicas is not None:
            names = [
                name if addresses and addresses.get(name) == address else f"{name} at {address}"
                for name, address in sorted(self.eligible_replicas.items())
            ]
            words.append(f"places on {' '.join(names) or 'no replica'}")
        return ", ".join(words)

    def _placement_words(self) -> list[str]:
        """Return how a router's placements turned out, in words; empty where none did."""
        prompt, cached, expected, imbalance = map(
            self.value,
            ("prompt_tokens_total", "cached_tokens_total", "expected_cached_tokens_total", "imbalance"),
        )
        words = []
        if prompt and cached is not None and expected is not None:
            words.append(f"{cached / prompt:.0%} cached ({expected / prompt:.0%} expected)")
        if prompt and imbalance is not None:
            words.append(
                f"imbalance {imbalance:.2f}" if imbalance else "imbalance -"
            )  # 0: too little to tell
        return words


async def status(
    mesh: MeshFile, console: Console, *, as_json: bool, dial: Dial | None = None, redis_url: str = ""
) -> int:
    """Print one row per process; 0 if all are healthy, else 1. `dial` None: no process speaks TLS.

    `redis_url`: the Redis that the operator named; it has the password that mesh.json lacks.
    """
    dial = dial or Dial(MeshConfig())
    reports = await asyncio.gather(*(_process_status(member, dial, redis_url) for member in mesh.processes))
    if as_json:
        print(json.dumps([msgspec.to_builtins(report) for report in reports], indent=2))
    else:
        console.print(_table(reports))
    return 0 if all(report.is_healthy for report in reports) else 1


async def live_requests(mesh: MeshFile) -> int:
    """Return how many requests the frontends hold; those of a frontend that does not answer are left out."""
    addresses = [member.metrics_address for member in mesh.processes if member.role == "frontend"]
    scraped = await asyncio.gather(*(_scrape(address) for address in addresses))
    return round(sum(_value(metrics, "kvmesh_frontend_live_requests") or 0.0 for metrics in scraped))


async def _process_status(member: MeshProcess, dial: Dial, redis_url: str) -> ProcessStatus:
    (is_healthy, reason), metrics, router_status = await asyncio.gather(
        _health(member, dial, redis_url), _scrape(member.metrics_address), _router_status(member, dial)
    )
    return ProcessStatus(
        name=member.name,
        role=member.role,
        address=member.address,
        is_healthy=is_healthy,
        metrics=metrics,
        redis_connected=None if router_status is None else router_status.redis_connected,
        prefill_costs=None if router_status is None else _costs(router_status),
        eligible_replicas=None
        if router_status is None
        else {each.replica: each.address for each in router_status.replicas if each.placeable},
        reason=reason,
    )


async def _health(member: MeshProcess, dial: Dial, redis_url: str) -> tuple[bool, str]:
    """Return whether the process serves, and its reason where it does not."""
    if member.role == "redis":
        is_named = bool(redis_url) and database_of(redis_url) == database_of(member.address)
        url = redis_url if is_named else member.address
        fault = await redis_fault(url if "://" in url else f"redis://{url}")
        return not fault, fault
    if member.role == "engine":
        return await is_model_ready(member.address), ""
    return await health_of(member.address, lambda address: dial.channel(address, member.role))


async def _router_status(member: MeshProcess, dial: Dial) -> router.GetStatusResponse | None:
    """Ask a router what it sees and holds."""
    if member.role != "router":
        return None
    async with dial.channel(member.address, member.role) as to_router:
        stub: Any = router_grpc.RouterServiceStub(to_router)
        try:
            router_status: router.GetStatusResponse = await stub.GetStatus(
                router.GetStatusRequest(), timeout=CALL_S
            )
        except grpc.aio.AioRpcError:
            return None
    return router_status


def _costs(router_status: router.GetStatusResponse) -> PrefillCosts | None:
    """Return what prompts take, if the router's release tells it."""
    if not router_status.HasField("prefill_costs"):
        return None
    return PrefillCosts(
        c0_s=router_status.prefill_costs.c0_s,
        a_s=router_status.prefill_costs.a_s,
        b_s=router_status.prefill_costs.b_s,
        measured_prompts=router_status.prefill_costs.measured_prompt_count,
        factors={
            view.replica: view.prefill_factor
            for view in router_status.replicas
            if view.role != router.ReplicaView.ROLE_DECODE
            and view.prefill_factor not in (0.0, 1.0)  # 0: not told
        },
    )


async def _scrape(address: str) -> list[Sample] | None:
    """Return the samples at `address` without those of histograms' buckets, or None if there is no answer."""
    if not address:
        return None
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(SCRAPE_S):
            reader, writer = await asyncio.open_connection(host, int(port), limit=_SCRAPE_BYTES_MAX)
            try:
                writer.write(f"GET /metrics HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
                answer = await reader.read(-1)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    _, _, body = answer.partition(b"\r\n\r\n")
    return [
        Sample(name=sample.name, labels=dict(sample.labels), value=sample.value)
        for family in text_string_to_metric_families(body.decode("utf-8", "replace"))
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    ]


def _value(metrics: list[Sample] | None, name: str) -> float | None:
    return next((sample.value for sample in metrics or () if sample.name == name and not sample.labels), None)


def _seconds(value_s: float) -> str:
    """Return it with three digits, in the largest unit that it fills."""
    unit, scale = next(((unit, scale) for unit, scale in _UNITS if value_s * scale >= 0.9995), _UNITS[-1])
    return f"{value_s * scale:.3g} {unit}"


def _table(reports: list[ProcessStatus]) -> Table:
    table = Table()
    for name in ("process", "health", "address"):
        table.add_column(name, no_wrap=True)
    table.add_column("holds")
    table.add_column("memory", no_wrap=True)
    addresses = {report.name: report.address for report in reports}
    for report in reports:
        memory = report.value("process_resident_bytes")
        table.add_row(
            report.name,
            "[green]serving[/]" if report.is_healthy else "[red]not serving[/]",
            shown_place(report.address),
            escape("; ".join(filter(None, (report.reason, report.usage_text(addresses)))) or "-"),
            "-" if memory is None else f"{memory / (1 << 20):.0f} MB",
        )
    return table
