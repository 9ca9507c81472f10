"""The archive of a GPU host, unpacked for a Python without packages, proves the mesh on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.config import ROOT

pytestmark = pytest.mark.mesh

PHASES = ("prefills", "transfers", "steps", "mesh")


def test_the_archive_proves_the_mesh_on_a_cpu(tmp_path: Path) -> None:
    """Every phase passes with the packages of the archive alone, and leaves figures, a page and logs."""
    command = [
        str(ROOT / "tools" / "gpu" / "rehearse.sh"),
        sys.executable,
        str(tmp_path),
        "--only",
        ",".join(PHASES),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    results = tmp_path / "results"
    record = json.loads((results / "run.json").read_text(encoding="utf-8"))
    assert tuple(record["phases"]) == ("engines", *PHASES)
    assert all(phase["passed"] for phase in record["phases"].values())
    figures = {(one["case"], one["metric"]) for one in record["phases"]["mesh"]["result"]["figures"]}
    assert ("one request at a time", "added time to first token, p50") in figures
    assert ("64 streams", "CPU per token, frontend") in figures
    assert record["phases"]["prefills"]["result"]["fit"]["errors"]["worst"] >= 0
    assert "**Not run on a GPU yet.**" in (results / "gpu-run.md").read_text(encoding="utf-8")
    assert (results / "logs" / "router-0.log").exists()
    fitted = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "fit", str(results / "recording.json"), "--json"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert fitted.returncode == 0, fitted.stderr
