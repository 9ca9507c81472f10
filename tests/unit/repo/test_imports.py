"""Imports point one way: services, simulator, controlplane -> kvmesh -> stubs.

Inside a service they point from package to package, and in no cycle. Read from the source, so that prose cannot drift.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmesh.config import ROOT

SERVICES = ("frontend", "router", "prefill", "decode")

ROUTER_ORDER = {
    "cooperative_yield": (),
    "queue": (),
    "regions": (),
    "index": ("cooperative_yield",),
    "placement": ("queue", "index"),
    "gossip": ("cooperative_yield", "placement"),
    "forwarding": ("queue", "regions", "placement"),
    "hot": ("cooperative_yield", "index", "forwarding"),
    "pool_members": (),
    "rehearsal": ("index", "placement", "gossip", "forwarding"),
    "status": ("placement", "forwarding", "hot"),
    "telemetry": ("queue", "regions", "index", "placement", "gossip", "forwarding", "hot"),
    "main": (
        "regions",
        "index",
        "placement",
        "gossip",
        "forwarding",
        "hot",
        "pool_members",
        "rehearsal",
        "status",
        "telemetry",
    ),
    "__main__": (),  # names main as text: kvmesh.entry imports it
}
"""What each package or module of the router imports of the others: only of those before it."""

FRONTEND_ORDER = {
    "requests": (),
    "accounts": ("requests",),
    "surface": ("requests", "accounts"),
    "routers": ("requests",),
    "shadow": ("requests", "routers"),
    "draining": ("requests",),
    "mesh_secret": ("requests",),
    "region_listener": (),
    "listeners": (),
    "region_routers": (),
    "readiness": ("requests",),
    "start_gate": ("requests",),
    "golden_requests": ("requests",),
    "warm_up": ("requests", "surface", "golden_requests"),
    "metrics": ("requests", "accounts"),
    "assembly": (
        *("requests", "accounts", "surface", "draining", "routers", "metrics", "shadow"),
        *("mesh_secret", "readiness", "region_listener", "region_routers", "listeners"),
        *("start_gate", "warm_up"),
    ),
    "main": ("surface", "assembly"),
    "__main__": (),  # names main as text: kvmesh.entry imports it
}
"""The same of the frontend: bytes become messages above accounts, and live requests know of neither."""

ORDERS = {"router": ROUTER_ORDER, "frontend": FRONTEND_ORDER}

SHIPPED = ("kvmesh", "services", "simulator", "controlplane", "engines", "bench")
"""Folders without import cycles."""

SIMULATED = {"queue", "index", "placement", "forwarding"}
"""Packages of the router that the simulator runs."""


def imports(path: Path) -> Iterator[str]:
    """Yield the absolute name of everything `path` imports, also for types alone and inside functions."""
    return imported_by(path.read_text(encoding="utf-8"), path.relative_to(ROOT).parent.parts)


def imported_by(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the absolute name of everything that `source`, a module of `package`, imports."""
    for node in ast.walk(ast.parse(source)):
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
    assert breaches("kvmesh", "services", "simulator", "controlplane", "engines", "bench", "tests") == []


def test_the_simulator_imports_of_the_router_its_decisions_alone() -> None:
    """The simulator runs the router's own placement and queue; it starts no service and no engine."""
    others = [f"services.{name}" for name in SERVICES if name != "router"]
    assert breaches("simulator", "controlplane", "engines", "bench", "tests", "kvmesh.cli", *others) == []
    used = {
        tuple(name.split(".")[:3]) for path in (ROOT / "simulator").rglob("*.py") for name in imports(path)
    }
    assert {name[2] for name in used if name[:2] == ("services", "router") and len(name) > 2} == SIMULATED


def test_engines_import_nothing_of_the_mesh() -> None:
    """An engine stands for somebody else's: it knows the tensor contract and nothing more."""
    assert breaches("engines", "services", "controlplane", "kvmesh", "bench", "tests") == []


def test_no_service_imports_an_engine_or_a_bench() -> None:
    """A service knows its engine through Triton alone."""
    assert breaches("services", "engines", "bench", "simulator", "controlplane", "tests", "kvmesh.cli") == []


def test_the_control_plane_imports_the_shared_package_alone() -> None:
    """It reaches services through their stubs, and `kvmesh up` starts it by name."""
    others = ("services", "simulator", "engines", "bench", "tests", "kvmesh.cli")
    assert breaches("controlplane", *others) == []


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


def import_graph(*folders: str) -> dict[str, set[str]]:
    """Return by module what it imports of the others below `folders`, types included."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "_pb2" not in path.name
    }
    return {name: (paths.keys() & set(imports(path))) - {name} for name, path in paths.items()}


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the modules of each cycle of `graph`, one cycle per group of modules that reach each other."""
    reached = {name: reach(graph, name) for name in graph}
    groups = {frozenset({name} | {one for one in reached[name] if name in reached[one]}) for name in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def reach(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return every module that `start` imports, directly or through others."""
    found, waiting = set[str](), [start]
    while waiting:
        for name in graph[waiting.pop()] - found:
            found.add(name)
            waiting.append(name)
    return found


def test_no_module_is_in_an_import_cycle() -> None:
    """Imports of types and imports inside functions are counted."""
    graph = import_graph(*SHIPPED)
    assert sum(map(len, graph.values())) > len(graph), "imports were not read"
    assert cycles(graph) == []


@pytest.mark.parametrize("service", ["frontend", "router"])
def test_a_service_without_tensors_does_without_heavy_libraries(service: str) -> None:
    """numpy takes 20 MB of each process, and llguidance 8 MB. Another library may bring them."""
    code = f"import sys, services.{service}.main; print(bool({{'numpy', 'llguidance'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"


def test_the_search_finds_cycles() -> None:
    """The checker finds a cycle of any length, and finds none in a graph without a cycle."""
    assert cycles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"d"}, "f": {"a", "d"}}
    assert cycles(graph) == [["a", "b", "c"], ["d", "e"]]


def test_the_reader_of_imports_sees_every_form() -> None:
    """Absolute and relative imports, at the top, for types and inside functions."""
    found = set(imports(ROOT / "kvmesh" / "cli" / "main.py"))
    assert {"asyncio", "typing.Final", "kvmesh.cli.generate", "kvmesh.config.describe"} <= found
    source = """
import a.b
from c import d
from .e import f
if TYPE_CHECKING:
    from g import h
def function():
    from i import j
"""
    found = set(imported_by(source, ("k", "l")))
    assert found == {"a.b", "c", "c.d", "k.l.e", "k.l.e.f", "g", "g.h", "i", "i.j"}
