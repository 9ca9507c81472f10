"""Handlers of the rows that a router sends for an admitted request: one function for each kind of row.

Pure. INVARIANT: rows come from the request's open slot alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvmesh.attach import frames, token_log
from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.requests import cross_check, faults
from services.frontend.requests.attempts import note_pause
from services.frontend.requests.outcome import Outcome
from services.frontend.requests.progress import TokenError
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.state import State
from services.frontend.requests.takeover import TAKEOVER_RETRY_S
from services.frontend.requests.verdicts import Role, Verdict

GUIDE: Final = "guided_decoding_guide"
"""Name of the engine's tensor, in its errors about a guide."""


def on_acceptance(request: LiveRequest, _: attach.Acceptance, now_s: float) -> None:
    """Note that the router took the submit or the adopt."""
    _accepted(request, now_s)


def _accepted(request: LiveRequest, now_s: float) -> None:
    attempt = request.upstream.current
    attempt.last_seen_s = now_s
    if request.state is State.LEAVING:
        request.abandon()
    elif request.state is State.TAKING_OVER:
        request.takeovers += 1
        request.taken_over()
    else:
        attempt.is_accepted = True
        _unplaced(request)


def _unplaced(request: LiveRequest) -> None:
    """Note that the router keeps the request in its queue, at first or again."""
    if not request.upstream.current.has_tokens:
        request.upstream.current.placement = None


def on_placement(request: LiveRequest, row: attach.Placement, now_s: float) -> None:
    """Note the router's placement; the last one counts. A placement without a replica revokes the last one."""
    request.upstream.current.last_seen_s = now_s
    if not (row.prefill_replica or row.decode_replica):
        _unplaced(request)
        return
    request.upstream.current.placement = row
    request.hub.schedule(request)  # the bound of silence is shorter than in the queue


def on_start(request: LiveRequest, row: attach.Start, now_s: float) -> None:
    """Note that an engine has the attempt."""
    attempt = request.upstream.current
    attempt.is_started, attempt.replica_queue_us, attempt.last_seen_s = True, row.queue_us, now_s


def on_transfer(request: LiveRequest, row: attach.Transfer, now_s: float) -> None:
    """Note that the KV transfer is complete."""
    request.upstream.current.transfer_us = row.transfer_us
    request.upstream.current.last_seen_s = now_s


def on_first_token(request: LiveRequest, row: attach.FirstToken, now_s: float) -> None:
    """Take the attempt's first token, with the cached tokens of its prompt."""
    attempt = request.upstream.current
    if attempt.first_token is None:
        attempt.first_token = row
        request.progress.count_prompt(attempt, row)
    logprobs = frames.pack_logprobs((row.logprob,)) if row.HasField("logprob") else b""
    token = frames.pack_ids((row.token_id,))
    on_tokens(request, frames.Row(row.slot, row.position, 1, token, logprobs, row.alternatives), now_s)


def on_tokens(request: LiveRequest, row: frames.Row, now_s: float) -> None:
    """Take tokens of the open slot: known ones are dropped, a gap ends the attempt."""
    if request.outcome is not None:
        return
    if request.state is State.TAKING_OVER:
        _accepted(request, now_s)
    progress, attempt = request.progress, request.upstream.current
    is_first = not attempt.has_tokens
    attempt.is_started = attempt.has_tokens = True
    attempt.last_seen_s = now_s
    try:
        is_new = not progress.is_ended and progress.add(row, now_s)
        if progress.is_ended and row.position + row.count > len(progress.ids):
            # The engine knows one end token alone, and went on behind another one.
            request.finish(progress.end_reason, now_s)
            return
        if not is_new:
            return
    except token_log.Gap:
        request.upstream.cancel(attach.Cancel.REASON_SUPERSEDED)
        request.try_again(faults.GAP, now_s, untouched=False)
        return
    except TokenError:  # a replica of an earlier release: later ones check the ids of their engine
        request.upstream.cancel(attach.Cancel.REASON_ABANDONED)
        _on_verdict(request, faults.INVALID_TOKEN, attempt.decode_replica, now_s)
        return
    note_token_s = request.note_token_s
    if note_token_s is not None:
        note_token_s(now_s)
    request.retry_state.on_progress()
    request.refused_regions.clear()  # a region that was full then may have room when the stream needs one
    if request.upstream.cross_checked:
        cross_check.on_progress(request, now_s)
    if is_first:
        note_pause(request.attempts, now_s)
        request.hub.schedule(request)
    if progress.output.stop_string is not None:
        request.finish(pb.FINISH_REASON_STOP_STRING, now_s)
    elif attempt.is_anothers and len(progress.ids) >= request.spec.max_output_tokens:
        # The other frontend's attempt may have a higher limit than this request. Its finish then never comes.
        request.end_if_complete(now_s)
    else:
        request.on_ready()


def _has_left(request: LiveRequest) -> bool:
    """Return True, and forget the request, if its client's side is over. The router has just ended the slot.

    If the client's side lives, a request in TAKING_OVER has found its attempt and is ATTACHED again.
    """
    if request.outcome is not None:
        request.gone()
        return True
    if request.state is State.TAKING_OVER:
        request.taken_over()
    return False


def on_finish(request: LiveRequest, row: attach.Finish, now_s: float) -> None:
    """Handle the Finish of the slot, which is closed: its end token or length, or the reason for an early end."""
    request.upstream.detach()
    if _has_left(request):
        return
    match row.reason:
        case attach.Finish.REASON_END_TOKEN | attach.Finish.REASON_LENGTH:
            if row.end_position != len(request.progress.ids):
                request.try_again(faults.GAP, now_s, untouched=False)
            elif row.reason == attach.Finish.REASON_END_TOKEN or request.progress.is_ended:
                request.finish(request.progress.end_reason, now_s)
            else:
                request.finish(pb.FINISH_REASON_LENGTH, now_s)
        case attach.Finish.REASON_DEADLINE:
            request.end_by_deadline(now_s)
        case attach.Finish.REASON_SLOW_READER:
            request.end_with(Outcome(error=faults.slow_reader(len(request.progress.ids))), now_s)
        case attach.Finish.REASON_ADOPTED:
            # Only this request takes over its attempts, so an adopt through a lost stream came late.
            _lost_to_late_takeover(request, now_s)
        case attach.Finish.REASON_SUPERSEDED if request.upstream.is_below():
            # A late attempt of the frontend that the client left, or a later execution: one more attempt shows which.
            request.try_again(faults.SUPERSEDED, now_s, untouched=False)
        case attach.Finish.REASON_SUPERSEDED:
            request.end_with(Outcome(error=faults.superseded()), now_s)
        case _:
            request.try_again("INTERNAL", now_s, untouched=False)


def _lost_to_late_takeover(request: LiveRequest, now_s: float) -> None:
    """Seek the attempt as if its stream had been lost, up to `attempts_max` times."""
    takeover = request.upstream.takeover
    takeover.late_takeovers += 1
    if request.location is not None and takeover.late_takeovers <= request.limits.attempts_max:
        request.start_takeover(faults.ADOPTED, now_s)
    else:
        request.try_again(faults.ADOPTED, now_s, untouched=False)


def on_failure(request: LiveRequest, row: attach.Failure, now_s: float) -> None:
    """Handle a failure behind the router; the slot ended."""
    router = request.upstream.detach()
    attempt = request.upstream.current
    attempt.failed_replica = row.replica
    fault = faults.of_failure(row.code)
    if _has_left(request) or request.end_if_complete(now_s):
        return
    if row.code in (attach.Failure.CODE_INVALID, attach.Failure.CODE_INVALID_TOKEN):
        field = "sampling.guide" if GUIDE in row.message else ""
        _on_verdict(request, fault, row.replica, now_s, field, can_cross_check=row.contestable)
    elif (
        row.code == attach.Failure.CODE_REPLICA_LOST
        and attempt.has_tokens
        and row.replica == attempt.decode_replica != ""
        and request.hub.has_other(request.spec, router)
    ):
        request.upstream.avoid = router  # perhaps only this router lost the replica
        request.start_takeover(fault, now_s)
    else:
        request.try_again(fault, now_s, untouched=row.untouched and attempt.is_untouched)


def _on_verdict(
    request: LiveRequest,
    fault: str,
    replica: str,
    now_s: float,
    field: str = "",
    *,
    can_cross_check: bool = False,
) -> None:
    """Handle a verdict of `replica`: an invalid request, or a token id outside the vocabulary. The slot ended.

    `field`: what the engine refuses, if it said so.
    """
    placement = request.upstream.current.placement
    role: Role = "prefill" if placement is not None and replica == placement.prefill_replica else "decode"
    if fault == faults.INVALID_TOKEN:
        error = faults.given_up("ENGINE_ERROR", len(request.attempts), len(request.progress.ids))
    else:
        error = faults.engine_refused(field)
    verdict = Verdict(request.upstream.current.crossing(replica), role, fault, error, can_cross_check, now_s)
    cross_check.on_verdict(request, verdict, now_s)


def _refused_in_time(request: LiveRequest, row: attach.Refusal, now_s: float) -> None:
    """Handle a refusal by deadline: a hop cannot serve the request in time, or its time is over."""
    spec, progress = request.spec, request.progress
    if now_s < spec.timing.deadline_s and progress.ids and not spec.timing.is_clients_deadline:
        # The class ends this request, not the client: estimates err, and the tokens so far are a good answer in the end.
        request.try_again(faults.INFEASIBLE, now_s, untouched=True, after_s=row.retry_after_ms / 1000)
        return
    left_s, estimate_s = spec.timing.left_s(now_s, is_waiting=not progress.ids), row.estimate_ms / 1000
    if estimate_s and left_s > 0:
        request.upstream.current.fault = faults.INFEASIBLE
        error = faults.infeasible(left_s, estimate_s, len(progress.ids), row.retry_after_ms / 1000 or None)
        request.end_with(Outcome(error=error), now_s)
    else:
        request.end_by_deadline(now_s)


def _may_retry_takeover(request: LiveRequest, row: attach.Refusal) -> bool:
    """Return True if a router that does not know the replica refused an adopt: the router may have just restarted."""
    return (
        request.state in (State.TAKING_OVER, State.LEAVING)
        and row.reason == attach.Refusal.REASON_NO_REPLICA
        and request.upstream.takeover.fault in (faults.ROUTER_LOST, faults.FRONTEND_LOST)
    )


def _may_outbid(request: LiveRequest) -> bool:
    """Return True if a higher attempt may belong to a dead frontend that had the same resume token or key.

    If executions have separate numbers (fencing), a higher attempt belongs to a later execution.
    """
    spec = request.spec
    is_shared = spec.execution.is_repeatable and not spec.execution.is_fenced
    return is_shared and len(request.attempts) < request.limits.attempts_max


def on_refusal(request: LiveRequest, row: attach.Refusal, now_s: float) -> None:
    """Handle a refused submit or adopt; the router holds nothing for it."""
    was_taking_over = request.state is State.TAKING_OVER
    router = request.upstream.detach()
    if _may_retry_takeover(request, row):
        request.upstream.avoid, request.retry_at_s = router, now_s + TAKEOVER_RETRY_S
        request.hub.schedule(request)
        return
    if _has_left(request):
        return
    if was_taking_over:
        if row.reason == attach.Refusal.REASON_SUPERSEDED and not request.upstream.is_below():
            request.end_with(Outcome(error=faults.superseded()), now_s)
        else:
            request.give_up_takeover(now_s)
        return
    fault, after_s = faults.of_refusal(row.reason, evicted=row.evicted), row.retry_after_ms / 1000
    if row.reason == attach.Refusal.REASON_DEADLINE:
        # Without a wait in the queue its deadline is too short for an idle region as well.
        is_left = now_s < request.spec.timing.deadline_s and request.leave_region(
            fault, now_s, is_own_fault=after_s <= 0
        )
        if not is_left:
            _refused_in_time(request, row, now_s)
    elif row.reason == attach.Refusal.REASON_INVALID:
        # The replica's limits refuse the request: a replica that serves it has other limits and contradicts no verdict.
        request.upstream.current.fault = fault
        request.end_with(Outcome(error=faults.engine_refused(row.field)), now_s)
    elif row.reason == attach.Refusal.REASON_SUPERSEDED and not _may_outbid(request):
        request.end_with(Outcome(error=faults.superseded()), now_s)
    elif row.reason in faults.REGION_FULL and request.leave_region(fault, now_s):
        pass
    elif row.reason == attach.Refusal.REASON_GRANT:
        _refused_by_grant(request, now_s, after_s)
    elif row.reason in faults.FULL and not request.retry_state.was_taken:
        request.upstream.current.fault = fault
        request.give_up(fault, now_s, after_s=after_s)
    else:
        request.upstream.avoid = router
        if row.reason in faults.UNPLACEABLE:
            request.hub.note_unplaceable(request.spec, router)
        request.try_again(fault, now_s, untouched=True, after_s=after_s)


def _refused_by_grant(request: LiveRequest, now_s: float, after_s: float) -> None:
    """Handle a refusal for the grant of the caller's region, if no other region takes the request.

    A request that an engine took waits; each other one is refused as by a full queue.
    """
    if request.retry_state.was_taken:
        request.refused_regions.clear()
        request.try_again(faults.GRANT, now_s, untouched=True, after_s=after_s)
    else:
        request.upstream.current.fault = faults.GRANT
        request.give_up("QUEUE_FULL", now_s, after_s=after_s)


TAKERS: Final[dict[str, Callable[[LiveRequest, Any, float], None]]] = {
    "acceptances": on_acceptance,
    "placements": on_placement,
    "starts": on_start,
    "first_tokens": on_first_token,
    "transfers": on_transfer,
    "frame": on_tokens,
    "finishes": on_finish,
    "failures": on_failure,
    "refusals": on_refusal,
}
"""Handler of the rows of each field of AttachResponse."""
