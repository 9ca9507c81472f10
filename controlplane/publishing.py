"""Publishes the snapshots of one leader: forward with a certain lease and Redis alone, back at any time. Pure.

INVARIANT: a content that moves traffic forward is published only with a certain lease, while Redis answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from controlplane.actions import Action, AppendEvent, Send, WriteBoard
from controlplane.facts import frontend_facts
from controlplane.library import Library
from controlplane.rollouts.document import RolloutDocument
from controlplane.snapshots.publication import (
    is_all_to_stable,
    only_regions,
    reduced,
    wanted,
    without_rollout,
    without_shadows,
)
from controlplane.snapshots.publisher import Publisher
from controlplane.snapshots.receivers import Receivers
from kvmesh.snapshot.content import Content, RolloutState, SnapshotError
from kvmesh.snapshot.published import NO_NAME, Published, Term
from kvmesh.snapshot.regions import RegionEntry

LOST_PROMOTION_S: Final = 60.0
"""Time from the publication of a promotion without a document to its end. A process that knows of an undo and was cut off
is heard meanwhile, and refuses it.
"""

PROMOTED: Final = "its document is lost, and every frontend applied its promotion, so it is over"


@dataclass(frozen=True, slots=True)
class Cause:
    """The reason for the next snapshot, and its author. Empty author: the control plane itself."""

    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class Authority:
    """The facts that allow a leader to publish a content."""

    may_go_forward: bool
    """The lease is certain, the takeover is over, and Redis answers."""
    knows_documents: bool
    """The takeover is over: the documents are in force."""
    knows_running: bool
    """The running rollout is known, from Redis or from a term before."""


class Publishing:
    """See the module. `emit` takes the actions."""

    def __init__(
        self,
        publisher: Publisher,
        library: Library,
        receivers: Receivers,
        versions: Mapping[str, str],
        emit: Callable[[Action], None],
    ) -> None:
        self.cause = Cause()
        self._publisher = publisher
        self._library = library
        self._receivers = receivers
        self._versions = versions
        self._emit = emit
        self._published_s = float("-inf")
        """Time of the last publication."""
        self._refused = ""
        """Fault of the last content that could not be published."""

    def publish(
        self,
        term: Term,
        ended: Mapping[str, str],
        authority: Authority,
        now_s: float,
        wall_s: float,
        regions: tuple[RegionEntry, ...] = (),
    ) -> None:
        """Publish the wanted content if it differs from the one in force, and may be published now.

        The first snapshot of a term is published even if it differs in nothing: it fences the last leader. `ended`:
        rollouts that were taken back, each with a stable pool since then, or nothing. `regions`: all regions as they are.
        """
        publisher, document = self._publisher, self._library.current
        before = publisher.content
        content = wanted(before, self._library.desired, document, self._versions, ended, regions)
        if publisher.is_in_force(content):
            publisher.carry(document)
            is_over = authority.may_go_forward and self._is_lost_promotion(content, document)
            if not is_over or not self._is_applied(now_s):
                return
            content, self.cause = without_rollout(content, self._versions), Cause(PROMOTED)
            self._emit(AppendEvent("rollout.lost", before.rollout, PROMOTED))
        if not authority.may_go_forward and not self._may_go_back(before, content, document, authority):
            return
        snapshot = self._published(term, content, wall_s)
        if snapshot is None:
            return
        publisher.carry(document)
        self._published_s = now_s
        self._emit(WriteBoard(snapshot))
        for each in self._receivers:
            if each.is_connected:
                self._emit(Send(each.process_id, each.boot_id, snapshot))
        self._emit(AppendEvent("snapshot.published", str(snapshot.name), self.cause.reason))

    def _is_lost_promotion(self, content: Content, document: RolloutDocument | None) -> bool:
        """True if `content` names a promotion whose document is lost. Only receivers may know that it was undone."""
        is_known = document is not None and document.id == content.rollout
        return content.rollout_state is RolloutState.PROMOTING and not is_known

    def _is_applied(self, now_s: float) -> bool:
        """True if the latest snapshot is LOST_PROMOTION_S old, and each frontend with a lease, one at least, applied it."""
        if now_s - self._published_s < LOST_PROMOTION_S:
            return False
        published = self._publisher.published
        found = frontend_facts(self._receivers, published.name if published is not None else NO_NAME, now_s)
        return bool(found) and all(each.applies for each in found)

    def _may_go_back(
        self, before: Content, content: Content, document: RolloutDocument | None, authority: Authority
    ) -> bool:
        """True if `content` only takes traffic back, or changes only regions, by documents that are known."""
        is_taken_back = document is not None and document.is_taken_back
        is_quick = is_taken_back or without_shadows(before, content)
        is_known = authority.knows_documents or (is_quick and authority.knows_running)
        if only_regions(before, content):
            return authority.knows_documents and self._publisher.latest is not None
        return is_known and self._publisher.latest is not None and is_all_to_stable(before, content)

    def _published(self, term: Term, content: Content, wall_s: float) -> Published | None:
        """Publish `content`, or the part of it that takes traffic if it is too large. None: neither is possible."""
        for each in (content, reduced(content)):
            try:
                return self._publisher.publish(term, each, wall_s, self.cause.reason, self.cause.by)
            except SnapshotError as error:
                if str(error) != self._refused:
                    self._refused = str(error)
                    self._emit(AppendEvent("snapshot.refused", str(term), str(error)))
        return None
