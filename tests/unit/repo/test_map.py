"""docs/map.md shows the tree as it is, and says what the client imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvmesh.config import ROOT
from tests.samples import samples

TREE, ROUTER = (sample.text for sample in samples("text") if sample.page == "docs/map.md")
MAPPED = ("services", "kvmesh", "simulator", "controlplane", "engines", "bench")


def braces(path: str) -> list[str]:
    """Return the paths that `a/{b,c}/d` stands for."""
    head, opened, rest = path.partition("{")
    names, _, tail = rest.partition("}")
    return [f"{head}{name}{tail}" for name in names.split(",")] if opened else [path]


def named_in_the_map() -> list[Path]:
    """Return every file and folder that a line of the tree begins with."""
    found = []
    for line in TREE.splitlines():
        is_module = line.startswith("  ")
        for word in line.split() if not line.startswith("   ") else ():
            if not re.fullmatch(r"\w+\.py" if is_module else r"[\w{},/]+/", word):
                break
            found += [ROOT / "kvmesh" / word] if is_module else [ROOT / path for path in braces(word)]
    return found


def test_the_map_shows_the_tree_as_it_is() -> None:
    """Each name in it exists, and every package and shared module is named."""
    named = named_in_the_map()
    assert [str(path) for path in named if not path.exists()] == []
    packages = {
        path.parent
        for top in MAPPED
        for path in (ROOT / top).rglob("__init__.py")
        if path.parent not in ((ROOT / "services"), (ROOT / "engines"))
    }
    modules = {path for path in (ROOT / "kvmesh").glob("*.py") if path.stem != "__init__"}
    shown = {path.resolve() for path in named}
    missing = {path for path in packages | modules if path not in shown}
    assert sorted(str(path.relative_to(ROOT)) for path in missing) == []


def test_the_way_through_the_router_names_its_modules() -> None:
    """Each `package/module` of the drawing is a module of the router."""
    modules = re.findall(r"\b([a-z]+/[a-z_]+)\b", ROUTER)
    assert len(modules) >= 12
    router = ROOT / "services" / "router"
    assert [name for name in modules if not (router / f"{name}.py").exists()] == []


def test_the_client_imports_what_the_map_says() -> None:
    """It could be installed without the rest of the mesh."""
    code = "import sys, kvmesh.client; print(*(name for name in sys.modules if name.startswith('kvmesh')))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    others = {name for name in done.stdout.split() if not name.startswith("kvmesh.client")}
    stubs = {"kvmesh.inference", "kvmesh.inference.v1", "kvmesh.inference.v1.inference_pb2"}
    assert others == {"kvmesh", "kvmesh.errors", "kvmesh.error_details", *stubs}
