"""The shadow before a rollout: its order, and its result for the state machine of the rollout. Pure.

It copies sessions to the canary's pool and to the baseline pool at the same time. So A/A and the candidate have the same
requests, and the copies to the baseline are the reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from controlplane.rollouts.document import RolloutDocument
from controlplane.rollouts.machine import SHADOW_MAX_S
from controlplane.rollouts.view import GoldenState, ShadowFacts, ShadowState
from controlplane.shadow import report
from controlplane.shadow.comparison import BEYOND, WITHIN, Criterion
from controlplane.shadow.document import ShadowDocument
from controlplane.shadow.order import ShadowOrder
from kvmesh.snapshot.content import RolloutState

SESSIONS_MIN: Final = 100
"""Compared sessions of the canary's pool before the rollout goes on."""

PROOF_MAX_S: Final = 120.0
"""Longest wait for the proof of a replica from its start of service."""

OF_TOKENS: Final = frozenset({"tokens", "length"})
"""Criteria that say nothing about a version with other tokens."""


def is_before(document: RolloutDocument) -> bool:
    """True if the rollout waits for its shadow, or may do so."""
    return bool(document.settings.shadow_permille) and document.state is RolloutState.PREPARING


def is_wanted(document: RolloutDocument, golden: GoldenState, *, is_proving: bool) -> bool:
    """True if the shadow of the rollout may start: a version with wrong tokens gets no copies.

    `is_proving`: a replica of its pools is warmed up, or runs golden prompts. Copies beside them would look slow.
    """
    return is_before(document) and golden is GoldenState.GREEN and not is_proving


def name_of(document: RolloutDocument) -> str:
    """Return the id of the shadow of a rollout: it has the time of the rollout's start."""
    return f"shadow-{document.id.removeprefix('r-')}"


def order_of(document: RolloutDocument, shadow: str, wall_s: float) -> ShadowOrder:
    """Return the order of the shadow `shadow` before the first step of a rollout."""
    settings = document.settings
    return ShadowOrder(
        id=shadow,
        to_pool=document.to_pool,
        to_version=document.to_version,
        stable_version=document.from_version,
        baseline_pool=settings.baseline_pool,
        sample_permille=settings.shadow_permille,
        token_max=settings.shadow_token_max,
        expires_s=wall_s + SHADOW_MAX_S,
        rollout=document.id,
        started_s=wall_s,
        by=document.origin.started_by,
    )


def facts_of(
    document: ShadowDocument, known: Iterable[ShadowDocument], *, has_other_tokens: bool
) -> ShadowFacts:
    """Return the result of a shadow. `has_other_tokens`: the new version may give other tokens and lengths."""
    criteria, _, _ = report.compared(document, known, is_new=True)
    found = [each for each in criteria if not (has_other_tokens and each.name in OF_TOKENS)]
    beyond = [each for each in found if each.result == BEYOND]
    if beyond:
        return ShadowFacts(ShadowState.BEYOND, "; ".join(map(_sentence, beyond)))
    sessions = document.counts().target.token_sessions
    undecided = [each.name for each in found if each.result != WITHIN]
    if not undecided and sessions >= SESSIONS_MIN:
        return ShadowFacts(ShadowState.WITHIN, "the shadow is within the band")
    reason = f"the shadow has {sessions} of {SESSIONS_MIN} compared sessions"
    if undecided:
        reason += f", and no decision about {', '.join(undecided)}"
    if document.is_over:
        return ShadowFacts(ShadowState.INCONCLUSIVE, f"{reason}; it ended: {document.end_reason}")
    return ShadowFacts(ShadowState.WAITING, reason)


def _sentence(criterion: Criterion) -> str:
    figure, band = criterion.figure, criterion.reference
    own = "unknown" if figure is None else f"{figure.value:.4g}"
    other = "unknown" if band is None else f"{band.value:.4g} ({band.low:.3g} to {band.high:.3g})"
    p = "" if criterion.p is None else f", p {criterion.p:.2g}"
    return f"{criterion.name} {own} {criterion.unit}, reference {other}{p}"
