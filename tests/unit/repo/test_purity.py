"""Pure modules touch no clock, no randomness, no socket and no event loop.

A module says so itself: its docstring has a sentence that begins with `Pure`. The
simulations and the replays of traces are only as honest as this rule.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.config import ROOT

FOLDERS = ("kvmesh", "services", "engines", "controlplane")
PURE = re.compile(r"(?:^|\n|\. )Pure(?:[.;]|: [a-z]| and\b)")

FORBIDDEN = frozenset(
    {
        *("asyncio", "datetime", "grpc", "multiprocessing", "os", "redis", "requests"),
        *("secrets", "select", "selectors", "signal", "socket", "subprocess", "threading", "time", "uuid"),
        *("kvmesh.clock.MonotonicClock", "kvmesh.clock.wall_ns", "numpy.random"),
    }
)
BUILTINS = frozenset({"open", "input", "print", "exec", "eval"})

FIRST_PURE_MODULES = (
    "kvmesh/blocks.py",
    "services/frontend/surface/wire.py",
)
"""If the marker were misread, nothing would be checked: these are known to carry it."""


def pure_modules() -> list[Path]:
    """Return every module whose docstring says `Pure`."""
    return [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if PURE.search(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")
    ]


def impurities(source: str) -> Iterator[str]:
    """Yield what in `source` reaches out of its arguments."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            if any(alias.name == "random" and alias.asname for alias in node.names):
                yield f"line {line}: random under another name"
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{node.value.id}.{node.attr}".replace("np.", "numpy.")]
        elif isinstance(node, ast.Call) and not node.args and ast.unparse(node.func).endswith("Random"):
            yield f"line {line}: a source of chance without a seed"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
            yield f"line {line}: {node.func.id}()"
        elif isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.Global):
            yield f"line {line}: {type(node).__name__}"
        for name in names:
            parts = name.split(".")
            if parts[0] == "random" and parts[1:] not in ([], ["Random"]):
                yield f"line {line}: {name}"
            if any(".".join(parts[:end]) in FORBIDDEN for end in range(1, len(parts) + 1)):
                yield f"line {line}: {name}"


@pytest.mark.parametrize("path", pure_modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_pure_modules_reach_out_for_nothing(path: Path) -> None:
    """Time, chance and peers come in as arguments."""
    assert list(impurities(path.read_text(encoding="utf-8"))) == []


def test_the_marker_is_found_where_it_stands() -> None:
    """The check looks at the modules that promise to be pure."""
    found = {str(path.relative_to(ROOT)) for path in pure_modules()}
    assert set(FIRST_PURE_MODULES) <= found


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from time import monotonic",
        "import random as r",
        "import random\nx = random.random()",
        "from random import randint",
        "from random import Random\nx = Random()",
        "from kvmesh.clock import MonotonicClock",
        "import numpy as np\nx = np.random.rand()",
        "def f():\n    import socket",
        "async def f(): pass",
        "open('x')",
    ],
)
def test_the_check_can_fail(source: str) -> None:
    """Every way out that matters is seen."""
    assert list(impurities(source)) != []


def test_the_check_lets_pure_code_pass() -> None:
    """Types of clocks and of seeded chance may be named: whoever passes one in decides."""
    assert list(impurities("from kvmesh.clock import Clock\nimport numpy as np\nx = np.zeros(3)")) == []
    assert list(impurities("import random\ndef f(chance: random.Random): return chance.random()")) == []
    assert list(impurities("from random import Random\nx = Random(7)")) == []
