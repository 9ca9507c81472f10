"""The commands of the control plane against real control processes: a leader, a follower, and the death of the leader.

Routers, replicas and frontends are played by their leases; their own behaviour is tested elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from kvmesh.child import bound_command
from kvmesh.redis_url import VARIABLE
from tests.one_redis import ONE_REDIS
from tests.patience import Patience

pytestmark = ONE_REDIS

pytest.importorskip("controlplane.main")

CONFIG = """
[engine]
arithmetic = "hashed"
[pools.stable]
version = "v1"
[pools.next]
version = "v2"
[versions.v1]
[versions.v2]
"""

WITHIN_S = 90.0
POLL_S = 0.1
LEASE_S = 600
"""Leases of the played members outlive the test."""

KVMESH = [sys.executable, "-c", "from kvmesh.cli.main import main; main()"]


def until(condition: Callable[[], Any], what: str) -> Any:
    """Return the first true answer of `condition`. Raises AssertionError."""
    bound = Patience(WITHIN_S)
    while not bound.is_over:
        found = condition()
        if found:
            return found
        time.sleep(POLL_S)
    raise AssertionError(f"not within {WITHIN_S:g} s: {what}")


@dataclass
class Mesh:
    """A Redis with leases, and the control processes of a test."""

    url: str
    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start a control process and wait until it serves."""
        options = ("--config", "kvmesh.toml", "--id", name, "--listen", "127.0.0.1:0", "--metrics-port", "0")
        command = bound_command([sys.executable, "-m", "controlplane", *options])
        environment = {**os.environ, VARIABLE: self.url, "PYTHONPATH": str(Path.cwd())}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def stop(self) -> None:
        """End all processes."""
        for process in self.processes.values():
            process.kill()
            process.wait()

    def command(self, *words: str) -> subprocess.Popen[str]:
        """Start `kvmesh`."""
        environment = {**os.environ, VARIABLE: self.url, "COLUMNS": "200", "PYTHONPATH": str(Path.cwd())}
        return subprocess.Popen(
            bound_command([*KVMESH, *words]),
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> tuple[int, str, str]:
        """Run `kvmesh`; return exit status, stdout and stderr."""
        process = self.command(*words)
        shown, errors = process.communicate(timeout=WITHIN_S)
        return process.returncode, shown, errors

    def leader(self) -> str:
        """Return the name of the leader; empty while there is none."""
        client: Any = Redis.from_url(self.url)
        held = client.get("kvmesh:control:leader")
        client.close()
        return str(json.loads(held)["process_id"]) if held else ""


@pytest.fixture
def mesh(redis_url: str, tmp_path: Path) -> Iterator[Mesh]:
    """Two control processes, and the leases of a mesh of two pools."""
    (tmp_path / "kvmesh.toml").write_text(CONFIG)
    client: Any = Redis.from_url(redis_url)
    for pool, version in (("stable", "v1"), ("next", "v2")):
        for role in ("router", "prefill", "decode"):
            name = f"{pool}-{role}-0"
            lease = {
                "process_id": name,
                "role": role,
                "address": "127.0.0.1:1",
                "boot_id": "b0",
                "pool": pool,
                "model_version": version,
                "block_tokens": 16,
                "capabilities": ["pools"],
            }
            client.sadd("kvmesh:procs", name)
            client.set(f"kvmesh:proc:{name}", json.dumps(lease), ex=LEASE_S)
    client.close()
    found = Mesh(redis_url, tmp_path)
    try:
        for name in ("control-0", "control-1"):
            found.start(name)
        until(lambda: found.run("snapshot", "history", "--json")[0] == 0, "a control process answers")
        until(lambda: json.loads(found.run("snapshot", "history", "--json")[1])["snapshots"], "a snapshot")
        yield found
    finally:
        found.stop()


def test_an_operator_finds_the_leader_and_reads_what_was_done(mesh: Mesh) -> None:
    """Reads, refusals, a cordon, a freeze, an audit log: through whichever process answers first."""
    assert "stable 100 %, version v1" in mesh.run("snapshot", "show")[1]
    status, _, errors = mesh.run("rollout", "start", "--to", "nxt")
    assert status == 1
    assert errors.startswith('--to is "nxt"; ')
    assert "next, stable" in errors
    status, _, errors = mesh.run("replicas", "cordon", "stable-decode-0")
    assert status == 1
    assert "--force would override: " in errors
    status, shown, errors = mesh.run("replicas", "cordon", "stable-decode-0", "--force", "--reason", "disk")
    assert (status, shown.split(":")[0]) == (0, "stable-decode-0 is cordoned")
    assert errors.startswith("Overridden by --force: ")
    until(lambda: "cordoned: disk" in mesh.run("snapshot", "show")[1], "the cordon is published")
    assert mesh.run("replicas", "uncordon", "stable-decode-0")[:2] == (
        0,
        "stable-decode-0 is in use again.\n",
    )
    assert mesh.run("freeze", "--ttl", "2h")[1].startswith("Frozen until ")
    assert mesh.run("freeze", "--off")[1] == "The freeze is over: rollouts go forward again.\n"
    status, _, errors = mesh.run("replicas", "cordon", "decode-99")
    assert status == 1
    assert "decode-99" in errors
    whats = until(lambda: events(mesh, "mesh.unfreeze"), "the events are written")
    assert [what for what in whats if what.startswith("replica")] == [
        "replica.cordon",  # refused: the result says why
        "replica.cordon",
        "replica.uncordon",
    ]
    assert "stable-decode-0" in mesh.run("replicas", "events")[1]
    status, shown, _ = mesh.run("snapshot", "diff")
    assert status == 0
    assert re.search(r"\* +│ replica stable-decode-0", shown)


def events(mesh: Mesh, last: str) -> list[str]:
    """Return what happened, once `last` is among it."""
    found = [each["what"] for each in json.loads(mesh.run("events", "--json")[1])]
    return found if last in found else []


def test_a_watch_survives_the_death_of_the_leader(mesh: Mesh) -> None:
    """It goes on at the next leader; an abort there ends it with the status of a rollout that was taken back."""
    status, shown, errors = mesh.run("rollout", "start", "--to", "next", "--steps", "10,50,100")
    assert status == 0, errors
    rollout = re.search(r"r-[\d-]+", shown)
    assert rollout is not None
    watch = mesh.command("rollout", "status", "--watch")
    assert watch.stdout is not None
    first = watch.stdout.readline()
    assert first.startswith(rollout[0])
    leader = mesh.leader()
    mesh.processes[leader].send_signal(signal.SIGKILL)
    other = ({"control-0", "control-1"} - {leader}).pop()
    lines = [watch.stdout.readline()]
    while "Connected to " not in lines[-1]:
        assert watch.poll() is None, lines
        lines.append(watch.stdout.readline())
    assert "is lost; the mesh serves on." in "".join(lines)
    assert mesh.leader() == other
    until(lambda: mesh.run("rollout", "abort", "--reason", "enough")[0] == 0, "the new leader takes commands")
    shown, _ = watch.communicate(timeout=WITHIN_S)
    assert watch.returncode == 1, shown
    assert "enough" in mesh.run("rollout", "history", rollout[0])[1]


def test_stable_without_a_control_plane_is_taken_over(mesh: Mesh) -> None:
    """A control process that runs takes a term above the operator's."""
    status, shown, errors = mesh.run("snapshot", "stable", "--direct")
    assert (status, errors) == (0, "")
    written = re.search(r"Wrote (\d+)\.operator:", shown)
    assert written is not None

    def term() -> int:
        name = json.loads(mesh.run("snapshot", "show", "--json")[1])["name"]
        return int(name["term"]["number"]) if name["term"]["leader"].startswith("control-") else 0

    until(lambda: term() > int(written[1]), "a leader takes a higher term")
