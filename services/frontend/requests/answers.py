"""What follows from each row that a router sends for a live request.

Pure. Rows come from the open slot alone; each function takes one kind of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvmesh.attach import frames, token_log
from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend.requests import cross_check, faults
from services.frontend.requests.outcome import End
from services.frontend.requests.progress import TokenError
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.state import State
from services.frontend.requests.takeover import ADOPT_AGAIN_S
from services.frontend.requests.verdicts import Role, Verdict


def on_acceptance(request: LiveRequest, _: attach.Acceptance, now_s: float) -> None:
    """The submit or the adopt was taken."""
    _accepted(request, now_s)


def _accepted(request: LiveRequest, now_s: float) -> None:
    attempt = request.upstream.current
    attempt.heard_s = now_s
    if request.state is State.LEAVING:
        request.abandon()
    elif request.state is State.ADOPTING:
        request.takeovers += 1
        request.found()
    else:
        attempt.is_accepted = True
        _unplaced(request)


def _unplaced(request: LiveRequest) -> None:
    """The router keeps the request in its queue, at first or again."""
    if not request.upstream.current.has_tokens:
        request.upstream.current.placement = None


def on_placement(request: LiveRequest, row: attach.Placement, now_s: float) -> None:
    """The router chose replicas; the last choice counts. Without a replica: it took the last choice back."""
    request.upstream.current.heard_s = now_s
    if not (row.prefill_replica or row.decode_replica):
        _unplaced(request)
        return
    request.upstream.current.placement = row
    request.hub.schedule(request)  # it may be silent for less time than in the queue


def on_start(request: LiveRequest, row: attach.Start, now_s: float) -> None:
    """An engine has the attempt."""
    attempt = request.upstream.current
    attempt.is_started, attempt.replica_queue_us, attempt.heard_s = True, row.queue_us, now_s


def on_transfer(request: LiveRequest, row: attach.Transfer, now_s: float) -> None:
    """The KV blocks moved."""
    request.upstream.current.transfer_us = row.transfer_us
    request.upstream.current.heard_s = now_s


def on_first_token(request: LiveRequest, row: attach.FirstToken, now_s: float) -> None:
    """The attempt's first token, with what its prompt cost."""
    attempt = request.upstream.current
    if attempt.first_token is None:
        attempt.first_token = row
        request.progress.count_prompt(attempt, row)
    logprobs = frames.pack_logprobs((row.logprob,)) if row.HasField("logprob") else b""
    token = frames.pack_ids((row.token_id,))
    on_tokens(request, frames.Row(row.slot, row.position, 1, token, logprobs), now_s)


def on_tokens(request: LiveRequest, row: frames.Row, now_s: float) -> None:
    """Tokens of the open slot: what is known is dropped, a gap ends the attempt."""
    if request.end is not None:
        return
    if request.state is State.ADOPTING:
        _accepted(request, now_s)
    progress, attempt = request.progress, request.upstream.current
    is_first = not attempt.has_tokens
    attempt.is_started = attempt.has_tokens = True
    attempt.heard_s = now_s
    try:
        if not progress.add(row, now_s):
            return
    except token_log.Gap:
        request.upstream.cancel(attach.Cancel.REASON_SUPERSEDED)
        request.again(faults.GAP, now_s, untouched=False)
        return
    except TokenError:  # a replica of an earlier release: the others check their engine's ids themselves
        request.upstream.cancel(attach.Cancel.REASON_ABANDONED)
        _on_verdict(request, faults.INVALID_TOKEN, attempt.decode_replica, now_s)
        return
    request.retry_state.on_progress()
    if request.upstream.contested:
        cross_check.on_progress(request, now_s)
    if is_first:
        request.hub.schedule(request)
    if progress.output.stop_string is not None:
        request.finish(pb.FINISH_REASON_STOP_STRING, now_s)
    elif attempt.is_anothers and len(progress.ids) >= request.spec.max_output_tokens:
        # It may have another limit than this request, and then its finish never comes.
        request.end_if_complete(now_s)
    else:
        request.on_ready()


def _has_left(request: LiveRequest) -> bool:
    """The slot just ended by the server's word: nothing is left of a request whose client is gone."""
    if request.end is not None:
        request.gone()
        return True
    if request.state is State.ADOPTING:
        request.found()
    return False


def on_finish(request: LiveRequest, row: attach.Finish, now_s: float) -> None:
    """The slot ended well; nothing behind holds anything for it any more."""
    request.upstream.detach()
    if _has_left(request):
        return
    match row.reason:
        case attach.Finish.REASON_END_TOKEN | attach.Finish.REASON_LENGTH:
            if row.end_position != len(request.progress.ids):
                request.again(faults.GAP, now_s, untouched=False)
            elif row.reason == attach.Finish.REASON_END_TOKEN:
                request.finish(pb.FINISH_REASON_END_TOKEN, now_s)
            else:
                request.finish(pb.FINISH_REASON_LENGTH, now_s)
        case attach.Finish.REASON_DEADLINE:
            request.end_by_deadline(now_s)
        case attach.Finish.REASON_SLOW_READER:
            request.end_with(End(error=faults.slow_reader(len(request.progress.ids))), now_s)
        case attach.Finish.REASON_ADOPTED:
            # Only this request adopts its attempts: an adopt through a stream that is gone came late.
            _was_stolen(request, now_s)
        case attach.Finish.REASON_SUPERSEDED if request.upstream.is_below():
            # A late attempt of the frontend that the client left, or a later execution: one more try tells.
            request.again(faults.SUPERSEDED, now_s, untouched=False)
        case attach.Finish.REASON_SUPERSEDED:
            request.end_with(End(error=faults.superseded()), now_s)
        case _:
            request.again("INTERNAL", now_s, untouched=False)


def _was_stolen(request: LiveRequest, now_s: float) -> None:
    """Seek the attempt as if its stream had been lost, so often and no more."""
    adoption = request.upstream.adoption
    adoption.steals += 1
    if request.location is not None and adoption.steals <= request.limits.attempts_max:
        request.seek(faults.ADOPTED, now_s)
    else:
        request.again(faults.ADOPTED, now_s, untouched=False)


def on_failure(request: LiveRequest, row: attach.Failure, now_s: float) -> None:
    """Something behind the router broke; the slot ended."""
    router = request.upstream.detach()
    attempt = request.upstream.current
    fault = faults.of_failure(row.code)
    if _has_left(request) or request.end_if_complete(now_s):
        return
    if row.code in (attach.Failure.CODE_INVALID, attach.Failure.CODE_INVALID_TOKEN):
        _on_verdict(request, fault, row.replica, now_s, is_contestable=row.contestable)
    elif (
        row.code == attach.Failure.CODE_REPLICA_LOST
        and attempt.has_tokens
        and row.replica == attempt.decode_replica != ""
        and request.hub.has_other(router)
    ):
        request.upstream.avoid = router  # perhaps only this router lost the replica
        request.seek(fault, now_s)
    else:
        request.again(fault, now_s, untouched=row.untouched and attempt.is_untouched)


def _on_verdict(
    request: LiveRequest,
    fault: str,
    replica: str,
    now_s: float,
    *,
    is_contestable: bool = False,
) -> None:
    """`replica` calls the request invalid, or made an id outside the vocabulary; the slot ended."""
    placement = request.upstream.current.placement
    role: Role = "prefill" if placement is not None and replica == placement.prefill_replica else "decode"
    if fault == faults.INVALID_TOKEN:
        error = faults.given_up("ENGINE_ERROR", len(request.attempts), len(request.progress.ids))
    else:
        error = faults.engine_refused("")
    verdict = Verdict(replica, role, fault, error, is_contestable, now_s)
    cross_check.hear(request, verdict, now_s)


def _refused_in_time(request: LiveRequest, row: attach.Refusal, now_s: float) -> None:
    """A hop behind says that the request cannot be served in time, or that its time is over."""
    spec, progress = request.spec, request.progress
    if now_s < spec.deadline_s and progress.ids and not spec.is_clients_deadline:
        # Its class lets it run on: estimates err, and what it has is its answer in the end.
        request.again(faults.INFEASIBLE, now_s, untouched=True, after_s=row.retry_after_ms / 1000)
        return
    left_s, estimate_s = spec.left_s(now_s, is_waiting=not progress.ids), row.estimate_ms / 1000
    if estimate_s and left_s > 0:
        request.upstream.current.fault = faults.INFEASIBLE
        error = faults.infeasible(left_s, estimate_s, len(progress.ids), row.retry_after_ms / 1000 or None)
        request.end_with(End(error=error), now_s)
    else:
        request.end_by_deadline(now_s)


def _may_ask_again(request: LiveRequest, row: attach.Refusal) -> bool:
    """True if an adopt was refused by a router that does not know the replica: it may have just been restarted."""
    return (
        request.state in (State.ADOPTING, State.LEAVING)
        and row.reason == attach.Refusal.REASON_NO_REPLICA
        and request.upstream.adoption.fault in (faults.ROUTER_LOST, faults.FRONTEND_LOST)
    )


def _may_outbid(request: LiveRequest) -> bool:
    """True if a higher attempt may be another frontend's that came from the same token or key and died.

    Where executions are numbered apart, a higher attempt is a later execution's.
    """
    spec = request.spec
    is_shared = (spec.is_resumed or spec.is_keyed) and not spec.is_fenced
    return is_shared and len(request.attempts) < request.limits.attempts_max


def on_refusal(request: LiveRequest, row: attach.Refusal, now_s: float) -> None:
    """The submit or the adopt was not taken; nothing is held for it."""
    was_adopting = request.state is State.ADOPTING
    router = request.upstream.detach()
    if _may_ask_again(request, row):
        request.upstream.avoid, request.retry_at_s = router, now_s + ADOPT_AGAIN_S
        request.hub.schedule(request)
        return
    if _has_left(request):
        return
    if was_adopting:
        if row.reason == attach.Refusal.REASON_SUPERSEDED and not request.upstream.is_below():
            request.end_with(End(error=faults.superseded()), now_s)
        else:
            request.give_up_adopting(now_s)
        return
    fault, after_s = faults.of_refusal(row.reason, evicted=row.evicted), row.retry_after_ms / 1000
    if row.reason == attach.Refusal.REASON_DEADLINE:
        _refused_in_time(request, row, now_s)
    elif row.reason == attach.Refusal.REASON_INVALID:
        # A fact of the replica's limits: another replica that serves it would be let past them, not contradict it.
        request.upstream.current.fault = fault
        request.end_with(End(error=faults.engine_refused(row.field)), now_s)
    elif row.reason == attach.Refusal.REASON_SUPERSEDED and not _may_outbid(request):
        request.end_with(End(error=faults.superseded()), now_s)
    elif row.reason in faults.FULL and not request.retry_state.was_taken:
        request.upstream.current.fault = fault
        request.give_up(fault, now_s, after_s=after_s)
    else:
        request.upstream.avoid = router
        request.again(fault, now_s, untouched=True, after_s=after_s)


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
"""Who takes the rows of a field of AttachResponse."""
