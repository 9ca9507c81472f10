"""Imports point one way: services -> kvmesh -> stubs, and inside the router from package to package.

Read from the source, so that prose cannot drift.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from kvmesh.config import ROOT

SERVICES = ("frontend", "router", "prefill", "decode")

ROUTER = ROOT / "services" / "router"
ROUTER_ORDER = {
    "cooperative_yield": (),
    "queue": (),
    "index": ("cooperative_yield",),
    "placement": ("queue", "index"),
    "gossip": ("cooperative_yield", "placement"),
    "forwarding": ("queue", "placement"),
    "status": ("placement", "forwarding"),
    "telemetry": ("queue", "index", "placement", "gossip", "forwarding"),
    "main": ("index", "placement", "gossip", "forwarding", "status", "telemetry"),
    "__main__": ("main",),
}
"""What each package or module of the router imports of the others: only of those before it."""

FRONTEND_ORDER = {
    "requests": (),
    "accounts": ("requests",),
    "surface": ("requests", "accounts"),
    "draining": ("requests",),
    "mesh_secret": ("requests",),
    "readiness": ("requests",),
    "routers": ("requests",),
    "metrics": ("requests", "accounts"),
    "main": (
        *("requests", "accounts", "surface"),
        *("draining", "mesh_secret", "readiness", "routers", "metrics"),
    ),
    "__main__": ("main",),
}
"""The same of the frontend: bytes become messages above accounts, and live requests know of neither."""

ORDERS = {"router": ROUTER_ORDER, "frontend": FRONTEND_ORDER}

SIMULATED = {"queue", "index", "placement", "forwarding"}
"""What the simulator runs of the router."""


def imports(path: Path, *, with_types: bool = True) -> Iterator[str]:
    """Yield the absolute name of everything `path` imports, also inside functions; without types: at run time."""
    package = path.relative_to(ROOT).parent.parts
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):  # a node is met before those in it
        if not with_types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            skipped |= {inner for child in node.body for inner in ast.walk(child)}
        if node in skipped:
            continue
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
    assert breaches("kvmesh", "services", "simulator", "engines", "bench", "tests") == []


def test_the_simulator_imports_of_the_router_its_decisions_alone() -> None:
    """The simulator runs the router's own placement and queue; it starts no service and no engine."""
    others = [f"services.{name}" for name in SERVICES if name != "router"]
    assert breaches("simulator", "engines", "bench", "tests", "kvmesh.cli", *others) == []
    used = {
        tuple(name.split(".")[:3]) for path in (ROOT / "simulator").rglob("*.py") for name in imports(path)
    }
    assert {name[2] for name in used if name[:2] == ("services", "router") and len(name) > 2} == SIMULATED


def test_engines_import_nothing_of_the_mesh() -> None:
    """An engine stands for somebody else's: it knows the tensor contract and nothing more."""
    assert breaches("engines", "services", "kvmesh", "bench", "tests") == []


def test_no_service_imports_an_engine_or_a_bench() -> None:
    """A service knows its engine through Triton alone."""
    assert breaches("services", "engines", "bench", "simulator", "tests", "kvmesh.cli") == []


def test_no_service_imports_another() -> None:
    """A service reaches another through its stub alone."""
    for service in SERVICES:
        others = [f"services.{other}" for other in SERVICES if other != service]
        assert breaches(f"services/{service}", *others) == []


def parts_imported(service: str, path: Path) -> set[str]:
    """Return the other packages and modules of `service` that `path` imports, by their first name in it."""
    names = (name.split(".") for name in imports(path))
    found = {parts[2] for parts in names if parts[:2] == ["services", service] and len(parts) > 2}
    return found - {path.relative_to(ROOT / "services" / service).parts[0].removesuffix(".py")}


@pytest.mark.parametrize("service", ORDERS)
def test_packages_of_a_service_stand_in_an_order(service: str) -> None:
    """No package or module imports one above it, types included."""
    before: set[str] = set()
    for part, below in ORDERS[service].items():
        assert before.issuperset(below), part
        before.add(part)
    entries = (ROOT / "services" / service).iterdir()
    there = {path.stem for path in entries if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__"} == before


@pytest.mark.parametrize(("service", "part"), [(name, part) for name in ORDERS for part in ORDERS[name]])
def test_a_package_imports_what_the_order_says(service: str, part: str) -> None:
    """Exactly that: an entry without an import would permit one later."""
    folder = ROOT / "services" / service / part
    paths = [*folder.rglob("*.py")] if folder.is_dir() else [folder.with_suffix(".py")]
    found = set[str]().union(*(parts_imported(service, path) for path in paths))
    assert found == set(ORDERS[service][part])


def test_no_module_of_the_router_is_in_a_circle() -> None:
    """At run time: of two that hold each other, one names the other's type alone."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in ROUTER.rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {
        name: modules.keys() & set(imports(path, with_types=False)) - {name} for name, path in modules.items()
    }
    assert sum(map(len, graph.values())) > len(modules), "imports were not read"
    TopologicalSorter(graph).prepare()
    circle = {"one": {"other"}, "other": {"one"}}
    with pytest.raises(CycleError):
        TopologicalSorter(circle).prepare()


def test_the_reader_of_imports_sees_every_form(tmp_path: Path) -> None:
    """A checker that overlooks a form of import would let it pass for ever."""
    sample = ROOT / "kvmesh" / "cli" / "main.py"
    found = set(imports(sample))
    assert {"asyncio", "typing.Final", "kvmesh.cli.generate", "kvmesh.config.describe"} <= found
    held = ROUTER / "forwarding" / "attempt.py"
    assert set(imports(held)) - set(imports(held, with_types=False)) == {
        *(
            "services.router.forwarding.frontend_session",
            "services.router.forwarding.frontend_session.FrontendSession",
        ),
        *("services.router.forwarding.replicas", "services.router.forwarding.replicas.Replica"),
    }
