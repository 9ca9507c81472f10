"""`kvmesh replicas`: the leases of all processes and their mismatches, with the lives of replicas.

Redis has the leases. The control plane tells the lives; without one their columns are empty.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from rich.table import Table
from rich.text import Text

from kvmesh.bad_option import BadOption
from kvmesh.cli.fitted_table import Column, FittedTable, output_console
from kvmesh.cli.found_mesh import FoundMesh
from kvmesh.cli.replica_lives import NO_LIFE, read_lives
from kvmesh.life_state import LifeState
from kvmesh.membership.member import Member
from kvmesh.membership.membership import read_members
from kvmesh.membership.pool_mismatch import mismatches
from kvmesh.redis_link import RedisLink, RedisUnavailable

NONE: Final = "-"
COLUMNS: Final = (
    Column("name"),
    Column("role", rank=1),
    Column("pool", rank=3),
    Column("version", rank=2),
    Column("state"),
    Column("proof", rank=4, is_rare=True),
    Column("in_state", rank=7, is_rare=True),
    Column("steps", rank=9, is_rare=True),
    Column("package", rank=10, is_rare=True),
    Column("waits_for", is_text=True, is_rare=True),
    Column("address", rank=5),
    Column("engine", rank=8, is_rare=True),
    Column("snapshot", rank=6),
    Column("mismatch", is_text=True, is_rare=True),
)
MORE: Final = "`kvmesh replicas show NAME` and --json have them"
ENGINE_CHARACTERS: Final = 8
"""Characters of an engine's boot id in the table."""

NAMES_SHOWN: Final = 5
"""Most names that an error lists."""

Row = dict[str, Any]


async def list_all(mesh: FoundMesh, *, as_json: bool) -> int:
    """Print one row per process. Return 1 if a row has a mismatch, if there is no lease, or without Redis."""
    config, rows = mesh.config, await _rows(mesh)
    if rows is None:
        return 1
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        _print(_list_table(rows))
    else:
        _print_error(f'No process holds a lease in the mesh "{config.mesh.name}".')
    return 0 if rows and not any(row["mismatch"] for row in rows) else 1


async def show(mesh: FoundMesh, name: str, *, as_json: bool) -> int:
    """Print all values of one process. Return 1 if it has a mismatch, or without Redis. Raises BadOption."""
    rows = await _rows(mesh)
    if rows is None:
        return 1
    row = next((row for row in rows if row["name"] == name), None)
    if row is None:
        raise BadOption(_unknown(name, [row["name"] for row in rows]))
    if as_json:
        print(json.dumps(row, indent=2))
    else:
        _print(_show_table(row))
    return 1 if row["mismatch"] else 0


def rows_of(members: Sequence[Member]) -> list[Row]:
    """Return one row per process, by pool, role and name. Processes without a pool come last."""
    found = mismatches(members)
    rows = [_row(member, found.get(member.process_id, "")) for member in members]
    return sorted(rows, key=lambda row: (not row["pool"], row["pool"], row["role"], row["name"]))


def _row(member: Member, mismatch: str) -> Row:
    is_frontend = member.role == "frontend"
    return {
        "name": member.process_id,
        "role": member.role,
        "pool": "" if is_frontend else member.pool,
        "version": "" if is_frontend else member.model_version,
        "state": _state(member),
        "address": member.address,
        "snapshot": member.snapshot,
        "mismatch": mismatch,
        "kv_address": member.kv_address,
        "block_tokens": member.block_tokens,
        "digests": dict(member.digests),
        "capabilities": list(member.capabilities),
        "boot_id": member.boot_id,
        "engine_boot_id": member.engine_boot_id,
        "engine": member.engine_boot_id[:ENGINE_CHARACTERS],
        "term": member.term,
        **NO_LIFE,
    }


def _state(member: Member) -> str:
    is_leaving = member.draining and member.state in ("", LifeState.SERVING.value)
    return "draining" if is_leaving else member.state or "registered"


async def _rows(mesh: FoundMesh) -> list[Row] | None:
    link = RedisLink(mesh.redis_url)
    try:
        rows = rows_of(await read_members(link, mesh.config.mesh.name))
        lives = await read_lives(mesh) if rows else {}
        return [row | lives.get(row["name"], {}) for row in rows]
    except RedisUnavailable as away:
        _print_error(f"The leases cannot be read: {away}")
        return None
    finally:
        await link.close()


def _unknown(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif known:
        more = ", ..." if len(known) > NAMES_SHOWN else "."
        hint = f"allowed are {', '.join(sorted(known)[:NAMES_SHOWN])}{more}"
    else:
        hint = "no process of this mesh holds one."
    return f'NAME = "{name}" holds no lease: {hint}'


def _list_table(rows: Sequence[Row]) -> FittedTable:
    table = FittedTable([replace(each, name=each.name.replace("_", " ")) for each in COLUMNS], MORE)
    for row in rows:
        *values, mismatch = (_text(row[column.name]) for column in COLUMNS)
        table.add_row(*values, Text(mismatch.plain, style="red"))
    return table


def _show_table(row: Row) -> Table:
    table = Table(show_header=False)
    for key, value in row.items():
        table.add_row(key, _text(value))
    return table


def _text(value: Any) -> Text:
    """Return a value for a cell. A lease is data of another process, so it cannot format the terminal."""
    if isinstance(value, dict):
        value = [f"{kind} {digest}" for kind, digest in sorted(value.items())]
    text = ", ".join(value) if isinstance(value, list) else str(value)
    return Text("".join(each if each.isprintable() else "?" for each in text) or NONE)


def _print(table: Table | FittedTable) -> None:
    output_console().print(table)


def _print_error(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
