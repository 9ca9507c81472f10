"""The committed stubs are what the protos say now."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

from kvmesh.config import ROOT


def test_stubs_are_current(tmp_path: Path) -> None:
    """Written again they are the same, byte for byte; none is missing and none is left over."""
    command = [sys.executable, str(ROOT / "tools" / "stubs.py"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    fresh = {path.relative_to(tmp_path) for path in tmp_path.rglob("*_pb2*")}
    committed = {
        path.relative_to(ROOT) for path in (ROOT / "kvmesh").rglob("*_pb2*") if path.suffix in (".py", ".pyi")
    }
    assert fresh
    assert committed == fresh, "run: make proto"
    _, differ, failed = filecmp.cmpfiles(ROOT, tmp_path, map(str, sorted(fresh)), shallow=False)
    assert (differ, failed) == ([], []), "run: make proto"
