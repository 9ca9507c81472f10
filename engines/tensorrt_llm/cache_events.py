"""Follows TensorRT-LLM's KV cache events: its JSON in, the contract's events out. Keeps the blocks that are cached. Pure.

The JSON is that of KVCacheEventSerializer (_utils.py, file 52995752). TensorRT-LLM tells neither a snapshot nor a boot id,
so this module keeps what was told. INVARIANTS, checked by `assert_consistent`:
- the parent of a known block is known;
- no more blocks are known than the cache has, host memory included.

Left out are partial blocks with all that follows them, blocks with tokens that ids do not name (images), and windows of
attention other than the largest. A block that moves to host memory is still reusable, so it stays. TensorRT-LLM does not
tell the adapter (LoRA) of a block, so blocks of adapters look like those of the model.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final

from engines.contract.kv_events import BlocksRemoved, BlocksStored, KvCacheEvent

REMOVED_MAX: Final = 512
"""Blocks in one event that drops all that is known."""


@dataclass(slots=True)
class _Block:
    parent: int | None
    tokens: bytes
    children: set[int] = field(default_factory=set)


@dataclass(slots=True)
class CacheEvents:
    """The cached blocks that TensorRT-LLM told. `blocks_max`: blocks of the cache, until TensorRT-LLM tells more."""

    tokens_per_block: int
    blocks_max: int
    gaps: int = 0
    """How often events were lost, or more blocks were told than exist. All that was known is then dropped."""
    unreadable: int = 0
    """Events of another form than the one that was read."""
    _blocks: dict[int, _Block] = field(default_factory=dict)  # parents before children
    _last_id: int | None = None
    _window: int = 0  # largest window of attention told so far; 0: none

    @property
    def cached(self) -> int:
        """Number of known blocks."""
        return len(self._blocks)

    def apply(self, events: Iterable[Mapping[str, Any]]) -> list[KvCacheEvent]:
        """Return the contract's events for TensorRT-LLM's events, in their order.

        An event of another form than the one that was read drops all known blocks, as lost events do.
        """
        found: list[KvCacheEvent] = []
        for event in events:
            try:
                found += self._apply(event)
            except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
                self.unreadable += 1
                found += self._drop_all()
        return found

    def snapshot(self) -> list[BlocksStored]:
        """Return all known blocks, parents before children."""
        events: list[BlocksStored] = []
        run: list[tuple[int, bytes]] = []
        parent: int | None = None
        for value, block in self._blocks.items():
            if run and block.parent != run[-1][0]:
                events.append(BlocksStored(parent, tuple(run)))
                run = []
            if not run:
                parent = block.parent
            run.append((value, block.tokens))
        if run:
            events.append(BlocksStored(parent, tuple(run)))
        return events

    def assert_consistent(self) -> None:
        """Raise AssertionError if an invariant of this class does not hold. O(blocks)."""
        seen: set[int] = set()
        for value, block in self._blocks.items():
            assert block.parent is None or block.parent in seen, f"block {value} before its parent"
            assert block.parent is None or value in self._blocks[block.parent].children, "a child is missing"
            assert block.children <= self._blocks.keys(), f"block {value} has an unknown child"
            assert len(block.tokens) == 4 * self.tokens_per_block, f"block {value} is partial"
            seen.add(value)
        assert len(self._blocks) <= self.blocks_max, f"{len(self._blocks)} of {self.blocks_max} blocks"

    def _apply(self, event: Mapping[str, Any]) -> list[KvCacheEvent]:
        dropped: list[KvCacheEvent] = []
        number = int(event["event_id"])
        if self._last_id is not None and number != self._last_id + 1:
            dropped = self._drop_all()
        self._last_id = number
        data, window = event["data"], int(event.get("window_size") or 0)
        if window > self._window:
            dropped += self._drop_all() if self._window and self._blocks else []
            self._window = window
        if window and window < self._window:
            return dropped
        kind = data["type"]
        if kind == "created":
            self.blocks_max = max(self.blocks_max, sum(data["num_blocks_per_cache_level"]))
        elif kind == "stored":
            dropped += self._stored(data)
        elif kind == "removed":
            dropped += self._removed(data["block_hashes"])
        return dropped  # "updated": another cache level or priority

    def _stored(self, data: Mapping[str, Any]) -> list[KvCacheEvent]:
        first = parent = data["parent_hash"] or None  # 0 stands for the root in the hash of a block
        if parent is not None and parent not in self._blocks:
            return []
        fresh: list[tuple[int, bytes]] = []
        found: list[KvCacheEvent] = []
        for block in data["blocks"]:
            tokens = _tokens(block, self.tokens_per_block)
            if tokens is None:
                break
            value = int(block["block_hash"])
            if value in self._blocks:
                if fresh:
                    found.append(BlocksStored(first, tuple(fresh)))
                    fresh = []
                first = parent = value
                continue
            self._blocks[value] = _Block(parent, tokens)
            if parent is not None:
                self._blocks[parent].children.add(value)
            fresh.append((value, tokens))
            parent = value
        if fresh:
            found.append(BlocksStored(first, tuple(fresh)))
        if len(self._blocks) > self.blocks_max:
            # Events were lost: what is known cannot all be cached. Blocks stored by this event were not told yet.
            told = {each for one in found if isinstance(one, BlocksStored) for each, _ in one.blocks}
            return self._drop_all(but=told)
        return found

    def _removed(self, hashes: Iterable[int]) -> list[KvCacheEvent]:
        gone: list[int] = []
        for value in hashes:
            self._forget(int(value), gone)
        return [BlocksRemoved(tuple(gone))] if gone else []

    def _forget(self, value: int, gone: list[int]) -> None:
        """Forget a block with its descendants, which nothing can reach any more. Children come first in `gone`."""
        waiting = [value]
        order: list[int] = []
        while waiting:
            each = waiting.pop()
            block = self._blocks.pop(each, None)
            if block is None:
                continue
            if block.parent is not None and block.parent in self._blocks:
                self._blocks[block.parent].children.discard(each)
            order.append(each)
            waiting += block.children
        gone += reversed(order)

    def _drop_all(self, but: Set[int] = frozenset()) -> list[KvCacheEvent]:
        """Forget all blocks. `but`: blocks that no subscriber knows."""
        self.gaps += 1
        hashes = [value for value in reversed(self._blocks) if value not in but]
        self._blocks.clear()
        return [
            BlocksRemoved(tuple(hashes[start : start + REMOVED_MAX]))
            for start in range(0, len(hashes), REMOVED_MAX)
        ]


def _tokens(block: Mapping[str, Any], width: int) -> bytes | None:
    """Return the tokens of a full block as int32, little-endian as the machine; None if token ids cannot name the block."""
    tokens = block["tokens"]
    ids = [each["token_id"] for each in tokens if not each["token_extra_id"]]
    return array("i", ids).tobytes() if len(ids) == len(tokens) == width else None
