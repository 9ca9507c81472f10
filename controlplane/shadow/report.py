"""The report of a shadow: its document with the comparison, as operators see it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.rollouts.document import timestamp
from controlplane.shadow import comparison
from controlplane.shadow.comparison import REFERENCE, Criterion
from controlplane.shadow.document import DifferenceRow, ShadowDocument, add_arm
from kvmesh.control.v1 import shadow_pb2 as pb
from kvmesh.snapshot import shadow as shadow_traffic

OWN_BASELINE = "baseline"
"""Name of the reference if only the shadow's own copies to its baseline pool are there."""


def reference_of(document: ShadowDocument, known: Iterable[ShadowDocument]) -> ShadowDocument | None:
    """Return the last A/A shadow with the stable version and the mode of `document`, another one than `document`.

    One with SESSIONS_MIN sessions counts before a later one with fewer, which decides nothing.
    """
    order = document.order
    found = [
        each
        for each in known
        if each.id != document.id
        and each.order.is_aa
        and each.order.stable_version == order.stable_version
        and (each.order.mode, each.order.first_tokens) == (order.mode, order.first_tokens)
        and each.counts().target.pairs
    ]
    return max(found, key=lambda each: (has_enough(each), each.order.started_s, each.id), default=None)


def has_enough(document: ShadowDocument) -> bool:
    """True if an A/A shadow has enough sessions to decide about others."""
    return document.counts().target.sessions >= comparison.SESSIONS_MIN


def compared(
    document: ShadowDocument, known: Iterable[ShadowDocument], *, is_new: bool = False
) -> tuple[tuple[Criterion, ...], str, str]:
    """Return the criteria, the verdict and the name of the reference.

    The reference has the copies of the last A/A shadow, and the shadow's own copies to its baseline pool. `is_new`: the
    target counts as another version, also with the name of the stable one.
    """
    counts, order = document.counts(), document.order
    mode = order.shadow_mode
    if order.is_aa and not is_new:
        found = comparison.criteria(counts, None, mode, order.first_tokens, has_baseline=False)
        return found, REFERENCE if has_enough(document) else comparison.NEEDS_MORE, ""
    earlier = reference_of(document, known)
    reference = pb.ShadowArm()
    if earlier is not None:
        add_arm(reference, earlier.counts().target)
    if order.baseline_pool:
        add_arm(reference, counts.baseline)
    found = comparison.criteria(
        counts,
        reference if reference.pairs else None,
        mode,
        order.first_tokens,
        has_baseline=bool(order.baseline_pool),
    )
    name = earlier.id if earlier is not None else OWN_BASELINE if counts.baseline.pairs else ""
    return found, comparison.verdict(found), name


def view(
    document: ShadowDocument, known: Iterable[ShadowDocument], *, difference_count: int = 0
) -> pb.ShadowView:
    """Return the report of `document`. `known`: all documents of shadows."""
    order = document.order
    found, verdict, reference = compared(document, known)
    latest = reversed(document.differences[-difference_count:] if difference_count else ())
    criteria = [each.message() for each in found]
    if order.is_aa:
        for each in criteria:
            each.result = verdict
    return pb.ShadowView(
        settings=shadow_traffic.to_message(order.shadow()),
        stable_version=order.stable_version,
        to_version=order.to_version,
        running=not document.is_over,
        started_at=timestamp(order.started_s),
        started_by=order.by,
        ended_at=timestamp(document.ended_s) if document.is_over else None,
        end_reason=document.end_reason,
        counts=document.counts(),
        frontends=[
            pb.ShadowFrontend(process_id=name, off_reason=reason)
            for name, reason in sorted(document.off_reasons().items())
        ],
        criteria=criteria,
        reference=reference,
        differences=[_difference(row) for row in latest],
        aa=order.is_aa,
        verdict=verdict,
        revision=document.revision,
    )


def _difference(row: DifferenceRow) -> pb.ShadowDifference:
    return pb.ShadowDifference(
        number=row.number,
        request_id=row.request_id,
        pool=row.pool,
        kind=row.kind,
        position=row.position,
        user_outcome=row.user_outcome,
        copy_outcome=row.copy_outcome,
        user_tokens=row.user_tokens,
        copy_tokens=row.copy_tokens,
        at_ms=row.at_ms,
        frontend=row.frontend,
    )
