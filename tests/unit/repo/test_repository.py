"""What the documents and the lock promise about this repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from kvmesh import __version__
from kvmesh.config import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
VAGUE = {"utils", "util", "helpers", "common", "misc"}


def test_lock_pins_everything_and_names_no_place() -> None:
    """A lock with a path or an index would work on one machine only."""
    lines = [
        line
        for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.+!-]+", line) for line in lines)
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted(set(names))


def test_lock_and_project_agree() -> None:
    """Every version pyproject.toml asks for is the locked one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lock = set((ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines())
    extras = project["optional-dependencies"].values()
    asked = [need for needs in (project["dependencies"], *extras) for need in needs if "kvmesh[" not in need]
    assert [need for need in asked if re.sub(r"\[.*?\]", "", need) not in lock] == []
    assert project["version"] == __version__


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_the_documents_lead_somewhere(page: Path) -> None:
    """A reader who follows a link finds a file."""
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_make_explains_every_target_the_readme_names() -> None:
    """What the README says to type exists and is in `make help`."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z-]*[a-z])\b", (ROOT / "README.md").read_text(encoding="utf-8")))
    explained = set(re.findall(r"(?m)^([a-z-]+):.*## ", makefile))
    assert named <= explained
    assert {"help", "setup", "demo", "test", "check", "bench", "proto", "exactness"} <= explained


def test_modules_are_named_for_what_they_hold() -> None:
    """A module called utils ends up holding everything."""
    folders = ("kvmesh", "services", "simulator", "controlplane", "engines", "bench", "tools", "tests")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert modules
    assert [str(path.relative_to(ROOT)) for path in modules if path.stem in VAGUE] == []
