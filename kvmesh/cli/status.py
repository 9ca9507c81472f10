"""`kvmesh status`: asks every process of the running mesh how it is."""

from __future__ import annotations

import asyncio
import json
from typing import Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from kvmesh.cli.mesh_file import Member, MeshFile
from kvmesh.cli.readiness import is_model_ready, is_redis_ready, is_serving

SCRAPE_S: Final = 3.0
_SCRAPE_BYTES_MAX: Final = 4 << 20


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one process said. `metrics` is None where it offers none or did not answer."""

    name: str
    role: str
    address: str
    is_healthy: bool
    metrics: dict[str, float] | None

    def value(self, ending: str) -> float | None:
        """Return the metric whose name ends so, or None."""
        found = (value for name, value in (self.metrics or {}).items() if name.endswith(ending))
        return next(found, None)


async def status(mesh: MeshFile, console: Console, *, as_json: bool) -> int:
    """Print one row per process; 0 if all are healthy, else 1."""
    reports = await asyncio.gather(*(_ask(member) for member in mesh.processes))
    if as_json:
        print(json.dumps([msgspec.to_builtins(report) for report in reports], indent=2))
    else:
        console.print(_table(reports))
    return 0 if all(report.is_healthy for report in reports) else 1


async def _ask(member: Member) -> Report:
    check = {"redis": is_redis_ready, "engine": is_model_ready}.get(member.role, is_serving)
    is_healthy, metrics = await asyncio.gather(check(member.address), _scrape(member.metrics_address))
    return Report(
        name=member.name,
        role=member.role,
        address=member.address,
        is_healthy=is_healthy,
        metrics=metrics,
    )


async def _scrape(address: str) -> dict[str, float] | None:
    """Return the samples at `address` as `name{labels}` -> value, or None if there is no answer."""
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
    return {
        _name(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(body.decode("utf-8", "replace"))
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def _name(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


def _table(reports: list[Report]) -> Table:
    table = Table("process", "health", "address", "memory", "tasks", "descriptors")
    for report in reports:
        memory = report.value("process_resident_bytes")
        table.add_row(
            report.name,
            "[green]serving[/]" if report.is_healthy else "[red]not serving[/]",
            report.address,
            "-" if memory is None else f"{memory / (1 << 20):.0f} MB",
            *(_count(report.value(ending)) for ending in ("process_tasks", "process_open_fds")),
        )
    return table


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
