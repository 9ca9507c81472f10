"""Commands of operators on a rollout: start, pause, resume, promote, abort, undo, attest. Pure.

A command that the state does not allow is refused with sentences. `force` overrides some of them, never a freeze, missing
Redis or a missing pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from controlplane.rollouts import conditions, transitions
from controlplane.rollouts.capacity import shortages_at
from controlplane.rollouts.document import (
    UNWEIGHTED,
    WEIGHTED,
    Attestation,
    Change,
    Origin,
    RolloutDocument,
    Timing,
    clip,
)
from controlplane.rollouts.settings import RolloutSettings
from controlplane.rollouts.view import View
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.snapshot.content import RolloutState

REASON_CHARACTERS_MAX: Final = 200
"""Longest reason of an operator."""

AUTHOR_CHARACTERS_MAX: Final = 200


class CommandRefused(Exception):
    """A command is refused. The text is the sentences of `reasons`; the state did not change."""

    def __init__(self, *reasons: str, can_force: bool = False) -> None:
        super().__init__("; ".join(reasons) + ("; force overrides this" if can_force else ""))
        self.reasons = reasons
        self.can_force = can_force
        """True if the command would succeed with `force`."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command on a rollout."""

    change: int
    """A `ChangeRolloutRequest.Change`."""
    by: str
    """Author, as the audit names it."""
    reason: str = ""
    requirement: str = ""
    passed: bool = False
    is_forced: bool = False


@dataclass(frozen=True, slots=True)
class Commanded:
    """Result of a command: the document to write, and the checks that `force` overrode."""

    document: RolloutDocument
    overridden: tuple[str, ...] = ()


def of_message(message: pb.ChangeRolloutRequest, caller: str) -> Command:
    """Return the command in `message`. `caller` is the author, except of an attestation that names another one."""
    is_of_another = message.change == pb.ChangeRolloutRequest.CHANGE_ATTEST and message.by
    return Command(
        message.change,
        (message.by if is_of_another else caller)[:AUTHOR_CHARACTERS_MAX],
        message.reason[:REASON_CHARACTERS_MAX],
        message.requirement,
        message.passed,
        message.force,
    )


def start(
    rollout: str,
    settings: RolloutSettings,
    *,
    from_pool: str,
    from_version: str,
    to_version: str,
    by: str,
    view: View,
    now_s: float,
    is_forced: bool = False,
) -> Commanded:
    """Return the first document of a rollout, in PENDING. Raises CommandRefused."""
    refused = [
        *conditions.leader(view),
        *conditions.incapable(view),
        *conditions.without_prefill(from_pool, view),
        *conditions.other_versions(settings.to_pool, to_version, view),
    ]
    if view.other_rollout:
        refused.append(f'the rollout "{view.other_rollout}" is not over, and one rollout runs at a time')
    if refused:
        raise CommandRefused(*refused)
    small = shortages_at(settings, from_pool, 0, settings.target_percent(1), view) or ()
    overridden = (*map(str, small), *conditions.elsewhere(to_version, view))
    if overridden and not is_forced:
        raise CommandRefused(*overridden, can_force=True)
    reason = f'"{settings.to_pool}" ({to_version}) shall replace "{from_pool}" ({from_version})'
    document = RolloutDocument(
        id=rollout,
        settings=settings,
        origin=Origin(
            from_pool=from_pool,
            from_version=from_version,
            to_version=to_version,
            started_s=now_s,
            started_by=by,
            is_forced=is_forced,
        ),
        timing=Timing(at_s=now_s),
        changed_s=now_s,
        reason=clip(reason),
        changes=(Change(state_name="PENDING", step=0, at_s=now_s, reason=clip(reason), by=by),),
    )
    document.assert_consistent()
    return Commanded(document, overridden)


def command(document: RolloutDocument, request: Command, view: View, now_s: float) -> Commanded:
    """Return the document after `request`, with the next revision. Raises CommandRefused."""
    run = _COMMANDS.get(request.change)
    if run is None:
        raise CommandRefused(
            f"change is {request.change}; pause, resume, promote, abort, undo or attest is allowed"
        )
    done = run(document, request, view, now_s)
    after = replace(conditions.with_refuge(done.document, view), revision=document.revision + 1)
    after.assert_consistent()
    return Commanded(after, done.overridden)


def _pause(document: RolloutDocument, request: Command, _view: View, now_s: float) -> Commanded:
    if document.state is not RolloutState.BAKING:
        raise CommandRefused(f"{_is(document)}; only a rollout in BAKING can be paused")
    return Commanded(transitions.paused(document, _reason(request, "paused"), now_s, request.by))


def _resume(document: RolloutDocument, request: Command, view: View, now_s: float) -> Commanded:
    if document.state is not RolloutState.PAUSED:
        raise CommandRefused(f"{_is(document)}; only a rollout in PAUSED can be resumed")
    _refuse("resume", conditions.doubt(view))  # in a freeze the resumed step waits
    return Commanded(transitions.resumed(document, _reason(request, "resumed"), request.by, now_s))


def _promote(document: RolloutDocument, request: Command, view: View, now_s: float) -> Commanded:
    if document.state not in WEIGHTED:
        raise CommandRefused(f"{_is(document)}; only a rollout in BAKING or PAUSED can be promoted")
    _refuse("promote", conditions.leader(view))
    if danger := conditions.danger(document, view):
        raise CommandRefused(f"the rollout is about to be taken back: {danger}")
    pool = view.pool(document.to_pool)
    if not pool.is_complete or not pool.can_place:
        roles = " and no ".join(pool.missing_roles) or "router that can place requests"
        raise CommandRefused(f'the pool "{document.to_pool}" has no {roles}')
    overridden = tuple(_early(document, view))
    if overridden and not request.is_forced:
        raise CommandRefused(*overridden, can_force=True)
    after = transitions.promoting(document, _reason(request, "promoted"), now_s, request.by)
    return Commanded(after, overridden)


def _early(document: RolloutDocument, view: View) -> list[str]:
    """Return the checks that a promotion now leaves out."""
    steps = document.settings.steps_percent
    early = []
    if document.weight_percent < 100:
        early.append(
            f"the weight is {document.weight_percent} % at step {document.step} of {len(steps)}; "
            f"{100 - document.weight_percent} points would move at once"
        )
    missing = [
        name
        for name in document.settings.requirements
        if (found := document.attested(name)) is None or not found.passed
    ]
    if missing:
        early.append(f"not attested: {', '.join(missing)}")
    if view.silent:
        early.append(conditions.silent_sentence(view.silent))
    return [*early, *conditions.unpassed(document, view)]


def _abort(document: RolloutDocument, request: Command, _view: View, now_s: float) -> Commanded:
    if document.state is RolloutState.PROMOTING:
        raise CommandRefused(f"{_is(document)}; undo swaps it back")
    if document.state not in UNWEIGHTED | WEIGHTED or document.is_final:
        raise CommandRefused(f"{_is(document)}; there is nothing to abort")
    return Commanded(transitions.taken_back(document, _reason(request, "aborted"), now_s, request.by))


def _undo(document: RolloutDocument, request: Command, view: View, now_s: float) -> Commanded:
    if document.state is RolloutState.COMPLETED:
        raise CommandRefused(
            f"{_is(document)}, and the old pool is closed: it was kept for {document.settings.keep_old_s:g} s; "
            f'start a rollout to "{document.from_pool}"'
        )
    if document.state is not RolloutState.PROMOTING:
        hint = "; abort takes it back" if document.state in WEIGHTED else ""
        raise CommandRefused(f"{_is(document)}; only a rollout in PROMOTING can be undone{hint}")
    overridden = tuple(conditions.without_old(document, view))
    if overridden and not request.is_forced:
        raise CommandRefused(*overridden, can_force=True)
    after = transitions.taken_back(document, _reason(request, "undone"), now_s, request.by)
    return Commanded(after, overridden)


def _attest(document: RolloutDocument, request: Command, _view: View, now_s: float) -> Commanded:
    known = document.settings.requirements
    if request.requirement not in known:
        names = ", ".join(known) or "none"
        raise CommandRefused(f'requirement is "{request.requirement[:64]}"; this rollout requires: {names}')
    if document.state not in (UNWEIGHTED | WEIGHTED) or document.is_final:
        raise CommandRefused(f"{_is(document)}; attestations count until the promotion")
    attested = Attestation(requirement=request.requirement, passed=request.passed, by=request.by, at_s=now_s)
    others = tuple(each for each in document.attestations if each.requirement != request.requirement)
    after = replace(document, attestations=(*others, attested))
    if request.passed:
        return Commanded(after)
    reason = f'the requirement "{request.requirement}" was attested as failed'
    why = f"{reason}: {request.reason}" if request.reason else reason
    return Commanded(transitions.taken_back(after, why, now_s, request.by))


def _refuse(what: str, reasons: Iterable[str]) -> None:
    refused = tuple(reasons)
    if refused:
        raise CommandRefused(f"{what} is not possible now", *refused)


def _is(document: RolloutDocument) -> str:
    return f'the rollout "{document.id}" is in {document.state_name}'


def _reason(request: Command, done: str) -> str:
    by = f" by {request.by}" if request.by else ""
    return f"{done}{by}: {request.reason}" if request.reason else f"{done}{by}"


_Run = Callable[[RolloutDocument, Command, View, float], Commanded]

_COMMANDS: Final[dict[int, _Run]] = {
    pb.ChangeRolloutRequest.CHANGE_PAUSE: _pause,
    pb.ChangeRolloutRequest.CHANGE_RESUME: _resume,
    pb.ChangeRolloutRequest.CHANGE_PROMOTE: _promote,
    pb.ChangeRolloutRequest.CHANGE_ABORT: _abort,
    pb.ChangeRolloutRequest.CHANGE_UNDO: _undo,
    pb.ChangeRolloutRequest.CHANGE_ATTEST: _attest,
}
