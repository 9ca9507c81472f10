"""The shadows as one control process knows them: documents, reports of frontends, and the end of the running one. Pure.

The order in the desired document says whether a shadow runs. The document has the results alone, so its writes decide
nothing. The leader writes it at most each WRITE_S, and at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from controlplane.actions import DocumentKind, WriteDocument
from controlplane.rollouts.document import DocumentError, RolloutDocument
from controlplane.rollouts.view import ShadowFacts
from controlplane.shadow import document as documents
from controlplane.shadow.before_rollout import facts_of, is_before
from controlplane.shadow.document import KEPT_S, SHADOWS_MAX, ShadowDocument
from controlplane.shadow.order import ShadowOrder
from kvmesh.control.v1 import shadow_pb2 as pb

WRITE_S: Final = 5.0
"""Time between two writes of changed documents."""

EXPIRED: Final = "its time to live is over"
CEILING: Final = "its ceiling of tokens is reached"
ROLLED_BACK: Final = "a rollout was taken back"
UNFIT: Final = "one of its pools is stable, or is not in the snapshot"
STOPPED: Final = "it was stopped"

WENT_ON: Final = "its rollout has left PREPARING"

CEILING_REASON: Final = "ceiling"
"""Reason of a frontend that Redis refused tokens for good."""


class ShadowTracking:
    """See the module."""

    def __init__(self) -> None:
        self.end_reason = ""
        """Reason of the end that is under way. Empty: an operator stops the shadow."""
        self._documents: dict[str, ShadowDocument] = {}
        self._stored: dict[str, int] = {}
        """Revision of each document in Redis at the last read."""
        self._read: dict[str, bytes] = {}
        """Documents as they were read last. The store gives the same bytes again while nothing has changed."""
        self._changed: set[str] = set()
        """Documents with changes that were not written."""
        self._written_s = float("-inf")
        self._facts: tuple[ShadowDocument, ShadowFacts] | None = None
        """Result of the shadow of a rollout, for the document that gave it."""

    @property
    def all(self) -> list[ShadowDocument]:
        """All documents, the latest last."""
        return sorted(self._documents.values(), key=lambda each: (each.order.started_s, each.id))

    def get(self, shadow: str) -> ShadowDocument | None:
        """Return a document; for an empty name the last one."""
        return self._documents.get(shadow) if shadow else next(reversed(self.all), None)

    def learn(self, found: Mapping[str, bytes], *, is_leader: bool) -> None:
        """Take later revisions from Redis. Unreadable documents are left alone."""
        for name, data in found.items():
            if self._read.get(name) is data:
                continue
            self._read[name] = data
            try:
                document = documents.decode(name, data)
            except DocumentError:
                continue
            self._stored[name] = document.revision
            known = self._documents.get(name)
            if known is None or document.revision > known.revision - (not is_leader):
                self._documents[name] = document
        if is_leader:  # a write that Redis lost is made again
            self._changed.update(each.id for each in self.all if each.revision > self._stored.get(each.id, 0))
        self._trim()

    def follow(self, order: ShadowOrder | None, wall_s: float) -> None:
        """Keep the documents in step with the order in force: its document runs, every other one has ended."""
        if order is not None and order.id not in self._documents:
            self._documents[order.id] = ShadowDocument(order=order)
            self._changed.add(order.id)
            self.end_reason = ""
            self._trim()
        for each in self.all:
            if not each.is_over and (order is None or each.id != order.id):
                self._replace(each.ended(self.end_reason or STOPPED, wall_s))
                self._written_s = float("-inf")

    def report(self, process_id: str, report: pb.ShadowReport) -> None:
        """Take the report of a frontend. The last report of a shadow may follow its end."""
        known = self._documents.get(report.shadow)
        if known is None:
            return
        after = known.with_report(process_id, report)
        if after is not known:
            self._replace(after)

    def end_of(
        self, order: ShadowOrder, wall_s: float, running: RolloutDocument | None, *, is_fit: bool
    ) -> str:
        """Return why the shadow of `order` must end now. Empty: it goes on. `running`: the running rollout."""
        if running is not None and running.is_taken_back:
            return ROLLED_BACK
        is_of_running = running is not None and running.id == order.rollout and is_before(running)
        if order.rollout and not is_of_running:
            return WENT_ON
        if wall_s >= order.expires_s:
            return EXPIRED
        known = self._documents.get(order.id)
        if known is not None and CEILING_REASON in known.off_reasons().values():
            return CEILING
        return "" if is_fit else UNFIT

    def of_rollout(self, rollout: str) -> ShadowDocument | None:
        """Return the shadow that a rollout started."""
        return next((each for each in reversed(self.all) if each.order.rollout == rollout), None)

    def facts(self, rollout: str, *, has_other_tokens: bool) -> ShadowFacts:
        """Return the result of the shadow that `rollout` started. `has_other_tokens`: tokens and lengths may differ."""
        document = self.of_rollout(rollout)
        if document is None:
            return ShadowFacts()
        if self._facts is None or self._facts[0] is not document:
            self._facts = (document, facts_of(document, self.all, has_other_tokens=has_other_tokens))
        return self._facts[1]

    def due(self, now_s: float) -> WriteDocument | None:
        """Return the write of a document that has changed, one at a time. None: nothing is due."""
        if not self._changed or now_s < self._written_s + WRITE_S:
            return None
        self._written_s = now_s
        name = self._changed.pop()
        document = self._documents.get(name)
        if document is None:
            return None
        replaces = max(self._stored.get(name, 0), document.revision)
        document = msgspec.structs.replace(document, revision=replaces + 1)
        self._documents[name] = document
        data = documents.encode(document)
        return WriteDocument(DocumentKind.SHADOW, name, data, document.revision, replaces)

    def expire(self, wall_s: float) -> None:
        """Forget documents that ended longer than KEPT_S ago."""
        for each in self.all:
            if each.is_over and wall_s - each.ended_s > KEPT_S:
                del self._documents[each.id]
                self._changed.discard(each.id)

    def _replace(self, document: ShadowDocument) -> None:
        self._documents[document.id] = document
        self._changed.add(document.id)

    def _trim(self) -> None:
        for old in self.all[:-SHADOWS_MAX]:
            del self._documents[old.id]
            self._changed.discard(old.id)
