"""Tests wait on conditions: a literal sleep either wastes time or is too short on a busy machine."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from kvmesh.config import ROOT

LONGEST_S = 0.2
"""A shorter sleep paces a loop that looks for a condition, or a peer that the test plays."""

VIRTUAL = re.compile(r"^(import selectors|from \S+\.virtual_time import)", re.MULTILINE)
"""What a module imports whose event loop skips the time that it would sleep."""


def literal_sleeps(source: str) -> list[int]:
    """Return the lines that sleep a literal time of `LONGEST_S` or more on a real clock."""
    tree = ast.parse(source)
    if VIRTUAL.search(source):
        return []
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep")
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, int | float)
        and node.args[0].value >= LONGEST_S
    ]


def test_no_test_sleeps_a_literal_time() -> None:
    """A pace that a test needs has a name that says what it stands for."""
    found = {
        str(path.relative_to(ROOT)): lines
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != Path(__file__) and (lines := literal_sleeps(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_a_literal_sleep_is_found() -> None:
    """On a real clock; not a short one, not a named one, not one in virtual time."""
    source = "asyncio.sleep(0.2)\nasyncio.sleep(0.1)\ntime.sleep(PACE_S)\nx = 1; time.sleep(3)\n"
    assert literal_sleeps(source) == [1, 4]
    assert literal_sleeps("from tests.unit.frontend.budgets.virtual_time import simulate\n" + source) == []
