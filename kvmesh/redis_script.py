"""A Lua script as Redis knows it: by its digest.

Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Call: TypeAlias = tuple[Sequence[str], Sequence[str | bytes | int | float]]
"""KEYS and ARGV."""


@dataclass(frozen=True, slots=True)
class Script:
    """A text that Redis runs as one atomic step."""

    text: str
    digest: str = field(init=False)
    """What EVALSHA calls it."""

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "digest", digest)
