"""KvCacheRetentionConfig: bindings of the executor, file 557998768 of the source index."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from ..surface import Recorded


@dataclass
class _TokenRangeRetentionConfig(Recorded):
    token_start: int
    token_end: int | None
    priority: int
    duration_ms: dt.timedelta | None = None


@dataclass
class KvCacheRetentionConfig(Recorded):
    """Priorities of blocks, 0 to 100."""

    token_range_retention_configs: list[_TokenRangeRetentionConfig]
    decode_retention_priority: int = 35
    decode_duration_ms: dt.timedelta | None = None

    TokenRangeRetentionConfig = _TokenRangeRetentionConfig

    def __post_init__(self) -> None:
        for each in self.token_range_retention_configs:
            assert each.duration_ms is None or isinstance(each.duration_ms, dt.timedelta)
            if not 0 <= each.priority <= 100:
                raise ValueError("Invalid priority value. Must be between 0 and 100")  # as in the C++ class
