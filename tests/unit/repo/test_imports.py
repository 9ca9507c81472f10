"""Imports point one way: services -> kvmesh -> stubs. Read from the source, so that prose cannot drift."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from kvmesh.config import ROOT

SERVICES = ("frontend", "router", "prefill", "decode")


def imports(path: Path) -> Iterator[str]:
    """Yield the absolute name of everything `path` imports, also inside functions."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def breaches(folder: str, *forbidden: str) -> list[str]:
    """Return `file: import` for every import below `folder` of a package in `forbidden`."""
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in set(imports(path))
        if any(name == package or name.startswith(f"{package}.") for package in forbidden)
    ]


def test_the_shared_package_imports_no_service_and_no_engine() -> None:
    """kvmesh is what services stand on; the command line starts services by name."""
    assert breaches("kvmesh", "services", "engines", "bench", "tests") == []


def test_engines_import_nothing_of_the_mesh() -> None:
    """An engine stands for somebody else's: it knows the tensor contract and nothing more."""
    assert breaches("engines", "services", "kvmesh", "bench", "tests") == []


def test_no_service_imports_an_engine_or_a_bench() -> None:
    """A service knows its engine through Triton alone."""
    assert breaches("services", "engines", "bench", "tests", "kvmesh.cli") == []


def test_no_service_imports_another() -> None:
    """A service reaches another through its stub alone."""
    for service in SERVICES:
        others = [f"services.{other}" for other in SERVICES if other != service]
        assert breaches(f"services/{service}", *others) == []


def test_the_reader_of_imports_sees_every_form(tmp_path: Path) -> None:
    """A checker that overlooks a form of import would let it pass for ever."""
    sample = ROOT / "kvmesh" / "cli" / "main.py"
    found = set(imports(sample))
    assert {"asyncio", "typing.Final", "kvmesh.cli.generate", "kvmesh.config.describe"} <= found
