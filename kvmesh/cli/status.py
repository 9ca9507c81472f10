"""`kvmesh status`: health and load of every process of the running mesh."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Collection, Mapping
from typing import Any, Final

import grpc
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.text import Text

from kvmesh.cli.dial import Dial
from kvmesh.cli.fitted_table import Column, FittedTable
from kvmesh.cli.mesh_file import ListedProcess, MeshFile
from kvmesh.cli.readiness import CALL_S, health_of, is_model_ready, redis_fault
from kvmesh.config import MeshConfig
from kvmesh.life_state import OUT_OF_SERVICE
from kvmesh.metrics_page import NoMetrics, read_page
from kvmesh.redis_url import database_of, displayed_address
from kvmesh.router.v1 import router_pb2 as router
from kvmesh.router.v1 import router_pb2_grpc as router_grpc

SCRAPE_S: Final = 3.0

_UNITS: Final = (("s", 1.0), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9))

_USAGE_METRICS: Final = {
    "frontend": {"live_requests": "live"},
    "router": {"live_requests": "live", "queued_requests": "queued", "index_blocks": "index blocks"},
    "prefill": {"running_requests": "live", "queued_requests": "queued"},
    "decode": {"running_requests": "live", "pending_slots": "queued"},
    "control": {"receivers": "receivers", "receivers_behind": "behind"},
}
"""By role: the metrics of its load, and the word that the table shows for each."""


_LIVE_METRICS: Final = {
    role: metric
    for role, metrics in _USAGE_METRICS.items()
    for metric, word in metrics.items()
    if word == "live"
}
"""By role: the metric of its live requests."""


_COLUMNS: Final = (
    Column("process"),
    Column("health"),
    Column("address", rank=1),
    Column("holds", is_text=True),
)


class PrefillCosts(msgspec.Struct, frozen=True, kw_only=True):
    """A router's learnt cost of prefill: c0 + u (a + b (T - u/2)) seconds for u uncached of T tokens."""

    c0_s: float
    a_s: float
    b_s: float
    measured_prompts: int
    factors: dict[str, float]
    """Prefill replica -> its prefill time relative to a usual replica's; factors of 1 are left out."""

    def words(self) -> list[str]:
        """Return the costs in words; empty while they are assumed rather than measured."""
        if not self.measured_prompts:
            return []
        costs = f"c0 {_seconds(self.c0_s)}, a {_seconds(self.a_s)}, b {_seconds(self.b_s)}"
        words = [f"prefill {costs} ({self.measured_prompts:,} prompts)"]
        if self.factors:
            name = max(self.factors, key=lambda one: abs(math.log(self.factors[one])))
            words.append(f"{name} takes {self.factors[name]:.2f} times as long")
        return words


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a Prometheus metric."""

    name: str
    labels: dict[str, str]
    value: float


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one process. `metrics` is None if the process offers none or did not answer."""

    name: str
    role: str
    address: str
    is_healthy: bool
    metrics: list[Sample] | None
    redis_connected: bool | None = None
    """True if a router has a connection to Redis; None for other roles and without an answer."""
    prefill_costs: PrefillCosts | None = None
    """A router's learnt costs; None for other roles and without an answer."""
    eligible_replicas: dict[str, str] | None = None
    """Replica -> address, for replicas that are eligible for a router's placements; None if the process is no router."""
    http_address: str = ""
    """"host:port" of a frontend's HTTP. Empty: it offers none."""
    reason: str = ""
    """Reason of a process that does not serve, if it gives one."""

    def value(self, name: str) -> float | None:
        """Return the process's own metric `name` without labels, or None."""
        return _value(self.metrics, f"kvmesh_{self.role}_{name}")

    def usage_text(self, addresses: Mapping[str, str] | None = None) -> str:
        """Return the load of the process in words; empty if it offers no metrics of its own.

        `addresses` by name: a replica that a router knows at another address is shown with that address.
        """
        words = [
            f"{value:.0f} {word}"
            for name, word in _USAGE_METRICS.get(self.role, {}).items()
            if (value := self.value(name)) is not None
        ]
        reserved, blocks = self.value("reserved_blocks"), self.value("kv_blocks")
        if reserved is not None and blocks is not None:
            words.append(f"{reserved:.0f} of {blocks:.0f} KV blocks")
        words += self._life_words()
        words += self._leader_words()
        words += self._placement_words()
        words += self.prefill_costs.words() if self.prefill_costs is not None else []
        if self.redis_connected is not None:
            words.append("Redis connected" if self.redis_connected else "Redis unavailable")
        if self.eligible_replicas is not None:
            names = [
                name if addresses and addresses.get(name) == address else f"{name} at {address}"
                for name, address in sorted(self.eligible_replicas.items())
            ]
            words.append(f"places on {' '.join(names) or 'no replica'}")
        if (resident := self.value("process_resident_bytes")) is not None:
            words.append(f"{resident / (1 << 20):.0f} MB of memory")
        return ", ".join(words)

    def _life_words(self) -> list[str]:
        """Return the state of a replica that is held or quarantined; empty for all other processes."""
        name = f"kvmesh_{self.role}_replica_state"
        states = (
            each.labels.get("state", "") for each in self.metrics or () if each.name == name and each.value
        )
        return [state for state in states if state in OUT_OF_SERVICE]

    def _leader_words(self) -> list[str]:
        """Return the part of a control process in words; empty for other roles."""
        is_leader, term = self.value("is_leader"), self.value("term")
        if is_leader is None or term is None:
            return []
        return [f"leads in term {term:.0f}" if is_leader else f"follows term {term:.0f}"]

    def _placement_words(self) -> list[str]:
        """Return the cache hits and the imbalance of a router's placements in words; empty if it has made none."""
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
    """Print one row per process; return 0 if all are healthy, else 1. `dial` None: no process uses TLS.

    `redis_url`: the Redis that the operator named. The URL has the password that mesh.json lacks.
    """
    dials = {"": dial or Dial(MeshConfig())}
    return await status_of_all({"": mesh}, console, as_json=as_json, dials=dials, redis_url=redis_url)


async def status_of_all(
    meshes: Mapping[str, MeshFile],
    console: Console,
    *,
    as_json: bool,
    dials: Mapping[str, Dial],
    redis_url: str = "",
) -> int:
    """Print the status of the mesh of each region; return 0 if all processes are healthy, else 1.

    Without regions, `meshes` has one mesh under the empty name.
    """
    found: dict[str, list[ProcessStatus]] = {}
    for region, mesh in meshes.items():
        found[region] = await _reports(mesh, dials[region], "" if region else redis_url)
    if as_json:
        shown = {region: [msgspec.to_builtins(each) for each in reports] for region, reports in found.items()}
        print(json.dumps(shown.get("", shown), indent=2))
    for region, reports in found.items() if not as_json else ():
        if region:
            console.print(f"Region {region}", style="bold")
        console.print(_table(reports))
    return 0 if all(each.is_healthy for reports in found.values() for each in reports) else 1


async def live_requests(mesh: MeshFile, roles: Collection[str] = _LIVE_METRICS.keys()) -> dict[str, int]:
    """Return the live requests of each process of `roles` that answers, by name."""
    members = [member for member in mesh.processes if member.role in roles]
    scraped = await asyncio.gather(*(_scrape(member.metrics_address) for member in members))
    live = {
        member.name: _value(metrics, f"kvmesh_{member.role}_{_LIVE_METRICS[member.role]}")
        for member, metrics in zip(members, scraped, strict=True)
    }
    return {name: round(count) for name, count in live.items() if count is not None}


async def _reports(mesh: MeshFile, dial: Dial, redis_url: str) -> list[ProcessStatus]:
    return await asyncio.gather(*(_process_status(member, dial, redis_url) for member in mesh.processes))


async def _process_status(member: ListedProcess, dial: Dial, redis_url: str) -> ProcessStatus:
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
        http_address=member.http_address,
        reason=reason,
    )


async def _health(member: ListedProcess, dial: Dial, redis_url: str) -> tuple[bool, str]:
    """Return whether the process serves, and its reason if it does not."""
    if member.role == "redis":
        is_named = bool(redis_url) and database_of(redis_url) == database_of(member.address)
        url = redis_url if is_named else member.address
        fault = await redis_fault(url if "://" in url else f"redis://{url}")
        return not fault, fault
    if member.role == "engine":
        return await is_model_ready(member.address), ""
    return await health_of(member.address, lambda address: dial.channel(address, member.role))


async def _router_status(member: ListedProcess, dial: Dial) -> router.GetStatusResponse | None:
    """Return the answer of a router's GetStatus; None for other roles and without an answer."""
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
    """Return the learnt costs of prefill, if the router's release reports them."""
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
            and view.prefill_factor not in (0.0, 1.0)  # 0: not reported
        },
    )


async def _scrape(address: str) -> list[Sample] | None:
    """Return the samples at `address` without histogram buckets; None if its page cannot be read."""
    if not address:
        return None
    try:
        page = await read_page(address, SCRAPE_S)
    except NoMetrics:
        return None
    return [
        Sample(name=sample.name, labels=dict(sample.labels), value=sample.value)
        for family in text_string_to_metric_families(page.decode("utf-8", "replace"))
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    ]


def _value(metrics: list[Sample] | None, name: str) -> float | None:
    return next((sample.value for sample in metrics or () if sample.name == name and not sample.labels), None)


def _seconds(value_s: float) -> str:
    """Return `value_s` with three digits, in the largest unit that gives 1 or more."""
    unit, scale = next(((unit, scale) for unit, scale in _UNITS if value_s * scale >= 0.9995), _UNITS[-1])
    return f"{value_s * scale:.3g} {unit}"


def _table(reports: list[ProcessStatus]) -> FittedTable:
    table = FittedTable(_COLUMNS)
    addresses = {report.name: report.address for report in reports}
    for report in reports:
        table.add_row(
            report.name,
            Text("serving", style="green") if report.is_healthy else Text("not serving", style="red"),
            displayed_address(report.address),
            "; ".join(filter(None, (report.reason, report.usage_text(addresses)))) or "-",
        )
    return table
