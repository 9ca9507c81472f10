"""The state machine of a rollout (docs/rollouts.md): one step from the document, the facts and the time. Pure.

PENDING -> PREPARING -> BAKING(1) -> ... -> BAKING(n) -> PROMOTING -> COMPLETED
PENDING, PREPARING -> ABORTED
BAKING <-> PAUSED
BAKING, PAUSED, PROMOTING -> ROLLING_BACK -> ROLLED_BACK

INVARIANT: the weight rises in BAKING alone, by at most RISE_PERCENT at a time, never during a freeze, without Redis, with
a lease in doubt, or while a frontend is silent. It never rises after ROLLING_BACK. Operators' commands are in `commands`.

Time is a sum of differences of `now_s`, each in [0, TICK_MAX_S]. A clock that jumps adds at most TICK_MAX_S. Time without
a leader does not count, so a takeover can only extend a bake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from controlplane.rollouts import conditions, transitions
from controlplane.rollouts.capacity import RISE_PERCENT
from controlplane.rollouts.document import (
    SILENT_MAX,
    WAITS_FOR_MAX,
    WEIGHTED,
    RolloutDocument,
    Timing,
    clip,
)
from controlplane.rollouts.settings import OnInconclusive
from controlplane.rollouts.verdict import VerdictKind
from controlplane.rollouts.view import GoldenState, View
from controlplane.rollouts.weights import baseline_target
from kvmesh.snapshot.content import RolloutState

TICK_MAX_S: Final = 3.0
"""Largest time that one step counts. The leader calls `step` at least each second."""

CHECKPOINT_S: Final = 1.0
"""Time after which a document is written without a change of state, so that a new leader loses no more."""

RISING_S: Final = 10.0
"""Time behind a rise that does not count toward the longest time of a step, while another rise is left."""

PREPARE_MAX_S: Final = 20 * 60.0
"""Longest time in PENDING, and longest time in PREPARING."""

SHADOW_MAX_S: Final = 30 * 60.0
"""Longest time of the shadow before a rollout, on top of PREPARE_MAX_S."""

PAUSE_MAX_S: Final = 24 * 3600.0
"""Longest pause."""

BACK_ACK_S: Final = 30.0
"""Time for which ROLLING_BACK waits until the heard frontends have applied weight 0."""

DRAIN_MAX_S: Final = 10 * 60.0
"""Longest wait of ROLLING_BACK for the canary's running requests."""

GOLDEN_STATES: Final = frozenset({RolloutState.PREPARING, *WEIGHTED})
"""States in which the golden prompts run."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of a step."""

    document: RolloutDocument | None = None
    """The document to write, with the next revision. None: nothing to write."""
    is_change: bool = False
    """True if state, step or weight changed: a snapshot follows the write."""
    runs_golden: bool = False
    """True if the golden prompts are due by their own schedule (`golden_schedule`)."""


def step(document: RolloutDocument, view: View, now_s: float) -> Decision:
    """Return the decision at `now_s`, wall clock in Unix seconds. The document alone has the history."""
    if document.is_final:
        return Decision()
    after = _STEPS[document.state](_observed(document, view, now_s), view, now_s)
    after = conditions.with_refuge(after, view)
    is_change = after.position != document.position
    is_due = not 0 <= now_s - document.timing.at_s < CHECKPOINT_S
    runs_golden = after.state in GOLDEN_STATES
    if not is_change and not is_due:
        return Decision(runs_golden=runs_golden)
    after = replace(after, revision=document.revision + 1)
    after.assert_consistent()
    return Decision(after, is_change=is_change, runs_golden=runs_golden)


def _observed(document: RolloutDocument, view: View, now_s: float) -> RolloutDocument:
    """Return `document` with its times, the judge's verdict and the silent frontends at `now_s`."""
    is_of_step = view.verdict_step == document.step or view.verdict.kind is VerdictKind.FAIL
    is_judged = document.state in WEIGHTED and is_of_step
    return replace(
        document,
        timing=_timing(document, view, now_s),
        has_wrong_tokens=document.has_wrong_tokens or view.golden.state is GoldenState.RED,
        verdict=view.verdict if is_judged else document.verdict,
        silent_frontends=tuple(sorted(each.process_id for each in view.silent))[:SILENT_MAX],
    )


def _timing(document: RolloutDocument, view: View, now_s: float) -> Timing:
    was, state = document.timing, document.state
    passed_s = min(max(0.0, now_s - was.at_s), TICK_MAX_S)
    is_baking = state is RolloutState.BAKING
    is_gone = view.has_redis and not view.pool(document.to_pool).is_complete
    # A freeze must not use up the time of a rollout that it holds back.
    is_held = view.is_frozen and state in (RolloutState.PENDING, RolloutState.PREPARING)
    is_rising = not _is_full(document) and was.since_rise_s < RISING_S
    return Timing(
        at_s=now_s,
        state_s=was.state_s + (0.0 if is_held else passed_s),
        step_s=was.step_s + (passed_s if is_baking and not view.is_frozen and not is_rising else 0.0),
        baked_s=was.baked_s + (passed_s if is_baking and _is_full(document) and view.is_applied else 0.0),
        since_rise_s=was.since_rise_s + passed_s,
        arm_missing_s=was.arm_missing_s + passed_s if is_gone and state in WEIGHTED else 0.0,
    )


def _is_full(document: RolloutDocument) -> bool:
    """True if the weights are those of the step."""
    is_baseline_full = document.baseline_percent == baseline_target(document)
    return document.weight_percent == document.target_percent and is_baseline_full


def _pending(document: RolloutDocument, view: View, now_s: float) -> RolloutDocument:
    if document.id in view.ended_rollouts:
        return transitions.taken_back(document, conditions.danger(document, view), now_s)
    waits = conditions.to_prepare(document, view)
    if not waits:
        return transitions.preparing(document, "the checks passed", now_s)
    if document.timing.state_s >= PREPARE_MAX_S:
        return transitions.taken_back(document, _late("the checks did not pass", waits), now_s)
    return _waiting(document, waits)


def _preparing(document: RolloutDocument, view: View, now_s: float) -> RolloutDocument:
    danger = conditions.danger(document, view)
    if danger:
        return transitions.taken_back(document, danger, now_s)
    waits = conditions.to_bake(document, view)
    if not waits:
        return transitions.baking(document, 1, "the arms are ready and the golden prompts passed", now_s)
    longest_s = _prepare_max_s(document)
    if document.timing.state_s >= longest_s:
        reason = _late("the arms did not get ready", waits, longest_s)
        return transitions.taken_back(document, reason, now_s)
    return _waiting(document, waits)


def _prepare_max_s(document: RolloutDocument) -> float:
    """Return the longest time in PREPARING: with a shadow also the time for it, or a pause if that follows no decision."""
    settings = document.settings
    if not settings.shadow_permille:
        return PREPARE_MAX_S
    is_patient = settings.on_inconclusive is OnInconclusive.PAUSE
    return PAUSE_MAX_S if is_patient else PREPARE_MAX_S + SHADOW_MAX_S


def _baking(document: RolloutDocument, view: View, now_s: float) -> RolloutDocument:
    danger = conditions.danger(document, view)
    if danger:
        return transitions.taken_back(document, danger, now_s)
    is_full = _is_full(document)
    waits = conditions.to_next(document, view) if is_full else conditions.to_rise(document, view)
    if not waits:
        return _forward(document, now_s) if is_full else transitions.risen(document, RISE_PERCENT)
    if document.timing.step_s >= document.settings.bake_max_s:
        return _inconclusive(document, waits, now_s)
    return _waiting(document, waits)


def _forward(document: RolloutDocument, now_s: float) -> RolloutDocument:
    steps = document.settings.steps_percent
    if document.step == len(steps):
        return transitions.promoting(document, "the last step passed", now_s)
    reason = f"the step at {document.target_percent} % passed"
    return transitions.baking(document, document.step + 1, reason, now_s)


def _inconclusive(document: RolloutDocument, waits: tuple[str, ...], now_s: float) -> RolloutDocument:
    reason = f"no decision within {document.settings.bake_max_s:g} s: {'; '.join(waits)}"
    if document.settings.on_inconclusive is OnInconclusive.PAUSE:
        return transitions.paused(document, reason, now_s)
    return transitions.taken_back(document, reason, now_s)


def _paused(document: RolloutDocument, view: View, now_s: float) -> RolloutDocument:
    danger = conditions.danger(document, view)
    if danger:
        return transitions.taken_back(document, danger, now_s)
    left_s = PAUSE_MAX_S - document.timing.state_s
    if left_s <= 0:
        return transitions.taken_back(document, f"paused for {PAUSE_MAX_S / 3600:g} h", now_s)
    return _waiting(document, (f"an operator resumes it within {left_s / 3600:.1f} h",))


def _promoting(document: RolloutDocument, view: View, now_s: float) -> RolloutDocument:
    is_ended = document.id in view.ended_rollouts
    if is_ended or view.nacks:
        danger, waits = conditions.danger(document, view), tuple(conditions.without_old(document, view))
        if waits and not is_ended:  # all traffic would move to a pool without a role
            return _waiting(document, (danger, *waits))
        return transitions.taken_back(document, danger, now_s)
    left_s = document.settings.keep_old_s - document.timing.state_s
    if left_s > 0:
        return _waiting(
            document, (f'the old pool "{document.from_pool}" stays warm for {left_s:.0f} s more',)
        )
    waits = conditions.to_complete(view)
    if waits:
        return _waiting(document, waits)
    reason = f"the old pool was kept for {document.settings.keep_old_s:g} s"
    return transitions.completed(document, reason, now_s)


def _rolling_back(document: RolloutDocument, view: View, now_s: float) -> RolloutDocument:
    """Weight 0 first, in force or after BACK_ACK_S; then the canary's requests end, or DRAIN_MAX_S is over.

    A canary that takes the requests of the old pool waits for the old pool instead.
    """
    state_s = document.timing.state_s
    if not view.is_applied and state_s < BACK_ACK_S:
        behind = [each.process_id for each in view.heard if not each.applies]
        shown = conditions.listed(behind) or "the frontends"
        return _waiting(document, (f"weight 0 is not yet in force at {shown}",))
    if document.is_canary_open and state_s < DRAIN_MAX_S:
        missing = tuple(conditions.without_old(document, view)) or (
            f'no router of the old pool "{document.from_pool}" can place requests',
        )
        return _waiting(document, (*missing, f'the pool "{document.to_pool}" stays open for its requests'))
    live = view.pool(document.to_pool).live_requests
    if live != 0 and state_s < DRAIN_MAX_S:
        count = "an unknown number of" if live is None else str(live)
        return _waiting(document, (f"{count} requests still run on the canary",))
    how = "weight 0 is in force" if view.is_applied else f"{BACK_ACK_S:g} s are over"
    rest = "the canary is empty" if live == 0 else f"{DRAIN_MAX_S:g} s for its requests are over"
    return transitions.rolled_back(document, f"{how}, {rest}", now_s)


def _waiting(document: RolloutDocument, waits: tuple[str, ...]) -> RolloutDocument:
    return replace(document, waits_for=tuple(clip(each) for each in waits[:WAITS_FOR_MAX]))


def _late(what: str, waits: tuple[str, ...], longest_s: float = PREPARE_MAX_S) -> str:
    return f"{what} within {longest_s / 60:g} min: {'; '.join(waits)}"


_STEPS: Final[dict[RolloutState, Callable[[RolloutDocument, View, float], RolloutDocument]]] = {
    RolloutState.PENDING: _pending,
    RolloutState.PREPARING: _preparing,
    RolloutState.BAKING: _baking,
    RolloutState.PAUSED: _paused,
    RolloutState.PROMOTING: _promoting,
    RolloutState.ROLLING_BACK: _rolling_back,
}
