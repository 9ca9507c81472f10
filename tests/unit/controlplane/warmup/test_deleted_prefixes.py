"""Deleted prefixes are bounded in memory, and are not written again and again into a full store."""

from __future__ import annotations

from msgspec.structs import replace

from controlplane.warmup.prefixes import STORED_MAX, Prefixes, RegisteredPrefix, encode


def test_many_deleted_prefixes_cost_neither_memory_nor_writes() -> None:
    prefixes = Prefixes()
    kept = prefixes.adopt(RegisteredPrefix(name="kept", model_version="v1", token_ids=(1, 2), at_s=1.0))
    stored = {kept.name: encode(kept)}
    for number in range(3 * STORED_MAX):
        name, at_s = f"prefix-{number:04}", 2.0 + number
        added = prefixes.adopt(RegisteredPrefix(name=name, model_version="v1", token_ids=(3,), at_s=at_s))
        deleted = prefixes.adopt(replace(added, token_ids=()))
        stored[name] = encode(deleted)
        if len(stored) > STORED_MAX:  # as the store does: the first names are dropped
            del stored[min(stored)]
    assert prefixes.ordered() == [kept]
    assert len(prefixes.unwritten(stored)) <= 1, "the kept prefix alone may be absent in the store"
    prefixes.learn(stored)
    assert len(prefixes.unwritten(stored)) <= 1
    latest = f"prefix-{3 * STORED_MAX - 1:04}"
    prefixes.learn({latest: encode(RegisteredPrefix(name=latest, model_version="v1", token_ids=(3,)))})
    assert prefixes.get(latest) is None, "a late copy brings no deleted prefix back"
