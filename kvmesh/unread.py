"""Calls whose first message has not arrived: how many may be open, how many are read at once, which one gives way.

Pure. A call that is being read may hold a whole message in gRPC's memory, one that waits for its turn only what fits into
its flow-control window. Overflow behaviour: beyond `calls_max` one call is refused at once, a new one or one that waits in
vain. While calls wait for a turn, the one that is read longest is cut once it has had `LOOK_S`.
"""

from __future__ import annotations

from typing import Final

from kvmesh.errors import MeshError

LOOK_S: Final = 0.25
"""Time that every message gets to arrive in, however many calls wait: most arrive together with their headers."""

RETRY_AFTER_S: Final = 1.0


class UnreadCall:
    """One call: `opened_s` is when its headers came, `reading_s` when its message was asked for; None: not yet."""

    __slots__ = ("is_cut", "opened_s", "reading_s")

    def __init__(self, opened_s: float) -> None:
        self.opened_s = opened_s
        self.reading_s: float | None = None
        self.is_cut = False
        """True once it had to give way."""


class UnreadCalls:
    """Invariants: `reading` and `waiting` are disjoint, at most `calls_max` together; none waits while a turn is free."""

    def __init__(self, calls_max: int, readers_max: int) -> None:
        self.calls_max = calls_max
        self.readers_max = readers_max
        self.reading: dict[UnreadCall, None] = {}
        """In the order in which they were asked for."""
        self.waiting: dict[UnreadCall, None] = {}
        """In the order in which they came."""
        self.refused_total = 0
        self.cut_total = 0

    def __len__(self) -> int:
        return len(self.reading) + len(self.waiting)

    def __repr__(self) -> str:
        return f"UnreadCalls({len(self.reading)}/{self.readers_max} reading, {len(self)}/{self.calls_max})"

    def open(self, now_s: float) -> tuple[UnreadCall, UnreadCall | None]:
        """Return a new call, which is read (`reading_s` is set) or waits, and the one that gave way to it.

        That is the oldest that waits, once it has waited LOOK_S: it would hardly get a turn. Raises MeshError (CALLS_FULL).
        """
        displaced = None
        if len(self) >= self.calls_max:
            displaced = self._late(now_s)
            if displaced is None:
                self.refused_total += 1
                raise full(f"{len(self)} calls wait for their message", len(self), self.calls_max)
            del self.waiting[displaced]
            displaced.is_cut = True
            self.cut_total += 1
        call = UnreadCall(now_s)
        if len(self.reading) < self.readers_max:
            self._read(call, now_s)
        else:
            self.waiting[call] = None
        return call, displaced

    def close(self, call: UnreadCall, now_s: float) -> UnreadCall | None:
        """Forget `call`, if it is not forgotten; return the one whose turn it is now.

        That is the oldest, or the newest once the oldest has waited LOOK_S: then there are more than can be served, and
        those that came last are the likeliest to be still wanted.
        """
        if call not in self.reading:
            self.waiting.pop(call, None)
            return None
        del self.reading[call]
        if not self.waiting:
            return None
        if self._late(now_s) is not None:
            successor, _ = self.waiting.popitem()
        else:
            successor = next(iter(self.waiting))
            del self.waiting[successor]
        self._read(successor, now_s)
        return successor

    def cut(self, now_s: float) -> UnreadCall | None:
        """Return the call that must give way now: others wait, and it has had its LOOK_S. It is still to be closed."""
        for call in self.reading:
            if call.is_cut:
                continue
            if not self.waiting or now_s < _since(call) + LOOK_S:
                return None
            call.is_cut = True
            self.cut_total += 1
            return call
        return None

    def next_cut_s(self) -> float | None:
        """Return when `cut` is to be asked next; None: nothing waits."""
        if not self.waiting:
            return None
        return min((_since(call) + LOOK_S for call in self.reading if not call.is_cut), default=None)

    def _late(self, now_s: float) -> UnreadCall | None:
        """Return the oldest call that waits, if it has waited LOOK_S."""
        oldest = next(iter(self.waiting), None)
        return oldest if oldest is not None and now_s - oldest.opened_s >= LOOK_S else None

    def _read(self, call: UnreadCall, now_s: float) -> None:
        call.reading_s = now_s
        self.reading[call] = None


def full(what: str, held: int, limit: int) -> MeshError:
    """Return the refusal of a call for which there is no room before its message is read."""
    return MeshError(
        "CALLS_FULL",
        f"the process is full: {what}, {limit} may",
        {"held": str(held), "limit": str(limit)},
        retry_after_s=RETRY_AFTER_S,
    )


def _since(call: UnreadCall) -> float:
    assert call.reading_s is not None, "it is not read"
    return call.reading_s
