"""The entry of a program: garbage collection while it imports and while it runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh import entry

PROGRAM = """
import gc

at_import = gc.isenabled()
kept = [{} for _ in range(1000)]

def main():
    frozen = gc.get_freeze_count() > 0 and not any(one is kept for one in gc.get_objects())
    return 40 + 1 * at_import + 2 * gc.isenabled() + 4 * frozen
"""
BROKEN = """
raise ImportError("broken")
"""


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """The garbage collector as it was."""
    assert gc.isenabled()
    yield
    gc.unfreeze()
    gc.enable()


def write(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module that can be imported, and return its name."""
    name = f"program_{folder.name}"
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return name


def test_a_program_imports_without_collection_and_runs_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imported objects are frozen. The exit status is what `main` returns."""
    with pytest.raises(SystemExit) as ended:
        entry.run(write(tmp_path, PROGRAM, monkeypatch))
    assert ended.value.code == 40 + 2 + 4


def test_a_program_that_cannot_be_imported_leaves_collection_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the import's own."""
    with pytest.raises(ImportError, match="broken"):
        entry.run(write(tmp_path, BROKEN, monkeypatch))
    assert gc.isenabled()
