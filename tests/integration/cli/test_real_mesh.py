"""The command line with the real mesh: the demo shows its result, and no process is left behind."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.child import bound_command
from kvmesh.cli.mesh_file import MESH_FILE, read_mesh
from kvmesh.ports import reservations_path

pytestmark = pytest.mark.mesh

KVMESH = [sys.executable, "-c", "from kvmesh.cli.main import main; main()"]


def processes_naming(folder: Path) -> dict[int, str]:
    """Return the processes with `folder` in their command line, without this test's own."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(folder) in command:
                found[int(entry.name)] = command
    return found


def wait_for_end(pid: int) -> None:
    """Return when `pid` is gone. Raises TimeoutError after 10 s."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not select.select([handle], [], [], 10)[0]:
            raise TimeoutError(f"process {pid} lives on")
    finally:
        os.close(handle)


def test_the_demo_finds_its_opening_in_cache(tmp_path: Path) -> None:
    """On the second turn most blocks are matched and the TTFT is shorter; afterwards all processes have ended."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run(
        bound_command([*KVMESH, "demo"]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    def row(name: str) -> list[str]:
        line = next(line for line in done.stdout.splitlines() if name in line)
        return [cell.strip() for cell in line.split("│")[2:4]]

    matched, blocks = map(int, re.findall(r"\d+", row("blocks matched")[1]))
    assert matched * 2 > blocks >= 10
    opened_ms, continued_ms = (float(cell.split()[0]) for cell in row("time to first token"))
    assert continued_ms < opened_ms
    (why,) = (line for line in done.stdout.splitlines() if line.startswith("continued: "))
    assert re.match(r"continued: (?:After .*: )?(?:prefill|decode)-\d .* cached", why), why
    assert processes_naming(tmp_path) == {}
    assert [each.name for each in tmp_path.iterdir() if each.name != reservations_path().name] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_or_killed_mesh_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    """The engines' child processes end, too, for any end of `kvmesh up`; only a kill leaves mesh.json."""
    command = bound_command([*KVMESH, "up", "--data-dir", str(tmp_path)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as up:
        assert up.stdout is not None
        try:
            assert any("The mesh is up" in line for line in up.stdout)
            started = processes_naming(tmp_path)
            assert len(started) > len(read_mesh(tmp_path).processes)
            up.send_signal(number)
            up.wait(60)
        finally:
            up.kill()
        assert up.returncode == (0 if number is signal.SIGINT else -signal.SIGKILL)
    for pid in started:
        wait_for_end(pid)
    assert (tmp_path / MESH_FILE).exists() == (number is signal.SIGKILL)
