"""Subscriptions of an engine as its tests read them: load reports by their values, KV events as a set of blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from tests.integration.engine.servers import Client
from tests.patience import patience


async def wait_for_load(client: Client, timeout_s: float = 3.0, **wanted: int) -> dict[str, Any]:
    """Return the first load report with these values."""
    async with patience(timeout_s), aclosing(client.subscribe("load_report")) as reports:
        async for report in reports:
            if all(report[name] == value for name, value in wanted.items()):
                return report
    raise AssertionError("subscription ended")


async def read_snapshot(
    messages: AsyncIterator[dict[str, Any]], cached: set[int], block_tokens: int
) -> dict[str, Any]:
    """Apply all parts of a snapshot to `cached`, hashes of blocks of `block_tokens` tokens; return the last part."""
    while True:
        part: dict[str, Any] = await anext(messages)
        apply(part["snapshot"], cached, block_tokens)
        if not part["more"]:
            return part


def apply(events: list[dict[str, Any]], cached: set[int], block_tokens: int) -> None:
    """Apply events to `cached`. Raises AssertionError for a block without its parent, a partial or an unknown one."""
    for data in events:
        if data["type"] == "stored":
            assert data["parent_hash"] is None or data["parent_hash"] in cached
            for block in data["blocks"]:
                assert len(block["tokens"]) == block_tokens
                cached.add(block["block_hash"])
        else:
            assert set(data["block_hashes"]) <= cached
            cached -= set(data["block_hashes"])
