"""The lane of a replica's calls for the control plane, warm-up and probes, beside the calls of its users. Pure.

A bulkhead in both directions. No call of the lane takes a user's place, and no queue of users stops the lane. Bounds:

    calls       a quarter of the replica's concurrency, at least one, in addition to users' calls; without users all of it
    light       LIGHT_MAX calls that compute next to nothing: pulls of KV blocks, runs of cached prefixes at a source
    KV blocks   a quarter of the replica's, or those of a single call; one call at a time while users wait for blocks
    waiting     WAITING_MAX calls, in the order of their arrival
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

from kvmesh.attach.refusal import SubmitRefusal
from kvmesh.attach.v1 import attach_pb2 as pb

SlotT = TypeVar("SlotT", bound=Hashable)

SHARE: Final = 4
"""The lane has one part in this many of the replica's concurrency and of its KV blocks."""

LIGHT_MAX: Final = 8
"""Light calls at a time. Their cost is a place in a step, so they may be more than a quarter of the concurrency."""

LIGHT_S: Final = 0.02
"""Longest expected prefill of a light call."""

WAITING_MAX: Final = 64
"""Calls that wait, for their turn or for a handoff. More are refused with QUEUE_FULL."""


class ControlLane(Generic[SlotT]):
    """Slots of the control plane: those that await a handoff, wait for their turn, run, or hold blocks after their run.

    INVARIANT: `blocks` <= `blocks_max`, or one slot alone holds them.
    """

    __slots__ = (
        "_awaiting",
        "_held",
        "_light",
        "_running",
        "_waiting",
        "blocks",
        "blocks_max",
        "concurrency",
    )

    def __init__(self, concurrency: int, blocks_total: int) -> None:
        """`concurrency`: engine calls that the replica runs at once for its users. `blocks_total`: its KV blocks."""
        self.concurrency = concurrency
        self.blocks_max = blocks_total // SHARE
        self.blocks = 0
        """KV blocks that the slots of the lane hold."""
        self._held: dict[SlotT, int] = {}
        """All slots of the lane, with the blocks that each holds."""
        self._awaiting: set[SlotT] = set()
        self._waiting: dict[SlotT, int] = {}
        """Oldest first, with the blocks that each reserves at its start. 0: it holds them."""
        self._running: set[SlotT] = set()
        self._light: set[SlotT] = set()
        """Slots that are light, in any state."""

    def __len__(self) -> int:
        """Return the number of slots in any state."""
        return len(self._held)

    def __iter__(self) -> Iterator[SlotT]:
        return iter(self._held)

    @property
    def waiting_count(self) -> int:
        """Slots that wait for their turn or for a handoff."""
        return len(self._waiting) + len(self._awaiting)

    @property
    def running_count(self) -> int:
        """Slots with an engine call."""
        return len(self._running)

    def is_full(self) -> bool:
        """True if no further slot may wait."""
        return self.waiting_count >= WAITING_MAX

    def awaits_turn(self, slot: SlotT) -> bool:
        """True if `slot` waits for its turn."""
        return slot in self._waiting

    def has_room(self, blocks: int, free: int, *, is_short: bool) -> bool:
        """True if a slot may hold `blocks` more of the KV blocks. `free`, `is_short`: see `next`."""
        if not blocks or not self.blocks:
            return blocks <= free
        return not is_short and blocks <= free and self.blocks + blocks <= self.blocks_max

    def has_turns(self) -> bool:
        """True if a slot waits for its turn."""
        return bool(self._waiting)

    def refusal(self, blocks: int, free: int, *, is_short: bool) -> SubmitRefusal | None:
        """Return the refusal of a new slot, or None.

        `blocks`: KV blocks that it reserves now. `free`, `is_short`: see `next`.
        """
        if self.is_full():
            message = f"warm-up and probes full: {self.waiting_count}/{WAITING_MAX} wait"
            return SubmitRefusal(pb.Refusal.REASON_QUEUE_FULL, message)
        if not self.has_room(blocks, free, is_short=is_short):
            held = f"{self.blocks}/{self.blocks_max} are held by warm-up and probes, {free} are free"
            return SubmitRefusal(pb.Refusal.REASON_KV_FULL, f"KV full: {blocks} blocks needed, {held}")
        return None

    def await_handoff(self, slot: SlotT, blocks: int) -> None:
        """Add a slot that holds `blocks` and waits for a handoff. Raises ValueError if the lane has no room."""
        self._hold(slot, blocks)
        self._awaiting.add(slot)

    def push(self, slot: SlotT, blocks: int = 0, *, is_light: bool = False) -> None:
        """Let `slot` wait for its turn, to reserve `blocks` then. 0: it holds its blocks already."""
        self._held.setdefault(slot, 0)
        if is_light:
            self._light.add(slot)
        self._awaiting.discard(slot)
        self._waiting[slot] = blocks

    def next(self, free: int, *, has_users: bool, is_short: bool) -> SlotT | None:
        """Return the slot to start now, or None.

        `free`: KV blocks without a reservation. `has_users`: a request of a user waits or runs. `is_short`: a request of a
        user waits for KV blocks. A slot that holds its blocks may overtake one that lacks them, and a light slot one that
        is not; otherwise the order is that of arrival.
        """
        most = max(1, self.concurrency // SHARE) if has_users else self.concurrency
        light = len(self._running & self._light)
        has_place, has_light_place = len(self._running) - light < most, light < LIGHT_MAX
        if not has_place and not has_light_place:
            return None
        may_reserve = True
        for slot, blocks in self._waiting.items():
            if not (has_light_place if slot in self._light else has_place):
                continue
            if not blocks:
                return slot
            may_reserve = may_reserve and self.has_room(blocks, free, is_short=is_short)
            if may_reserve:
                return slot
        return None

    def start(self, slot: SlotT) -> int:
        """Move a waiting slot to its engine call; return the blocks that the caller has to reserve for it."""
        blocks = self._waiting.pop(slot)
        if blocks:
            self._hold(slot, blocks)
        self._running.add(slot)
        return blocks

    def end(self, slot: SlotT) -> None:
        """Note the end of the engine call of `slot`, which keeps its blocks. Idempotent."""
        self._running.discard(slot)

    def release(self, slot: SlotT) -> None:
        """Give back the blocks of `slot`. Idempotent."""
        if slot in self._held:
            self.blocks -= self._held[slot]
            self._held[slot] = 0

    def forget(self, slot: SlotT) -> None:
        """Drop `slot`. A slot that is not in the lane is ignored."""
        self.release(slot)
        self._held.pop(slot, None)
        self._waiting.pop(slot, None)
        self._awaiting.discard(slot)
        self._running.discard(slot)
        self._light.discard(slot)

    def _hold(self, slot: SlotT, blocks: int) -> None:
        if self.blocks and self.blocks + blocks > self.blocks_max:
            raise ValueError(
                f"{blocks} blocks do not fit into the lane: {self.blocks}/{self.blocks_max} are held"
            )
        self.blocks += blocks
        self._held[slot] = self._held.get(slot, 0) + blocks

    def assert_consistent(self) -> None:
        """Raise AssertionError if a count or a bound does not hold."""
        assert self.blocks == sum(self._held.values()), self._held
        holders = [slot for slot, blocks in self._held.items() if blocks]
        assert self.blocks <= self.blocks_max or len(holders) == 1, holders
        assert self._waiting.keys() | self._awaiting | self._running <= self._held.keys(), self._held
        assert not self._waiting.keys() & (self._awaiting | self._running), self._waiting
        assert not self._awaiting & self._running, self._awaiting
        assert len(self._running - self._light) <= self.concurrency, self._running
        assert len(self._running & self._light) <= LIGHT_MAX, self._running
        assert self._light <= self._held.keys(), self._light
