"""What a leader does with documents that disagree with the snapshots in force. Pure.

Redis may have lost its last writes, so a document may be older than the snapshot that it led to. A leader that finds a step
without a document rolls back. Only a promotion goes forward: the old pool may be gone already.

A state folder may have a document of a rollout that is long over. Such a document ends without a snapshot of its own, so
that it moves no traffic. A document that is far ahead of the receivers keeps its step, and its weight rises again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from msgspec.structs import replace

from controlplane.rollouts import transitions
from controlplane.rollouts.capacity import RISE_PERCENT
from controlplane.rollouts.document import WEIGHTED, RolloutDocument
from kvmesh.snapshot.content import Content, RolloutState, Track

_POSITION = {
    RolloutState.NONE: 0,
    RolloutState.PENDING: 1,
    RolloutState.PREPARING: 2,
    RolloutState.BAKING: 3,
    RolloutState.PAUSED: 3,
    RolloutState.PROMOTING: 4,
    RolloutState.ROLLING_BACK: 5,
    RolloutState.COMPLETED: 6,
    RolloutState.ROLLED_BACK: 6,
    RolloutState.ABORTED: 6,
}
"""Order of the states. A snapshot with a later state than the document was led to by a lost document."""


def reconcile(
    documents: Iterable[RolloutDocument], base: Content | None, ended: frozenset[str], wall_s: float
) -> Iterator[RolloutDocument]:
    """Yield the documents to write before anything is published, each with the next revision.

    `base`: the content of the highest snapshot that was found. `ended`: rollouts that receivers name as taken back.
    """
    running = [document for document in documents if not document.is_final]
    carried = [document for document in running if base is not None and document.id == base.rollout]
    kept = (carried or running)[-1:]
    for document in running:
        if document in kept:
            after = _reconciled(document, base, wall_s, is_ended=document.id in ended)
        else:
            after = _closed(document, "another rollout was found that is not over", wall_s)
        if after is not None:
            yield _next(after)


def _reconciled(
    document: RolloutDocument, base: Content | None, wall_s: float, *, is_ended: bool
) -> RolloutDocument | None:
    """Return the running rollout as it goes on; None: unchanged."""
    is_carried = base is not None and base.rollout == document.id
    if base is not None and not is_carried and base.stable.pool != document.stable_pool:
        reason = f'the pool "{base.stable.pool}" is stable by another change, so this rollout is over'
        return _closed(document, reason, wall_s)
    if is_ended:
        reason = "a receiver says that this rollout was taken back before"
        return None if document.is_taken_back else transitions.taken_back(document, reason, wall_s)
    if base is not None and not is_carried and document.state in WEIGHTED:
        reason = f"no receiver has a snapshot of this rollout, and its document is in {document.state_name}"
        return _closed(document, reason, wall_s)
    if base is None or not is_carried:
        return _lowered(document, None)
    if not _is_behind(document, base):
        return _lowered(document, base)
    if base.rollout_state.is_promoted:
        reason = "receivers report the promotion; its document was lost, and the new leader goes forward"
        forward = transitions.promoting(_at_step(document, base.step), reason, wall_s)
        if base.rollout_state is RolloutState.COMPLETED:
            return transitions.completed(forward, "receivers report its end", wall_s)
        return forward
    if document.is_taken_back:
        return None
    reason = (
        f"receivers are in {base.rollout_state.name} at step {base.step}, and the document is in "
        f"{document.state_name} at step {document.step}: a write was lost"
    )
    return _back(document, base, reason, wall_s)


def orphan(documents: Collection[str], base: Content | None) -> str:
    """Return the rollout whose weights are in force without any document; empty if there is none. `documents`: known ids.

    A promotion without a document stays: its content has all weight on one pool.
    """
    if base is None or not base.rollout or base.rollout in documents:
        return ""
    is_over = base.rollout_state.is_final or base.rollout_state.is_promoted
    return "" if is_over or base.rollout in base.ended_rollouts else base.rollout


def _is_behind(document: RolloutDocument, base: Content) -> bool:
    """True if `base` needs a later document than this one."""
    known, found = _POSITION[document.state], _POSITION[base.rollout_state]
    return found > known or (found == known and base.step > document.step)


def _lowered(document: RolloutDocument, base: Content | None) -> RolloutDocument | None:
    """Return `document` without weights that are more than one rise above those of `base`; None: it has none."""
    if document.state not in WEIGHTED:
        return None
    beside = base.of_track(Track.BASELINE) if base is not None else None
    canary = base.canary_percent if base is not None else 0
    baseline = min(document.baseline_percent, beside.weight_percent if beside is not None else 0)
    is_near = document.weight_percent <= canary + RISE_PERCENT
    if is_near and document.baseline_percent <= baseline + RISE_PERCENT:
        return None
    if base is None or base.step != document.step:
        canary = baseline = 0  # no document has the weights in force at this step
    timing = replace(document.timing, since_rise_s=0.0)
    return replace(
        document,
        weight_percent=min(document.weight_percent, canary),
        baseline_percent=baseline,
        timing=timing,
    )


def _closed(document: RolloutDocument, reason: str, wall_s: float) -> RolloutDocument:
    """Return `document` as over. Its way back needs no snapshot: none of its weights are in force."""
    after = transitions.taken_back(document, reason, wall_s)
    return after if after.is_final else transitions.rolled_back(after, reason, wall_s)


def _at_step(document: RolloutDocument, step: int) -> RolloutDocument:
    """Return `document` at `step` of a snapshot, which a foreign process may have made up."""
    return replace(document, step=min(max(1, step), len(document.settings.steps_percent)))


def _back(document: RolloutDocument, base: Content, reason: str, wall_s: float) -> RolloutDocument:
    """Return `document` taken back from the step of `base`, so that receivers leave its weights."""
    if base.rollout_state in (RolloutState.NONE, RolloutState.PENDING, RolloutState.PREPARING):
        return transitions.taken_back(document, reason, wall_s)
    at_step = replace(_at_step(document, base.step), state_name="BAKING")
    return transitions.taken_back(at_step, reason, wall_s)


def _next(document: RolloutDocument) -> RolloutDocument:
    after = replace(document, revision=document.revision + 1)
    after.assert_consistent()
    return after
