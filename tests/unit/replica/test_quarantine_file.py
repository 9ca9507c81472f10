"""A quarantine outlives its service, and ends with its engine."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvmesh.clock import MonotonicClock
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.life_state import LifeState
from kvmesh.replica.life import SELF_SERVE_S, ReplicaLife
from kvmesh.replica.life_shell import LifeShell
from kvmesh.replica.quarantine_file import BOOT_ID_BYTES_MAX, FILE_NAME, QuarantineFile


async def _start(folder: Path | None, engine: str, *, is_control_known: bool) -> LifeShell:
    """Return the life of a service that was started anew."""
    shell = LifeShell(MonotonicClock(), lambda: None, QuarantineFile(folder))
    shell.start(is_control_known=is_control_known)
    shell.on_engine(engine, is_control_known=is_control_known)
    return shell


async def _quarantine(folder: Path | None) -> None:
    shell = await _start(folder, "e-1", is_control_known=True)
    order = pb.LifeOrder(state=pb.REPLICA_STATE_QUARANTINED, engine_boot_id="e-1", reason="wrong")
    shell.on_leader(True, order)
    assert shell.life.state is LifeState.QUARANTINED
    shell.close()


@pytest.mark.parametrize("is_control_known", [True, False])
async def test_a_restarted_service_keeps_its_engine_out(tmp_path: Path, *, is_control_known: bool) -> None:
    """Without any control process, too, and again after the next restart. A new engine ends it."""
    await _quarantine(tmp_path)
    for _ in range(2):
        shell = await _start(tmp_path, "e-1", is_control_known=is_control_known)
        shell.life.on_timer(MonotonicClock().now_s() + 2 * SELF_SERVE_S)
        shell.on_leader(False, None)
        assert shell.life.state is LifeState.QUARANTINED and shell.life.reason and not shell.life.is_proved
        shell.close()
    shell = await _start(tmp_path, "e-2", is_control_known=is_control_known)
    assert shell.life.state is (LifeState.STARTING if is_control_known else LifeState.SERVING)
    shell.close()


async def test_the_engine_is_started_anew_beside_its_service(tmp_path: Path) -> None:
    """The service reads its file once. The boot id tells the engines apart."""
    await _quarantine(tmp_path)
    shell = await _start(tmp_path, "e-1", is_control_known=True)
    shell.on_engine("e-2", is_control_known=True)
    assert shell.life.state is LifeState.STARTING
    shell.close()


async def test_without_a_folder_nothing_is_kept() -> None:
    """The control plane alone knows of the engine then."""
    await _quarantine(None)
    shell = await _start(None, "e-1", is_control_known=True)
    assert shell.life.state is LifeState.STARTING
    shell.close()


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"x" * (BOOT_ID_BYTES_MAX + 1), b"other"])
def test_an_unreadable_file_keeps_nothing_out(tmp_path: Path, data: bytes) -> None:
    """The control plane proves the engine anew."""
    (tmp_path / FILE_NAME).write_bytes(data)
    life = ReplicaLife(0.0, QuarantineFile(tmp_path).read())
    life.start(0.0, is_control_known=False)
    life.on_engine("e-1", 0.0, is_control_known=False)
    assert life.state is LifeState.SERVING


def test_a_disk_that_refuses_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The quarantine holds in memory."""
    (tmp_path / "file").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        QuarantineFile(tmp_path / "file").write("e-1")
    assert "cannot be written" in caplog.text
