"""Decides which snapshot a receiver applies (fencing). Pure.

Snapshots arrive from several places and in any order: from a leader, from Redis, from the state folder. A receiver takes
only a higher name than it has. It remembers rollouts that were taken back, and never applies a weight of them again. So a
lost write of Redis, or a leader with an old document, cannot raise a condemned canary, and cannot promote it. COMPLETED is
applied all the same: the old pool may be gone by then, and no leader takes a completed rollout back.

A receiver that refuses a snapshot keeps the one before. There are two exceptions, in which all weight goes to a stable
pool. The refused snapshot may end the rollout in force: then the stable pool in force gets all. There may be no snapshot
before: then the stable pool of the refused one gets all, if the process can serve that. It gets nothing if it is the pool
of an ended rollout.

INVARIANT: the name in force never goes back. INVARIANT: no content in force has a canary or baseline of an ended rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kvmesh.snapshot.content import ENDED_MAX, Content, RolloutState, Track
from kvmesh.snapshot.published import NO_TERM, Name, Published, Term


@dataclass(frozen=True, slots=True)
class Applied:
    """ACK: the snapshot is in force."""

    name: Name


@dataclass(frozen=True, slots=True)
class Rejected:
    """NACK: the snapshot before stays in force."""

    name: Name
    reason: str


def _accept(_: Content) -> str:
    return ""


class Fence:
    """The snapshot in force at one receiver.

    `refusal(content)` returns why this process cannot serve `content`, or an empty text.
    """

    def __init__(self, refusal: Callable[[Content], str] = _accept) -> None:
        self.current: Published | None = None
        """The snapshot that was applied whole. None: none has been."""
        self.in_force: Published | None = None
        """`current`, or a snapshot with all weight on its stable pool (see the module); its data are not changed."""
        self.highest_term: Term = NO_TERM
        """The highest term that this process has seen."""
        self.rejected: Rejected | None = None
        """The last refusal, until a snapshot is applied."""
        self._refusal = refusal
        self._ended: dict[str, None] = {}

    def __repr__(self) -> str:
        return f"Fence({self.current!r}, highest term {self.highest_term})"

    @property
    def ended_rollouts(self) -> tuple[str, ...]:
        """Rollouts that were taken back, the latest last."""
        return tuple(self._ended)

    @property
    def is_reduced(self) -> bool:
        """True while the content in force is not that of the applied snapshot: all weight is on a stable pool."""
        return self.in_force is not self.current

    def offer(self, snapshot: Published) -> Applied | Rejected | None:
        """Apply `snapshot`, or refuse it. None: it is not newer than the one in force, and is ignored.

        A snapshot of the name in force is acknowledged again, because the acknowledgement may have been lost.
        """
        self.highest_term = max(self.highest_term, snapshot.name.term)
        current, in_force = self.current, self.in_force
        if current is not None and snapshot.name.order <= current.name.order:
            return Applied(current.name) if snapshot.name == current.name else None
        if current is None and in_force is not None and snapshot.name.order < in_force.name.order:
            return None
        reason = self._undone(snapshot.content) or self._condemned(snapshot.content)
        reason = reason or self._refusal(snapshot.content)
        if not reason:
            self.current = self.in_force = snapshot
            self.rejected = None
        elif current is None:
            self._reduce(snapshot)
        self.remember(snapshot.content.ended_rollouts)
        if reason:
            self.rejected = Rejected(snapshot.name, reason)
            return self.rejected
        return Applied(snapshot.name)

    def remember(self, rollouts: Iterable[str]) -> None:
        """Never apply a weight of `rollouts` again. One that is in force loses its weights."""
        for rollout in rollouts:
            self._ended.pop(rollout, None)
            self._ended[rollout] = None
        while len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        in_force = self.in_force
        if in_force is not None and self._condemned(in_force.content):
            self.in_force = replace(in_force, content=in_force.content.all_to_stable())

    def _reduce(self, snapshot: Published) -> None:
        """Put all weight on the stable pool of a refused `snapshot`, if the process can serve that. Idempotent."""
        if self.in_force is not None and self.in_force.name == snapshot.name:
            return
        content = snapshot.content.all_to_stable()
        if not self._undone(content) and not self._refusal(content):
            self.in_force = replace(snapshot, content=content)

    def _undone(self, content: Content) -> str:
        """Return why `content` may not promote its rollout. Empty: it may, or does not."""
        if content.rollout_state is not RolloutState.PROMOTING:
            return ""
        if content.rollout not in self._ended and content.rollout not in content.ended_rollouts:
            return ""
        return f'rollout "{content.rollout}" was taken back; it must not be promoted'

    def _condemned(self, content: Content) -> str:
        if content.rollout not in self._ended:
            return ""
        if not content.canary_percent and content.of_track(Track.BASELINE) is None:
            return ""
        return f'rollout "{content.rollout}" was taken back; its canary and baseline must have no weight'
