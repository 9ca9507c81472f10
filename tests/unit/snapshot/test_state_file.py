"""The state folder of a process: its snapshot outlives a crash, and no fault of the disk fails the process."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from kvmesh.snapshot.content import ENDED_MAX, NAME_BYTES_MAX, Content
from kvmesh.snapshot.published import SNAPSHOT_BYTES_MAX, Term, publish
from kvmesh.snapshot.state_file import StateFile
from tests.unit.snapshot.test_content import STABLE

ONE, OTHER = (publish(Term(1, "c"), version, Content((STABLE,))) for version in (1, 2))


def test_the_last_snapshot_is_read_after_a_restart(tmp_path: Path) -> None:
    """The folder is made, each write replaces the one before, and only the file is left."""
    folder = tmp_path / "state" / "router-0"
    for each in (ONE, OTHER):
        assert StateFile(folder).write(each)
        assert StateFile(folder).read() == each
    assert [path.name for path in folder.iterdir()] == ["snapshot"]


def test_rollouts_that_were_taken_back_are_read_after_a_restart(tmp_path: Path) -> None:
    """The latest is last; names of any characters come back, and no more than a receiver remembers."""
    names = tuple("\x00" * (NAME_BYTES_MAX - 2) + str(number) for number in range(10, 10 + ENDED_MAX))
    assert StateFile(tmp_path).read_ended() == ()
    assert StateFile(tmp_path).write_ended(names)
    assert StateFile(tmp_path).read_ended() == names


@pytest.mark.parametrize("junk", [b"", b"{}", b"[1]", b'["r1"', b'["' + b"x" * 100_000 + b'"]'])
def test_a_damaged_list_is_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture, junk: bytes) -> None:
    """It is logged, and the next write repairs it."""
    state = StateFile(tmp_path)
    (tmp_path / "ended-rollouts.json").write_bytes(junk)
    assert state.read_ended() == () and "unreadable" in caplog.text
    assert state.write_ended(("r1",)) and state.read_ended() == ("r1",)


def test_a_process_without_a_folder_has_no_file() -> None:
    """Nothing is written and nothing is read."""
    state = StateFile(None)
    assert state.read() is None and not state.write(ONE) and not state.is_there
    assert state.read_ended() == () and not state.write_ended(("r1",))


@pytest.mark.parametrize("cut", [0, 1, 40, -1], ids=["empty", "byte", "half", "almost"])
def test_a_damaged_file_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int) -> None:
    """A file that a crash or a disk cut off is logged and ignored, and the next write repairs it."""
    state = StateFile(tmp_path)
    (tmp_path / "snapshot").write_bytes(ONE.data[:cut])
    assert state.read() is None
    assert "unreadable" in caplog.text and str(tmp_path) in caplog.text
    assert state.write(OTHER) and state.read() == OTHER


def test_a_file_of_any_size_is_read_within_the_bound(tmp_path: Path) -> None:
    """A huge file takes no more memory than the largest snapshot."""
    with (tmp_path / "snapshot").open("wb") as file:
        file.truncate(50 * SNAPSHOT_BYTES_MAX)
    assert StateFile(tmp_path).read() is None


def test_a_folder_that_is_a_file_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong --state never fails the process."""
    path = tmp_path / "file"
    path.write_text("x")
    state = StateFile(path)
    assert state.read() is None
    caplog.clear()
    assert not state.write(ONE) and not state.write(OTHER)
    assert len(caplog.records) == 1
    assert state.failure_total == 2


def test_a_full_disk_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The old snapshot stays readable, one line is logged, and the end of the fault too."""
    caplog.set_level(logging.INFO)
    state = StateFile(tmp_path)
    assert state.write(ONE)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert not state.write(OTHER) and not state.write(OTHER)
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert state.read() == ONE and [path.name for path in tmp_path.iterdir()] == ["snapshot"]
    assert state.write(OTHER) and state.read() == OTHER
    assert "again" in caplog.text
