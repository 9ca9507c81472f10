"""The parts of a test's mesh: an engine that a signal ends at its start is started again, as `kvmesh up` does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvmesh.cli.supervisor import STARTS_MAX
from tests.integration.harness import Part, beside
from tests.integration.live_mesh import pool_of, role_of

ABORTS = "import os; os.abort()"
FAILS = "raise SystemExit(1)"
LASTS = "import time; time.sleep(60)"


def part(folder: Path, code: str, name: str = "decode-0-engine") -> Part:
    """Return a started part."""
    made = Part(name, [sys.executable, "-c", code], "127.0.0.1:1", folder / "log")
    made.start()
    return made


def test_an_engine_that_aborts_is_started_again(tmp_path: Path) -> None:
    """At most STARTS_MAX times, as long as it was not ready."""
    engine = part(tmp_path, ABORTS)
    for _ in range(STARTS_MAX - 1):
        assert engine.process is not None
        engine.process.wait()
        assert engine.start_again()
    assert engine.process is not None
    engine.process.wait()
    assert not engine.start_again() and engine.starts == STARTS_MAX


@pytest.mark.parametrize(("code", "name"), [(FAILS, "decode-0-engine"), (ABORTS, "decode-0")])
def test_other_ends_are_failures(tmp_path: Path, code: str, name: str) -> None:
    """An engine with an exit status, and a service that aborts."""
    ended = part(tmp_path, code, name)
    assert ended.process is not None
    ended.process.wait()
    assert not ended.start_again()


async def test_a_part_that_runs_is_left_alone(tmp_path: Path) -> None:
    """It stays the same process."""
    engine = part(tmp_path, LASTS)
    pid = engine.pid
    try:
        assert engine.start_again() and engine.pid == pid and engine.starts == 1
    finally:
        await engine.end()


@pytest.mark.parametrize(
    ("name", "role", "pool"),
    [
        ("decode-0", "decode", "default"),
        ("next-decode-1", "decode", "next"),
        ("router-6c9f-x1", "router", "default"),
        ("next-canary-router-6c9f-x1", "router", "next-canary"),
    ],
)
def test_names_have_a_role_and_a_pool(name: str, role: str, pool: str) -> None:
    """Behind the role is a number, or what Kubernetes appends to the name of a Deployment."""
    assert (role_of(name), pool_of(name)) == (role, pool)


def test_a_part_knows_where_it_serves_http(tmp_path: Path) -> None:
    """As its last ready line says; one of an older release says nothing."""
    lines = [
        '{"ready": true, "http_address": "127.0.0.1:1"}',
        '{"ready": true, "http_address": "127.0.0.1:2"}',
        "{",
    ]
    frontend = Part("frontend-0", [], "127.0.0.1:0", tmp_path / "log")
    assert frontend.http_address == ""
    frontend.log.write_text("\n".join(lines))
    assert frontend.http_address == "127.0.0.1:2"
    frontend.log.write_text('{"ready": true}\n')
    assert frontend.http_address == ""


def test_a_second_frontend_takes_other_ports() -> None:
    """For HTTP as for metrics, and for nothing else."""
    command = ["python", "--listen", "h:1", "--metrics-port", "2"]
    made = beside([*command, "--http-port", "3"], {"--listen": "h:4"})
    assert made == ["python", "--listen", "h:4", "--metrics-port", "0", "--http-port", "0"]
    assert "--http-port" not in beside(command, {})


def test_an_engine_is_no_replica() -> None:
    """Its name begins with that of its replica."""
    assert role_of("decode-0-engine") == "engine"
    assert role_of("helper") == ""
