"""Runs of the simulator, one JSON line each, so that an interrupted bench continues.

A run counts as long as its code is the same, except for comments and docstrings.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from bench.routing.rows import OURS
from kvmesh.config import ROOT
from simulator.measures import Measures
from simulator.processes import Task
from simulator.tables import row_dict

ROUTER: Final = ROOT / "services" / "router"
SIMULATOR: Final = (ROOT / "simulator" / "runs.py", ROOT / "simulator")
"""The first module, and the folder of the modules that belong to the simulator, packages included."""

POLICY: Final = (ROUTER / "placement" / "cost_policy.py", ROUTER)
RIVALS: Final = SIMULATOR[1] / "rivals"
QUEUE_ORDER: Final = ROOT / "kvmesh" / "queue_order.py"
CATALOGUE: Final = SIMULATOR[1] / "catalogue.py"
"""Left out of the digest, because it imports every policy. A change of kvmesh's policy keeps the runs of the others."""


class Record:
    """The file of runs. One process at a time owns it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs: dict[str, Measures] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row: dict[str, Any] = json.loads(line)
                self._runs[row["run"]] = Measures(**row["figures"])

    def get(self, task: Task) -> Measures | None:
        """Return the figures of `task`, if known."""
        return self._runs.get(_key(task))

    def add(self, task: Task, figures: Measures) -> None:
        """Append a run."""
        self._runs[_key(task)] = figures
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": _key(task), "figures": figures.as_dict()}) + "\n")


def _key(task: Task) -> str:
    row = json.dumps(row_dict(task.row), sort_keys=True)
    return f"{task.trace} {task.policy} {task.seed} {row} {_code(is_ours=task.policy == OURS)}"


def code() -> str:
    """Return the digests of the code of kvmesh's runs, and of the others'."""
    return f"kvmesh {_code(is_ours=True)}, others {_code(is_ours=False)} (digests)"


@cache
def _code(*, is_ours: bool) -> str:
    """Return a digest of the code of a run."""
    files = {QUEUE_ORDER, *_closure(*SIMULATOR, {CATALOGUE})}
    files |= set(_closure(*POLICY, set())) if is_ours else set(RIVALS.glob("*.py"))
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(_bare(path).encode())
    return digest.hexdigest()[:16]


def _closure(path: Path, folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield `path` and its imports in `folder`, except rivals and `seen` ones."""
    if path in seen:
        return
    seen.add(path)
    yield path
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            other = ROOT / f"{node.module.replace('.', '/')}.py"
            if folder in other.parents and other.parent != RIVALS and other.exists():
                yield from _closure(other, folder, seen)


def _bare(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            texts = (one for one in node.body if isinstance(one, ast.Expr))
            for text in [one for one in texts if isinstance(one.value, ast.Constant)]:
                node.body.remove(text)
    return ast.dump(tree)
