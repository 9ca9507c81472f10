"""Fixtures of the tests of the commands that talk to the control plane."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.control.scripted_control import Shell


@pytest.fixture
def shell(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Shell:
    """A user in an empty folder, with the Redis of a mesh."""
    monkeypatch.chdir(tmp_path)
    return Shell(redis_url, capsys, monkeypatch)
