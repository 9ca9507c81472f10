"""Writes requirements.lock and the locks of the images from the packages of this environment.

`requirements.lock` holds all packages that `kvmesh[dev]` needs. The images have two locks in `deploy/images`:
`service.lock` for a service and the command line at run time, and `engine.lock` for the further packages of the reference
engine. Each lock is a closure over the requirements of the installed packages, `name==version`, sorted. Run this module
in an environment that passes `pip check`.
"""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
IMAGES = ROOT / "deploy" / "images"
BUILD = "setuptools"

UNUSED = {
    "huggingface-hub": "tokenizers downloads by name with it; the mesh reads a folder",
}
"""Requirements that no image contains, with the reason."""

OLDEST_PYTHON = "3.11.0"
"""Images run the Python of their base, for example Debian's 3.11.2. Requirements are resolved for the oldest 3.11."""

BACKPORTS = {"async-timeout": "5.0.1"}
"""Packages and versions that only a Python older than this one needs."""

ENGINE = "nvidia-pytriton"
"""The reference engine uses only the tritonserver of this wheel, so the wheel's Python requirements are left out."""


def closure(
    *roots: Requirement, unused: frozenset[str] = frozenset(), python: str = platform.python_version()
) -> dict[str, str]:
    """Return the version of every package that `roots` need on `python`, kvmesh itself and `unused` left out."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(roots)
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        if name in unused or (name, frozenset(need.extras)) in seen:
            continue
        seen.add((name, frozenset(need.extras)))
        if python == OLDEST_PYTHON and name in BACKPORTS:
            versions[name] = BACKPORTS[name]
            continue
        found = metadata.distribution(need.name)
        versions[name] = found.version
        for text in found.requires or ():
            child = Requirement(text)
            environments = [{"extra": extra, "python_full_version": python} for extra in (*need.extras, "")]
            if child.marker is None or any(child.marker.evaluate(each) for each in environments):
                waiting.append(child)
    versions.pop("kvmesh", None)
    return versions


def locks() -> dict[Path, str]:
    """Return every lock's path and text."""
    everything = closure(Requirement("kvmesh[dev]"), Requirement(BUILD))
    service = closure(Requirement("kvmesh"), unused=frozenset(UNUSED), python=OLDEST_PYTHON)
    engine = {ENGINE: metadata.version(ENGINE)}
    left_out = ", ".join(sorted(UNUSED))
    return {
        LOCK: _text("Everything kvmesh[dev] needs", everything),
        IMAGES / "service.lock": _text(
            f"Packages that kvmesh needs at run time, without {left_out}", service
        ),
        IMAGES / "engine.lock": _text("Further packages of the reference engine", engine),
    }


def _text(about: str, versions: dict[str, str]) -> str:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    header = f"# {about}, on Python {python}. Written by `make lock`.\n"
    return header + "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def main() -> int:
    for path, text in locks().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
