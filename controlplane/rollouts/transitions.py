"""The transitions of a rollout's document, each named for its destination. They check nothing. Pure.

A transition changes state or step, appends to `changes`, and restarts the times of what it enters. The caller gives the
result the next revision.
"""

from __future__ import annotations

from msgspec.structs import replace

from controlplane.rollouts.document import (
    UNWEIGHTED,
    WEIGHTED,
    Change,
    RolloutDocument,
    StateName,
    bounded,
    clip,
)
from controlplane.rollouts.verdict import NO_VERDICT, Verdict, VerdictKind
from controlplane.rollouts.weights import baseline_target


def preparing(document: RolloutDocument, reason: str, now_s: float) -> RolloutDocument:
    """Return `document` in PREPARING: the arms get ready, and the golden prompts run."""
    return _changed(document, "PREPARING", reason, now_s)


def baking(document: RolloutDocument, step: int, reason: str, now_s: float) -> RolloutDocument:
    """Return `document` in BAKING at the start of `step`. The weight stays, and rises later (`risen`)."""
    timing = replace(document.timing, step_s=0.0, baked_s=0.0)
    after = _changed(replace(document, step=step, timing=timing), "BAKING", reason, now_s)
    return replace(after, verdict=NO_VERDICT)


def resumed(document: RolloutDocument, reason: str, by: str, now_s: float) -> RolloutDocument:
    """Return `document` in BAKING, in the step that was paused. Its longest time starts again, its bake time goes on."""
    timing = replace(document.timing, step_s=0.0)
    return _changed(replace(document, timing=timing), "BAKING", reason, now_s, by=by)


def paused(document: RolloutDocument, reason: str, now_s: float, by: str = "") -> RolloutDocument:
    """Return `document` in PAUSED, with its weights."""
    return _changed(document, "PAUSED", reason, now_s, by=by)


def promoting(document: RolloutDocument, reason: str, now_s: float, by: str = "") -> RolloutDocument:
    """Return `document` in PROMOTING: `to_pool` is stable with all weight."""
    after = replace(document, weight_percent=100, baseline_percent=0)
    return _changed(after, "PROMOTING", reason, now_s, by=by)


def completed(document: RolloutDocument, reason: str, now_s: float) -> RolloutDocument:
    """Return `document` in COMPLETED: the old pool is closed."""
    return _changed(document, "COMPLETED", reason, now_s)


def taken_back(document: RolloutDocument, reason: str, now_s: float, by: str = "") -> RolloutDocument:
    """Return `document` in ROLLING_BACK with weight 0; in ABORTED if no weight was allowed yet."""
    if document.state in UNWEIGHTED:
        return _changed(document, "ABORTED", reason, now_s, by=by)
    after = replace(document, weight_percent=0, baseline_percent=0)
    return _changed(after, "ROLLING_BACK", reason, now_s, by=by)


def rolled_back(document: RolloutDocument, reason: str, now_s: float) -> RolloutDocument:
    """Return `document` in ROLLED_BACK."""
    return _changed(document, "ROLLED_BACK", reason, now_s)


def risen(document: RolloutDocument, points: int) -> RolloutDocument:
    """Return `document` with its weights closer to those of its step by at most `points`. No change of state."""
    return replace(
        document,
        weight_percent=min(document.target_percent, document.weight_percent + points),
        baseline_percent=_toward(document.baseline_percent, baseline_target(document), points),
        timing=replace(document.timing, since_rise_s=0.0),
        waits_for=(),
    )


def _toward(present: int, target: int, points: int) -> int:
    return min(target, present + points) if present < target else max(target, present - points)


def _changed(
    document: RolloutDocument, state: StateName, reason: str, now_s: float, by: str = ""
) -> RolloutDocument:
    """Return `document` in `state`. The change keeps the verdict of the step, if the canary had a weight."""
    decided: Verdict | None = document.verdict
    if document.state not in WEIGHTED or document.verdict.kind is VerdictKind.NONE:
        decided = None
    change = Change(
        state_name=state,
        step=document.step,
        at_s=now_s,
        reason=clip(reason),
        weight_percent=document.weight_percent,
        by=by,
        verdict=decided,
    )
    return replace(
        document,
        state_name=state,
        changed_s=now_s,
        reason=clip(reason),
        waits_for=(),
        changes=bounded((*document.changes, change)),
        timing=replace(document.timing, state_s=0.0, arm_missing_s=0.0),
    )
