"""Refuses names that were not recorded, and keeps them for the test."""

from __future__ import annotations

from pathlib import Path

violations: list[str] = []
"""Names that were asked for and not recorded."""

_file: list[Path] = []


def record_to(path: Path) -> None:
    """Write violations to `path`, too: the test runs in another process."""
    _file[:] = [path]


def refuse(owner: str, name: str) -> None:
    """Record a name that is not part of the surface, and raise AssertionError."""
    text = f"{owner}.{name} is not recorded"
    violations.append(text)
    for path in _file:
        with path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    raise AssertionError(text)


class Recorded:
    """The base of each object of the surface."""

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(type(self).__name__, name)
        raise AssertionError
