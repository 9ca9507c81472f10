"""KV events as JSON, in the shape of TensorRT-LLM's KVCacheEventSerializer, numbered per boot. Pure.

{"event_id": 7, "data": {"type": "stored", "parent_hash": null | u64, "blocks": [
    {"type": "stored_block", "block_hash": u64, "cache_level": 0, "priority": 35,
     "tokens": [{"type": "unique_token", "token_id": 5, "token_extra_id": 0}, ...]}, ...]}}
{"event_id": 8, "data": {"type": "removed", "block_hashes": [u64, ...]}}
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from engines.reference.cache import CacheEvent, Stored

_PRIORITY = 35  # TensorRT-LLM's default retention priority


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    """A cache event with its consecutive number within a boot; the first one of a boot is 1."""

    event_id: int
    event: CacheEvent


def event_data(event: CacheEvent) -> dict[str, Any]:
    """The `data` member of one event."""
    if not isinstance(event, Stored):
        return {"type": "removed", "block_hashes": list(event.hashes)}
    blocks = [
        {
            "type": "stored_block",
            "block_hash": value,
            "tokens": [
                {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                for token in np.frombuffer(tokens, dtype="<i4").tolist()
            ],
            "cache_level": 0,
            "priority": _PRIORITY,
        }
        for value, tokens in event.blocks
    ]
    return {"type": "stored", "parent_hash": event.parent, "blocks": blocks}


def snapshot_message(boot_id: str, event_id: int, snapshot: Iterable[Stored]) -> bytes:
    """First message of a subscription: the cache's content after event `event_id` (0: before the first one)."""
    body = {"boot_id": boot_id, "event_id": event_id, "snapshot": [event_data(event) for event in snapshot]}
    return msgspec.json.encode(body)


def batch_message(boot_id: str, events: Iterable[NumberedEvent]) -> bytes:
    """A later message: consecutive events, the first one follows the previous message's last."""
    body = {
        "boot_id": boot_id,
        "events": [{"event_id": one.event_id, "data": event_data(one.event)} for one in events],
    }
    return msgspec.json.encode(body)
