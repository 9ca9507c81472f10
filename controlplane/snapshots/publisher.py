"""The snapshot in force as one leader knows it, and the publication of the next one. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from controlplane.rollouts.document import Position, RolloutDocument
from controlplane.snapshots.publication import same_orders
from kvmesh.snapshot.content import Content
from kvmesh.snapshot.published import NO_NAME, Name, Published, Term, publish

HISTORY_MAX: Final = 50
"""Snapshots that are kept, the latest."""


@dataclass(frozen=True, slots=True)
class Historic:
    """One published snapshot, for the history."""

    snapshot: Published
    reason: str
    by: str


class Publisher:
    """See the module. `initial`: the content of a mesh without any snapshot."""

    def __init__(self, initial: Content) -> None:
        self.published: Published | None = None
        """The latest snapshot of this leader's term. None: it has published none."""
        self.highest: Published | None = None
        """The highest snapshot that this process has seen, from any source."""
        self.history: deque[Historic] = deque(maxlen=HISTORY_MAX)
        self._initial = initial
        self._version = 0
        self._rollout = ""
        self._position: Position = ("", 0, 0, 0, False)
        self._carrier: Name = NO_NAME
        """The first snapshot of this term with that position of that rollout."""

    @property
    def latest(self) -> Published | None:
        """The snapshot in force, as far as this process knows."""
        return self.published or self.highest

    @property
    def content(self) -> Content:
        """The content in force, as far as this process knows."""
        latest = self.latest
        return latest.content if latest is not None else self._initial

    def begin_term(self) -> None:
        """Forget what was published under the last term."""
        self.published, self._version, self._carrier = None, 0, NO_NAME

    def see(self, snapshot: Published) -> None:
        """Take a snapshot that a receiver or Redis has."""
        if self.highest is None or snapshot.name.order > self.highest.name.order:
            self.highest = snapshot

    def is_foreign(self, name: Name) -> bool:
        """True if this process did not publish the snapshot `name` in its present term."""
        published = self.published
        return published is None or name.term != published.name.term or name.version > published.name.version

    def is_in_force(self, content: Content) -> bool:
        """True if this leader has published `content`, and nothing after it."""
        return self.published is not None and same_orders(content, self.published.content)

    def publish(self, term: Term, content: Content, wall_s: float, reason: str, by: str) -> Published:
        """Return the next snapshot of `term`."""
        self._version += 1
        stamped = replace(content, published_ms=max(0, round(wall_s * 1000)))
        snapshot = publish(term, self._version, stamped)
        self.published = self.highest = snapshot
        self.history.append(Historic(snapshot, reason, by))
        return snapshot

    def carry(self, document: RolloutDocument | None) -> None:
        """Note that the latest snapshot has the state and weights of `document`."""
        if document is None or self.published is None:
            self._carrier = NO_NAME
            return
        if self._carrier == NO_NAME or (self._rollout, self._position) != (
            document.id,
            document.position,
        ):
            self._rollout, self._position = document.id, document.position
            self._carrier = self.published.name

    def carrier(self, document: RolloutDocument) -> Name:
        """Return the first snapshot with the state and weights of `document`; NO_NAME: none was published."""
        is_carried = (self._rollout, self._position) == (document.id, document.position)
        return self._carrier if is_carried else NO_NAME
