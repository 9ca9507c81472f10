"""The picture of `kvmesh rollout status` in the documents shows the screen of this release."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from kvmesh.cli.control.rollout_tables import status_screen
from kvmesh.config import ROOT
from tests.unit.cli.control.messages import text_of


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rollout_picture", ROOT / "tools" / "rollout_picture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_current() -> None:
    """`make docs` writes it again."""
    tool = _tool()
    assert tool.PICTURE.read_text(encoding="utf-8") == tool.picture()


def test_the_picture_has_all_columns_and_gates() -> None:
    """Sentences wrap at its width, and nothing is left out."""
    tool = _tool()
    shown = text_of(status_screen(tool.sample(), tool.utc_time), width=tool.COLUMNS)
    assert "Left out" not in shown
    assert all(gate.name in shown for gate in tool.sample().verdict.gates)
