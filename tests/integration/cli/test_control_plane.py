"""`kvmesh up` starts control processes, and `kvmesh status` shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from kvmesh.cli.status import status
from kvmesh.cli.up import running_mesh
from kvmesh.config import build
from tests.integration.live_mesh import until

pytestmark = pytest.mark.mesh


async def test_up_starts_and_status_shows_a_control_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It leads, every process of the mesh follows its snapshot, and the table says so."""
    config = build(
        {
            "engine": {"arithmetic": "hashed"},
            "prefill": {"replicas": 1},
            "decode": {"replicas": 1},
            "control": {"replicas": 1},
        }
    )
    async with running_mesh(config, tmp_path, Console(quiet=True)) as (_, mesh):
        assert mesh.addresses_of("control")

        async def leads() -> bool:
            capsys.readouterr()
            assert await status(mesh, Console(quiet=True), as_json=True) == 0
            (control,) = [each for each in json.loads(capsys.readouterr().out) if each["role"] == "control"]
            found = {each["name"]: each["value"] for each in control["metrics"] if not each["labels"]}
            return bool(
                found["kvmesh_control_is_leader"]
                and found["kvmesh_control_receivers"] == 4
                and not found["kvmesh_control_receivers_behind"]
            )

        await until(leads, 30, "the control process leads, and every process has its snapshot", every_s=0.2)
        await status(mesh, Console(width=200), as_json=False)
        line = next(line for line in capsys.readouterr().out.splitlines() if "control-0" in line)
        assert "serving" in line and "4 receivers, 0 behind, leads in term 1" in line
