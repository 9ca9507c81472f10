"""Lua scripts of Redis: the text, from a file beside the module that uses it, and the digest for EVALSHA."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

Call: TypeAlias = tuple[Sequence[str], Sequence[str | bytes | int | float]]
"""KEYS and ARGV."""


@dataclass(frozen=True, slots=True)
class Script:
    """A script that Redis runs as one atomic step."""

    text: str
    digest: str = field(init=False)
    """SHA-1 of the text, for EVALSHA."""

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "digest", digest)

    @classmethod
    def beside(cls, module: str, name: str) -> Script:
        """Return the script in the file `name` beside the module file `module`. Raises FileNotFoundError."""
        return cls(Path(module).with_name(name).read_text(encoding="utf-8"))
