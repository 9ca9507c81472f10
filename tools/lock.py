"""Write requirements.lock: what this environment has of everything kvmesh needs.

Walks the requirements of `kvmesh[dev]` through the installed packages and
writes `name==version`, sorted. Run it in an environment that passes `pip check`.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = Path(__file__).resolve().parent.parent / "requirements.lock"
BUILD = "setuptools"


def closure(root: Requirement) -> dict[str, str]:
    """Return the version of every installed package that `root` needs, itself left out."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [root, Requirement(BUILD)]
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        if (name, frozenset(need.extras)) in seen:
            continue
        seen.add((name, frozenset(need.extras)))
        found = metadata.distribution(need.name)
        versions[name] = found.version
        for text in found.requires or ():
            child = Requirement(text)
            environments = [{"extra": extra} for extra in (*need.extras, "")]
            if child.marker is None or any(child.marker.evaluate(each) for each in environments):
                waiting.append(child)
    del versions[canonicalize_name(root.name)]
    return versions


def main() -> int:
    versions = closure(Requirement("kvmesh[dev]"))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    header = f"# Everything kvmesh[dev] needs, on Python {python}. Written by `make lock`.\n"
    pins = "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
    LOCK.write_text(header + pins, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
