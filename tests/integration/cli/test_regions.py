"""`kvmesh up --regions eu,us` as an operator uses it: two meshes of processes, the commands about regions, a clean stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from kvmesh.child import bound_command
from kvmesh.cli.main import main
from kvmesh.cli.mesh_file import is_alive, read_meshes
from kvmesh.redis_url import VARIABLE
from tests.patience import Patience

pytestmark = pytest.mark.mesh

CONFIG: Final = """
[engine]
arithmetic = "hashed"
[prefill]
replicas = 1
[decode]
replicas = 1
[frontend]
port = 0
"""
WITHIN_S: Final = 60.0
POLL_S: Final = 0.2
GENERATE = ("generate", "Call me", "--max-output-tokens", "4", "--seed", "7", "--ignore-eos")
"""Without a seed the answer may end at once, or be of spaces."""
SHARED_MEMORY: Final = Path("/dev/shm")


@dataclass
class Terminal:
    """Runs `kvmesh` in the folder of the meshes."""

    capture: pytest.CaptureFixture[str]

    def run(self, *words: str) -> tuple[int, str, str]:
        """Return exit status, stdout and stderr."""
        with pytest.raises(SystemExit) as ended:
            main(words)
        shown = self.capture.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    def region(self, name: str, source: str) -> dict[str, Any]:
        """Return a region as `source` sees it."""
        status, shown, errors = self.run("region", "list", "--json", "--from", source)
        assert status == 0, errors
        found: dict[str, Any] = next(each for each in json.loads(shown)["regions"] if each["region"] == name)
        return found

    def declared(self, name: str, source: str) -> tuple[str, str]:
        """Return what `source` knows of a region's declaration: state and reason."""
        found = self.region(name, source)["declared"]
        return found["state"].removeprefix("DECLARED_STATE_"), found["reason"]

    def hears(self, own: str, other: str) -> bool:
        """True if news of `other` arrive at `own`."""
        return not self.region(other, own)["is_stale"]


@pytest.fixture
def up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """Both regions, from a folder with a kvmesh.toml; killed at the end if the test did not stop them."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    root = str(Path.cwd())
    monkeypatch.chdir(tmp_path)
    Path("kvmesh.toml").write_text(CONFIG)
    with subprocess.Popen(
        bound_command([sys.executable, "-m", "kvmesh.cli.main", "up", "--regions", "eu,us"]),
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` holds. Raises AssertionError."""
    bound = Patience(WITHIN_S)
    while not condition():
        assert not bound.is_over, f"not within {WITHIN_S:g} s: {what}"
        time.sleep(POLL_S)


def shown_until(process: subprocess.Popen[str], text: str) -> str:
    """Return the output of a process up to the line with `text`."""
    shown = ""
    assert process.stdout is not None
    for line in process.stdout:
        shown += line
        if text in line:
            return shown
    raise AssertionError(f'"{text}" is not in:\n{shown}')


def test_two_regions_are_started_moved_by_their_operator_and_stopped(
    up: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each region is a whole mesh; declarations reach both; nothing is left after Ctrl-C."""
    terminal = Terminal(capsys)
    shown = shown_until(up, "The regions are up")
    meshes = read_meshes(tmp_path / ".kvmesh")
    assert list(meshes) == ["eu", "us"]
    for region, mesh in meshes.items():
        assert all(address in shown for address in mesh.addresses_of("frontend")), region
    assert {each.address for each in meshes["eu"].processes}.isdisjoint(
        each.address for each in meshes["us"].processes
    )
    pids = [
        up.pid,
        *(pid for mesh in meshes.values() for pid in (mesh.pid, *(each.pid for each in mesh.processes))),
    ]
    _serve(terminal)
    _see_each_other(terminal)
    _drain_and_restore(terminal)
    _avoid(terminal)
    assert terminal.run("status")[0] == 0
    up.send_signal(signal.SIGINT)
    rest, _ = up.communicate(timeout=WITHIN_S)
    assert up.returncode == 0 and rest.endswith("The meshes of all regions are stopped.\n")
    assert [pid for pid in pids if is_alive(pid)] == []
    left = [path.name for mesh in meshes.values() for path in SHARED_MEMORY.glob(f"kvmesh-up_{mesh.pid}_*")]
    assert left == [] and not list((tmp_path / ".kvmesh").rglob("mesh.json"))
    status, _, errors = terminal.run("status")
    assert status == 2 and errors.startswith("No mesh runs with ")


def _serve(terminal: Terminal) -> None:
    """Both regions serve; without another --data-dir the first one does, and the command says so."""
    for more, said in ((), "Region eu. Others: --data-dir .kvmesh/us.\n"), (("--data-dir", ".kvmesh/us"), ""):
        status, shown, errors = terminal.run(*GENERATE, *more)
        assert (status, errors) == (0, said) and shown.strip()


def _see_each_other(terminal: Terminal) -> None:
    """Each region hears the other one, and the table names both."""
    for own, other in (("eu", "us"), ("us", "eu")):
        until(partial(terminal.hears, own, other), f"{own} hears {other}")
        assert terminal.region(own, own)["is_own"]
    status, shown, _ = terminal.run("region", "list")
    assert status == 0 and "eu (own)" in shown and "│ us " in shown


def _drain_and_restore(terminal: Terminal) -> None:
    """The other region follows the drain, and back. A region of cold engines carries little, so it is forced."""
    status, shown, _ = terminal.run("region", "drain", "eu", "--reason", "rack move", "--force")
    assert status == 0 and "Draining eu" in shown
    until(lambda: terminal.declared("eu", "us") == ("DRAINING", "rack move"), "us knows that eu drains")
    status, shown, _ = terminal.run("region", "restore", "eu")
    assert status == 0 and shown.startswith("Restored eu.\n")
    until(lambda: terminal.declared("eu", "us")[0] == "SERVING", "us knows that eu serves again")
    events = json.loads(terminal.run("region", "history", "--json")[1])
    assert {"region.drain", "region.draining", "region.restore"} <= {each["what"] for each in events}


def _avoid(terminal: Terminal) -> None:
    """One region leaves the other by hand, and the other one is not asked."""
    words = ("region", "avoid", "eu", "--from", "us", "--ttl", "1h", "--reason", "too ill to declare")
    assert terminal.run(*words)[0] == 0
    until(lambda: terminal.region("eu", "us")["observed"] == "OBSERVED_STATE_OUT", "us takes eu for OUT")
    found = terminal.region("eu", "us")
    assert found["is_by_hand"] and found["weight"] == 0
    assert terminal.region("eu", "eu")["weight"] == 1
    assert terminal.run(*words, "--ok")[0] == 0
    until(lambda: terminal.region("eu", "us")["weight"] == 1, "us takes eu for HEALTHY")
