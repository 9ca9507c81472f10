"""`kvmesh replicas` on a real Redis: leases, mismatches, output and exit status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvmesh.cli.main import main
from kvmesh.membership.member import Member
from kvmesh.redis_link import RedisLink, key
from kvmesh.redis_url import VARIABLE
from tests.one_redis import ONE_REDIS
from tests.unit.pools.leases import lease

pytestmark = ONE_REDIS

Run = Callable[..., tuple[int, str, str]]

ROUTER = lease("a-router-0", "router")
REPLICA = lease("a-decode-0", state="cordoned", snapshot="3.7")
FRONTEND = lease("frontend-0", "frontend", pool="", draining=True)
BAD = lease("a-decode-1", digests={"engine": "[red]e2"})


@pytest.fixture
def kvmesh(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run `kvmesh replicas` with arguments; return status, stdout, stderr."""
    monkeypatch.setenv(VARIABLE, redis_url)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["replicas", *arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def register(url: str, *members: Member) -> None:
    """Write leases, without a process behind them."""

    async def write() -> None:
        link = RedisLink(url)
        for member in members:
            name = member.process_id
            await link.execute("SADD", key("kvmesh", "procs"), name)
            await link.execute("SET", key("kvmesh", "proc", name), msgspec.json.encode(member))
        await link.close()

    asyncio.run(write())


def test_the_list_shows_every_lease(kvmesh: Run, redis_url: str) -> None:
    """Pool, version, state and snapshot come from the lease. A frontend has no pool and no version."""
    register(redis_url, ROUTER, REPLICA, FRONTEND)
    status, out, _ = kvmesh()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert status == 0 and cells == [
        ["a-decode-0", "decode", "a", "v1", "cordoned", "a-decode-0:7000", "3.7"],
        ["a-router-0", "router", "a", "v1", "registered", "a-router-0:7000", "-"],
        ["frontend-0", "frontend", "-", "-", "draining", "frontend-0:7000", "-"],
    ]
    assert kvmesh("list")[1] == out
    rows = json.loads(kvmesh("list", "--json")[1])
    assert json.loads(kvmesh("--json")[1]) == rows and len(rows) == 3
    assert (
        rows[0]["digests"] == {"tokenizer": "t1", "engine": "e1"} and rows[0]["boot_id"] == "boot-a-decode-0"
    )


def test_a_mismatch_is_shown_with_both_values(kvmesh: Run, redis_url: str) -> None:
    """The exit status tells a program. A lease cannot format the terminal."""
    register(redis_url, ROUTER, REPLICA, BAD)
    status, out, _ = kvmesh()
    assert status == 1 and 'engine digest "[red]e2", the pool has "e1"' in " ".join(out.split())
    status, out, _ = kvmesh("show", "a-decode-1")
    assert status == 1 and 'engine digest "[red]e2", the pool has "e1"' in out
    assert kvmesh("show", "a-decode-0")[0] == 0
    shown = json.loads(kvmesh("show", "a-decode-1", "--json")[1])
    assert shown["mismatch"] == 'engine digest "[red]e2", the pool has "e1"'


def test_an_unknown_name_is_refused_with_near_ones(kvmesh: Run, redis_url: str) -> None:
    """One sentence on stderr, exit status 2."""
    assert kvmesh("show", "x") == (2, "", 'NAME = "x" holds no lease: no process of this mesh holds one.\n')
    register(redis_url, ROUTER, REPLICA)
    status, out, err = kvmesh("show", "a-decode-9")
    assert (status, out) == (2, "")
    assert err.startswith('NAME = "a-decode-9" holds no lease: did you mean a-decode-0')
    assert "allowed are a-decode-0, a-router-0." in kvmesh("show", "x")[2]


def test_no_lease_and_no_redis_are_no_pass(kvmesh: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are exit status 1, with the reason on stderr."""
    assert kvmesh() == (1, "", 'No process holds a lease in the mesh "kvmesh".\n')
    assert kvmesh("--json")[:2] == (1, "[]\n")
    monkeypatch.setenv(VARIABLE, "redis://127.0.0.1:1/0")
    for arguments in ((), ("show", "x")):
        status, out, err = kvmesh(*arguments)
        assert (status, out) == (1, "") and err.startswith("The leases cannot be read: ")
