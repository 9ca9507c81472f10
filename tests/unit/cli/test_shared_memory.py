"""Files of killed engines do not accumulate in /dev/shm."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvmesh.cli.shared_memory import clear, clear_stale, prefix_of

MESH = Path("/var/lib/kvmesh/eu")


def test_only_files_of_ended_supervisors_are_cleared(tmp_path: Path) -> None:
    """Files of live supervisors and of other programs stay."""
    gone = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    os.waitpid(gone, 0)
    kept = {f"{prefix_of('decode-0-engine', MESH)}1", "kvmesh_17301_2", "other"}
    for name in (*kept, f"kvmesh-up_{gone}_decode-0-engine_3"):
        (tmp_path / name).touch()
    clear_stale(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_two_meshes_of_one_supervisor_share_no_prefix() -> None:
    """Replicas of equal names in two regions have files of their own."""
    one, other = prefix_of("prefill-0-engine", MESH), prefix_of("prefill-0-engine", MESH.with_name("us"))
    assert not one.startswith(other) and not other.startswith(one)


def test_files_of_one_process_are_cleared(tmp_path: Path) -> None:
    """The end of one replica does not affect the files of another."""
    for name in ("decode-0-engine", "decode-1-engine"):
        (tmp_path / f"{prefix_of(name, MESH)}x").touch()
    clear(prefix_of("decode-0-engine", MESH), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{prefix_of('decode-1-engine', MESH)}x"]
