"""The conditions of forward steps and the grounds for going back, each as a sentence with its figures. Pure.

An empty tuple means that the step may go forward. A missing fact is a condition that is not met.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from msgspec.structs import replace

from controlplane.rollouts import capacity
from controlplane.rollouts.document import RolloutDocument
from controlplane.rollouts.settings import OnInconclusive, RolloutSettings
from controlplane.rollouts.verdict import VerdictKind
from controlplane.rollouts.view import HEARD_S, SILENT_S, FrontendFacts, GoldenState, ShadowState, View
from kvmesh.snapshot.content import RolloutState

QUEUE_DELAY_MAX_S: Final = 0.5
"""Queue delay of an arm from which the weight does not rise. Moved sessions are cold and make it longer."""

RISE_INTERVAL_S: Final = 2.0
"""Least time between two rises. Routers report their queue delay each second, so a rise shows before the next one."""

REQUIRED_FROM_PERCENT: Final = 50
"""Attestations and the judge's bounds are needed before a step of this weight or a larger one."""

EARLIER_SESSIONS_MIN: Final = 50
"""Sessions of stable that a first step of 100 % needs before it, as many as the judge's first look has of the canary."""

EARLIER_S_MIN: Final = 120
"""Seconds of stable that a first step of 100 % needs before it. Errors come in bursts, and few seconds are few bursts."""

ARM_MISSING_S: Final = 5.0
"""Time without a process of a role until the canary counts as gone. A lease outlives its process by 3 s."""

FOLLOWS_S: Final = 3600.0
"""Time for which a rollout must be COMPLETED in one region before another region begins one."""

NAMES_SHOWN: Final = 5


def to_prepare(document: RolloutDocument, view: View) -> tuple[str, ...]:
    """Return the unmet conditions of PREPARING."""
    return (
        *leader(view),
        *_other_rollout(view),
        *incapable(view),
        *_silent(view),
        *_unknown_version(document, view),
        *too_small(document, 1, view),
    )


def to_bake(document: RolloutDocument, view: View) -> tuple[str, ...]:
    """Return the unmet conditions of the first step."""
    return (
        *leader(view),
        *_silent(view),
        *incapable(view),
        *_unapplied(view),
        *_unready(document.settings, document.from_pool, view),
        *_golden(view, 0),
        *_unproved(document, 1, view),
        *_unknown_before(document, view),
        *too_small(document, 1, view),
        *unshadowed(document, view),
    )


def elsewhere(to_version: str, view: View) -> Iterator[str]:
    """Yield why a rollout to `to_version` should wait for other regions: one region at a time, an hour apart."""
    for region in view.unheard:
        yield f"region {region}: it is not heard, so its rollout is not known"
    for each in view.elsewhere:
        what = f'region {each.region}: its rollout to "{each.to_version}" is {each.state}'
        if not each.is_final:
            yield f"{what}; a second region follows {FOLLOWS_S / 60:.0f} min after the first is COMPLETED"
        elif each.state == RolloutState.COMPLETED.name and each.age_s < FOLLOWS_S:
            yield f"{what} for {each.age_s / 60:.0f} min; {FOLLOWS_S / 60:.0f} min are needed"
        elif each.state != RolloutState.COMPLETED.name and each.to_version == to_version:
            yield f"{what}; a version that was taken back there is not rolled out here"


def unshadowed(document: RolloutDocument, view: View) -> Iterator[str]:
    """Yield what the shadow before the first step lacks."""
    if document.settings.shadow_permille and view.shadow.state is not ShadowState.WITHIN:
        yield view.shadow.reason


def to_rise(document: RolloutDocument, view: View) -> tuple[str, ...]:
    """Return the unmet conditions of a rise of the weight inside the present step."""
    waits = [*leader(view), *_silent(view), *_unapplied(view), *_unplaceable(document.to_pool, view)]
    arms = (document.to_pool, document.settings.baseline_pool or document.from_pool)
    for name in arms:
        delay_s = view.pool(name).queue_delay_s
        if delay_s is None:
            waits.append(f'the queue delay of the pool "{name}" is unknown')
        elif delay_s >= QUEUE_DELAY_MAX_S:
            waits.append(
                f'the queue delay of the pool "{name}" is {delay_s:.2f} s; below {QUEUE_DELAY_MAX_S:g} s is needed'
            )
    if document.weight_percent and document.timing.since_rise_s < RISE_INTERVAL_S:
        waits.append(
            f"the weight rose {document.timing.since_rise_s:.1f} s ago; {RISE_INTERVAL_S:g} s are needed"
        )
    return tuple(waits)


def to_next(document: RolloutDocument, view: View) -> tuple[str, ...]:
    """Return the unmet conditions of the step after the present one, or of the promotion after the last step."""
    following = document.step + 1
    is_last = document.step == len(document.settings.steps_percent)
    return (
        *leader(view),
        *_silent(view),
        *_unapplied(view),
        *unpassed(document, view),
        *_unplaceable(document.to_pool, view),
        *(() if is_last else _unproved(document, following, view)),
        *(() if is_last else too_small(document, following, view)),
    )


def to_complete(view: View) -> tuple[str, ...]:
    """Return the unmet conditions of COMPLETED, apart from the time for which the old pool stays warm."""
    return (*leader(view), *_silent(view), *_unapplied(view))


def danger(document: RolloutDocument, view: View) -> str:
    """Return the reason to take a rollout back at once. Empty: none."""
    if document.id in view.ended_rollouts:
        return "a receiver says that this rollout was taken back before"
    if view.nacks:
        first = view.nacks[0]
        return f"{first.process_id} refused the snapshot: {first.reason}"
    if view.golden.state is GoldenState.RED:
        return f"golden prompts: {view.golden.reason}"
    if _is_condemned(document, view):
        return f"the shadow: {view.shadow.reason}"
    if view.verdict.kind is VerdictKind.FAIL:
        return f"the judge: {view.verdict.reason}"
    if document.timing.arm_missing_s >= ARM_MISSING_S:
        roles = ", ".join(view.pool(document.to_pool).missing_roles) or "process"
        return f'no {roles} is left in the canary\'s pool "{document.to_pool}"'
    return ""


def _is_condemned(document: RolloutDocument, view: View) -> bool:
    """True if the shadow before the first step takes the rollout back."""
    if not document.settings.shadow_permille or document.state is not RolloutState.PREPARING:
        return False
    is_strict = document.settings.on_inconclusive is OnInconclusive.ROLLBACK
    is_undecided = view.shadow.state is ShadowState.INCONCLUSIVE
    return view.shadow.state is ShadowState.BEYOND or (is_undecided and is_strict)


def without_old(document: RolloutDocument, view: View) -> Iterator[str]:
    """Yield what the old pool lacks to take the traffic back."""
    old = view.pool(document.from_pool)
    if not old.is_complete:
        yield f'the old pool "{document.from_pool}" has no {" and no ".join(old.missing_roles)}'


def with_refuge(document: RolloutDocument, view: View) -> RolloutDocument:
    """Return `document`, if it was taken back, with its canary open while the old pool cannot place, else closed.

    Then requests that no other pool can place go to the canary. Wrong tokens are worse than none: such a canary is closed.
    A leader that takes over has not heard the old pool's routers: it leaves the canary as it is.
    """
    if not document.is_taken_back:
        return document
    old = view.pool(document.from_pool)
    if document.has_wrong_tokens:
        return replace(document, is_canary_open=False)
    if old.is_complete and old.queue_delay_s is None:
        return document
    return replace(document, is_canary_open=not (old.is_complete and old.can_place))


def unpassed(document: RolloutDocument, view: View) -> Iterator[str]:
    """Yield what the present step lacks: its bake time, the judge's pass, the golden prompts."""
    yield from _unbaked(document)
    yield from _unjudged(document, view)
    yield from _golden(view, document.step)


def leader(view: View) -> Iterator[str]:
    """Yield why the leader may only go back, and the freeze."""
    yield from doubt(view)
    if view.is_frozen:
        yield f"the mesh is frozen for another {view.frozen_s:.0f} s"


def doubt(view: View) -> Iterator[str]:
    """Yield why the leader may only go back."""
    if not view.has_redis:
        yield "Redis does not answer, so the control plane may only go back"
    if not view.has_lease:
        yield "the leader's lease is in doubt, so the control plane may only go back"


def incapable(view: View) -> Iterator[str]:
    """Yield the processes of a release without pools."""
    if view.incapable:
        verb = "has" if len(view.incapable) == 1 else "have"
        yield f'{listed(view.incapable)} {verb} no capability "pools": a release that knows no pools'


def without_prefill(pool: str, view: View) -> Iterator[str]:
    """Yield the refusal of a rollout from a pool whose decode replicas compute the prompts.

    The checks of rollouts need each role in each pool.
    """
    facts = view.pool(pool)
    if facts.decode and not facts.prefill:
        yield f'the pool "{pool}" has decode replicas and no prefill replica; rollouts need both in each pool'


def other_versions(pool: str, version: str, view: View) -> Iterator[str]:
    """Yield the refusal of a rollout to a pool that has another version than the configured one."""
    facts = view.pool(pool)
    if facts.other_versions and not facts.is_complete:
        yield f'the pool "{pool}" is configured for "{version}", and {", ".join(facts.other_versions)}'


def too_small(document: RolloutDocument, step: int, view: View) -> Iterator[str]:
    """Yield the pools that are too small for `step`. Nothing for a forced rollout."""
    if document.origin.is_forced:
        return
    found = capacity.shortages(document, step, view)
    if found is None:
        yield f'the prefill load of the pool "{document.from_pool}" is unknown, so the capacity cannot be checked'
    else:
        yield from map(str, found)


def silent_sentence(frontends: Iterable[FrontendFacts]) -> str:
    """Return the sentence about silent frontends."""
    names = [each.process_id for each in frontends]
    return f"{listed(names)} was silent for more than {SILENT_S:g} s: its traffic is not under control"


def listed(names: Iterable[str]) -> str:
    """Return the first NAMES_SHOWN of `names`, and the number of the others."""
    ordered = sorted(names)
    rest = len(ordered) - NAMES_SHOWN
    return ", ".join(ordered[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _silent(view: View) -> Iterator[str]:
    if view.silent:
        yield silent_sentence(view.silent)


def _other_rollout(view: View) -> Iterator[str]:
    if view.other_rollout:
        yield f'the rollout "{view.other_rollout}" is not over'


def _unknown_version(document: RolloutDocument, view: View) -> Iterator[str]:
    if not view.heard:
        yield "no frontend was heard"
    late = [each.process_id for each in view.frontends if not each.is_heard and not each.is_silent]
    if late:
        yield f"{listed(late)} was not heard in the last {HEARD_S:g} s"
    without = [each.process_id for each in view.heard if document.to_version not in each.model_versions]
    if without:
        yield f'{listed(without)} does not know the model version "{document.to_version}"'


def _unapplied(view: View) -> Iterator[str]:
    if not view.is_published:
        yield "the snapshot with this state is not published yet"
    elif not view.heard:
        yield "no frontend was heard"
    elif behind := [each.process_id for each in view.heard if not each.applies]:
        yield f"{listed(behind)} did not apply the snapshot yet"


def _unready(settings: RolloutSettings, from_pool: str, view: View) -> Iterator[str]:
    for name in dict.fromkeys((settings.to_pool, settings.baseline_pool, from_pool)):
        if name:
            yield from _unplaceable(name, view)


def _unplaceable(name: str, view: View) -> Iterator[str]:
    pool = view.pool(name)
    if not pool.is_complete:
        others = f" of its version: {', '.join(pool.other_versions)}" if pool.other_versions else ""
        yield f'the pool "{name}" has no {" and no ".join(pool.missing_roles)}{others}'
    elif not pool.can_place:
        yield f'no router of the pool "{name}" can place requests'


def _golden(view: View, step: int) -> Iterator[str]:
    if view.golden.step != step or view.golden.state is not GoldenState.GREEN:
        why = view.golden.reason if view.golden.step == step else ""
        yield f"golden prompts: {why or 'their runs have not ended'}"


def _unproved(document: RolloutDocument, step: int, view: View) -> Iterator[str]:
    """Yield missing attestations and bounds of the judge, if `step` is the first one from REQUIRED_FROM_PERCENT."""
    before = document.settings.target_percent(step - 1)
    if before >= REQUIRED_FROM_PERCENT or document.settings.target_percent(step) < REQUIRED_FROM_PERCENT:
        return
    if step > 1:
        yield from (f"needed before {REQUIRED_FROM_PERCENT} %: {need}" for need in view.verdict.needs)
    for requirement in document.settings.requirements:
        attested = document.attested(requirement)
        if attested is None or not attested.passed:
            yield f'the requirement "{requirement}" is not attested'


def _unknown_before(document: RolloutDocument, view: View) -> Iterator[str]:
    """Yield the missing sessions of stable before a first step of 100 %: from then on stable has none."""
    if document.settings.target_percent(1) < 100:
        return
    known = sum(each.sessions for each in view.verdict.samples if each.track == "stable")
    if known < EARLIER_SESSIONS_MIN:
        yield (
            f"{known} of {EARLIER_SESSIONS_MIN} sessions of the stable pool were observed; a first step of 100 % "
            "is compared with them"
        )
    seconds = sum(each.seconds for each in view.verdict.samples if each.track == "stable")
    if seconds < EARLIER_S_MIN:
        yield (
            f"the stable pool was observed for {seconds} of {EARLIER_S_MIN} s; a first step of 100 % is compared "
            "with that time"
        )


def _unbaked(document: RolloutDocument) -> Iterator[str]:
    if document.baked_s < document.settings.bake_s:
        yield f"{document.baked_s:.0f} of {document.settings.bake_s:g} s are baked at the full weight"


def _unjudged(document: RolloutDocument, view: View) -> Iterator[str]:
    if view.verdict_step != document.step or view.verdict.kind is VerdictKind.NONE:
        yield "the judge has no verdict on this step yet"
    elif view.verdict.kind is not VerdictKind.PASS:
        yield f"the judge: {view.verdict.reason or view.verdict.kind.value}"
