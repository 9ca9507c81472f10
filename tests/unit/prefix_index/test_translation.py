"""An engine's events become the mesh's hashes, whatever the engine's own hashes are."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from kvmesh import blocks
from kvmesh.prefix_index.events import Op
from kvmesh.prefix_index.translation import EngineEventError, Translation
from kvmesh.triton.service_messages import decoder

BLOCK = 4
SALT = "model-1"


class FakeEngine:
    """A prefix cache with hashes of its own, leaf-first eviction and numbered events."""

    def __init__(self, rng: random.Random, boot_id: str = "boot-1") -> None:
        self.rng = rng
        self.boot_id = boot_id
        self.event_id = 0
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def tokens_of(self, value: int) -> tuple[int, ...]:
        parent, tokens = self.blocks[value]
        return (self.tokens_of(parent) if parent is not None else ()) + tokens

    def mesh_hashes(self) -> set[int]:
        return {
            blocks.chain(b"".join(t.to_bytes(4, "little") for t in self.tokens_of(value)), BLOCK, SALT)[-1]
            for value in self.blocks
        }

    def step(self) -> dict[str, Any]:
        events = []
        for _ in range(self.rng.randint(1, 4)):
            self.event_id += 1
            events.append({"event_id": self.event_id, "data": self._change()})
        return {"boot_id": self.boot_id, "events": events}

    def snapshot(self) -> dict[str, Any]:
        data = [self._stored(parent, [(value, tokens)]) for value, (parent, tokens) in self.blocks.items()]
        return {"boot_id": self.boot_id, "event_id": self.event_id, "snapshot": data}

    def _change(self) -> dict[str, Any]:
        if self.blocks and self.rng.random() < 0.4:
            parents = {parent for parent, _ in self.blocks.values()}
            leaf = self.rng.choice([value for value in self.blocks if value not in parents])
            del self.blocks[leaf]
            return {"type": "removed", "block_hashes": [leaf]}
        parent = self.rng.choice([None, *self.blocks])
        stored = []
        first = parent
        for _ in range(self.rng.randint(1, 3)):
            value = self.rng.getrandbits(64)
            tokens = tuple(self.rng.randrange(3) for _ in range(BLOCK))
            if any(known == (parent, tokens) for known in self.blocks.values()):
                break
            self.blocks[value] = (parent, tokens)
            stored.append((value, tokens))
            parent = value
        return self._stored(first, stored)

    def _stored(self, parent: int | None, stored: list[tuple[int, tuple[int, ...]]]) -> dict[str, Any]:
        as_objects = self.rng.random() < 0.5
        return {
            "type": "stored",
            "parent_hash": parent,
            "blocks": [
                {
                    "block_hash": value,
                    "tokens": [{"token_id": t} for t in tokens] if as_objects else list(tokens),
                }
                for value, tokens in stored
            ],
        }


def content(translation: Translation) -> set[int]:
    with translation.snapshot() as parts:
        return {value for part in parts for value in blocks.unpack(part)}


def test_the_changes_lead_to_the_engines_content() -> None:
    """Applying the changes to a plain set gives the chained hashes of the engine's content, after every message."""
    for seed in range(60):
        engine = FakeEngine(random.Random(seed))
        for _ in range(5):
            engine.step()
        translation, told = Translation(BLOCK, SALT), set[int]()
        assert translation.apply(engine.snapshot()) is None
        told = content(translation)
        for _ in range(40):
            last = translation.seq
            changes = translation.apply(engine.step())
            assert changes is not None
            for op, hashes, seq in changes:
                assert last < seq <= engine.event_id, f"{seed=}"
                last = seq
                told = told | set(hashes) if op is Op.STORED else told - set(hashes)
            assert told == engine.mesh_hashes() == content(translation), f"{seed=}"
            assert translation.seq == engine.event_id


def test_decoded_messages_mean_the_same_as_their_json() -> None:
    """A message of a subscription, whose tokens are records, gives the changes of the plain JSON object."""
    decode = decoder("kv_events")
    for seed in range(20):
        engine, plain, decoded = (
            FakeEngine(random.Random(seed)),
            *(Translation(BLOCK, SALT) for _ in range(2)),
        )
        for message in (engine.snapshot(), *(engine.step() for _ in range(20))):
            payload = msgspec.json.encode(message)
            assert plain.apply(message) == decoded.apply(decode(payload)), f"{seed=}"
        assert content(plain) == content(decoded) == engine.mesh_hashes(), f"{seed=}"


def test_other_kinds_of_events_are_decoded_too() -> None:
    """Events of TensorRT-LLM that change no content, and further members, break no subscription."""
    created = {"type": "created", "num_blocks_per_cache_level": [5, 0]}
    updated = {"type": "updated", "block_hash": 3, "priority": {"old_value": 35, "new_value": 3}}
    events = [
        {"event_id": at, "data": data, "window_size": 9} for at, data in enumerate((created, updated), 1)
    ]
    decoded = decoder("kv_events")(msgspec.json.encode({"boot_id": "b", "events": events}))
    translation = Translation(BLOCK, SALT)
    translation.apply({"boot_id": "b", "event_id": 0, "snapshot": []})
    assert translation.apply(decoded) == []
    assert translation.seq == 2


def test_a_missing_or_foreign_message_asks_for_a_new_subscription() -> None:
    """A gap in ids, another boot, an unknown parent and nonsense raise. Only a snapshot ends this state."""
    for seed in range(20):
        engine = FakeEngine(random.Random(seed))
        translation = Translation(BLOCK, SALT)
        with pytest.raises(EngineEventError):
            translation.apply(engine.step())
        translation.apply(engine.snapshot())
        engine.step()
        with pytest.raises(EngineEventError):
            translation.apply(engine.step())
        assert translation.epoch == ""
        with pytest.raises(EngineEventError):
            translation.apply(engine.step())
        translation.apply(engine.snapshot())
        for nonsense in ({}, {"events": 5, "boot_id": "boot-1"}, {"boot_id": "boot-1", "events": [{}]}):
            with pytest.raises(EngineEventError):
                translation.apply(nonsense)
            translation.apply(engine.snapshot())
        other = FakeEngine(random.Random(seed), "boot-2")
        with pytest.raises(EngineEventError):
            translation.apply(other.step())


def test_a_partial_block_is_not_published() -> None:
    """Frontends hash full blocks only."""
    translation = Translation(BLOCK, SALT)
    translation.apply({"boot_id": "b", "event_id": 0, "snapshot": []})
    data = {"type": "stored", "parent_hash": None, "blocks": [{"block_hash": 1, "tokens": [1, 2]}]}
    assert translation.apply({"boot_id": "b", "events": [{"event_id": 1, "data": data}]}) == []
    assert translation.block_count == 0
    assert translation.seq == 1


def test_a_snapshot_in_parts_is_known_with_its_last_part() -> None:
    """Cut anywhere, the parts add up to the whole. A missing part, or one of another snapshot, ends the subscription."""
    for seed in range(50):
        rng = random.Random(seed)
        engine = FakeEngine(rng)
        for _ in range(10):
            engine.step()
        whole = engine.snapshot()
        parts: list[dict[str, Any]] = []
        data = whole["snapshot"]
        while data or not parts:
            size = rng.randint(1, 5)
            taken, data = data[:size], data[size:]
            parts.append({**whole, "snapshot": taken, "part": len(parts), "more": bool(data)})
        translation = Translation(BLOCK, SALT)
        if rng.random() < 0.5:
            translation.apply(whole)
        if len(parts) > 1 and rng.random() < 0.5:
            translation.apply(parts[0])  # a subscription that broke in the middle
        for part in parts:
            assert translation.apply(part) is None
            assert bool(translation.epoch) == (not part["more"]), f"seed={seed}"
        assert content(translation) == engine.mesh_hashes(), f"seed={seed}"
        assert translation.apply(engine.step()) is not None
        if len(parts) > 2:
            translation.apply(parts[0])
            for wrong in (parts[2], {**parts[1], "event_id": whole["event_id"] + 1}, engine.step()):
                with pytest.raises(EngineEventError):
                    translation.apply(wrong)
                translation.apply(parts[0])
