"""Translates an engine's cache events to the mesh's block hashes.

Pure. Engines hash blocks in their own way. The mesh needs one hash, which frontends compute too. Every stored block is
therefore hashed again from its tokens and its parent. The pair of hashes is kept until the block is removed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from kvmesh import blocks
from kvmesh.prefix_index.block_log import BlockLog
from kvmesh.prefix_index.events import Op
from kvmesh.triton.service_messages import Token

CHANGE_BLOCKS = 1024
"""Events of one kind are merged up to about this many blocks, so that no reader stalls on one batch."""


class EngineEventError(ValueError):
    """The engine's messages contradict each other, or one is missing. A new subscription starts with a snapshot."""


class Change(NamedTuple):
    """Consecutive engine events of one kind."""

    op: Op
    hashes: list[int]
    seq: int
    """Id of the last of them."""


class Translation:
    """The content of one engine's cache as mesh hashes.

    INVARIANT: `seq` is the engine's id of the last event that is in `_log`, once `epoch` is set.
    """

    def __init__(self, block_tokens: int, salt: str) -> None:
        self.epoch = ""
        """Boot id of the engine; empty before the end of the first snapshot."""
        self.seq = 0
        self._block_bytes = 4 * block_tokens
        self._root = blocks.root_hash(salt)
        self._log = BlockLog()
        self._next_part = ("", 0, 0)
        """Boot id, event id and number of the next part of a snapshot; an empty boot id: none is expected."""

    @property
    def block_count(self) -> int:
        """Blocks in the cache."""
        return len(self._log)

    def snapshot(self) -> AbstractContextManager[Iterator[bytes]]:
        """Return the mesh hashes of this moment in parts, in the order of the engine's events: see BlockLog."""
        return self._log.snapshot()

    def apply(self, message: Mapping[str, Any]) -> list[Change] | None:
        """Apply one message of the engine's event stream.

        Returns the changes in order, or None after a snapshot, which replaces everything. Raises EngineEventError; then the
        content is unknown until the next snapshot.
        """
        try:
            if "snapshot" in message:
                self._restart(message)
                return None
            return self._follow(message)
        except EngineEventError:
            self.epoch = ""
            raise
        except (KeyError, TypeError, ValueError, AttributeError, struct.error, OverflowError) as error:
            self.epoch = ""
            raise EngineEventError(f"the engine's event message cannot be read: {error!r}") from error

    def _restart(self, message: Mapping[str, Any]) -> None:
        """Apply a snapshot, or one part of it. The content is unknown until the last part."""
        boot_id, event_id = str(message["boot_id"]), int(message["event_id"])
        part = int(message.get("part", 0))
        if part == 0:
            self._log.clear()
        elif (boot_id, event_id, part) != self._next_part:
            raise EngineEventError(f"part {part} of a snapshot of boot {boot_id!r} without the one before")
        self.epoch, self._next_part = "", ("", 0, 0)
        for data in message["snapshot"]:
            self._store(data)
        if not boot_id or event_id < 0:
            raise EngineEventError(f"boot_id is {boot_id!r}, event_id {event_id}")
        if message.get("more", False):
            self._next_part = (boot_id, event_id, part + 1)
        else:
            self.epoch, self.seq = boot_id, event_id

    def _follow(self, message: Mapping[str, Any]) -> list[Change]:
        if not self.epoch or message["boot_id"] != self.epoch:
            raise EngineEventError(f"events of boot {message['boot_id']!r} without its snapshot")
        changes: list[Change] = []
        for event in message["events"]:
            event_id = int(event["event_id"])
            if event_id <= self.seq:
                continue
            if event_id != self.seq + 1:
                raise EngineEventError(f"event {event_id} follows {self.seq}")
            data = event["data"]
            kind = data["type"]
            if kind == "stored":
                op, hashes = Op.STORED, self._store(data)
            elif kind == "removed":
                op, hashes = Op.REMOVED, self._remove(data)
            else:  # "created" and "updated" of TensorRT-LLM change no content
                self.seq = event_id
                continue
            self.seq = event_id
            if hashes and changes and changes[-1].op is op and len(changes[-1].hashes) < CHANGE_BLOCKS:
                changes[-1].hashes.extend(hashes)
                changes[-1] = changes[-1]._replace(seq=event_id)
            elif hashes:
                changes.append(Change(op, hashes, event_id))
        return changes

    def _store(self, data: Mapping[str, Any]) -> list[int]:
        log, engine_parent = self._log, data["parent_hash"]
        parent = self._root if engine_parent is None else log.get(int(engine_parent))
        if parent is None:
            raise EngineEventError(f"block stored behind an unknown one, {engine_parent}")
        hashes = []
        for block in data["blocks"]:
            tokens = _pack(block["tokens"])
            if len(tokens) != self._block_bytes:
                break  # a partial block is reusable in the engine, but frontends hash full ones only
            parent = blocks.child_hash(parent, tokens)
            log.put(int(block["block_hash"]), parent)
            hashes.append(parent)
        return hashes

    def _remove(self, data: Mapping[str, Any]) -> list[int]:
        hashes = []
        for engine_hash in data["block_hashes"]:
            mesh_hash = self._log.pop(int(engine_hash))
            if mesh_hash is not None:
                hashes.append(mesh_hash)
        return hashes


def _pack(tokens: Sequence[Any]) -> bytes:
    """Return the token ids of a block as bytes. `tokens`: Token records, ints, or dicts as in the engine's JSON."""
    if tokens and isinstance(tokens[0], Token):
        tokens = [each.token_id for each in tokens]
    elif tokens and isinstance(tokens[0], Mapping):
        tokens = [each["token_id"] for each in tokens]
    return struct.pack(f"<{len(tokens)}i", *tokens)
