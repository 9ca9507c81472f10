"""What follows from each row that a router sends for a live request.

Pure. Rows come from the open slot alone; each function takes one kind of them.
"""

from __future__ import annotations

from kvmesh.attach import frames, token_log
from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.inference.v1 import inference_pb2 as pb
from services.frontend import faults
from services.frontend.adoption import ADOPT_AGAIN_S
from services.frontend.end import End
from services.frontend.progress import TokenError
from services.frontend.request import LiveRequest, State


def on_acceptance(request: LiveRequest, _: attach.Acceptance, now_s: float) -> None:
    """The submit or the adopt was taken."""
    request.accepted(now_s)


def on_placement(request: LiveRequest, row: attach.Placement, now_s: float) -> None:
    """The router chose replicas; the last choice counts. Without a replica: it took the last choice back."""
    request.attempts[-1].heard_s = now_s
    if not (row.prefill_replica or row.decode_replica):
        request.unplaced()
        return
    request.attempts[-1].placement = row
    request.hub.schedule(request)  # it may be silent for less time than in the queue


def on_start(request: LiveRequest, row: attach.Start, now_s: float) -> None:
    """An engine has the attempt."""
    attempt = request.attempts[-1]
    attempt.is_started, attempt.replica_queue_us, attempt.heard_s = True, row.queue_us, now_s


def on_transfer(request: LiveRequest, row: attach.Transfer, now_s: float) -> None:
    """The KV blocks moved."""
    request.attempts[-1].transfer_us = row.transfer_us
    request.attempts[-1].heard_s = now_s


def on_first_token(request: LiveRequest, row: attach.FirstToken, now_s: float) -> None:
    """The attempt's first token, with what its prompt cost."""
    attempt = request.attempts[-1]
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
        request.accepted(now_s)
    progress, attempt = request.progress, request.attempts[-1]
    is_first = not attempt.has_tokens
    attempt.is_started = attempt.has_tokens = True
    attempt.heard_s = now_s
    try:
        if not progress.add(row, now_s):
            return
    except token_log.Gap:
        request.attached.cancel(attach.Cancel.REASON_SUPERSEDED)
        request.again(faults.GAP, now_s, untouched=False)
        return
    except TokenError:
        error = faults.given_up("ENGINE_ERROR", len(request.attempts), len(progress.ids))
        request.end_with(End(error=error), now_s, attach.Cancel.REASON_ABANDONED)
        return
    request.tries.on_progress()
    if is_first:
        request.hub.schedule(request)
    if progress.output.stop_string is not None:
        request.finish(pb.FINISH_REASON_STOP_STRING, now_s, attach.Cancel.REASON_COMPLETE)
    else:
        request.on_ready()


def on_finish(request: LiveRequest, row: attach.Finish, now_s: float) -> None:
    """The slot ended well; nothing behind holds anything for it any more."""
    request.attached.detach()
    if request.has_left():
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
            request.was_stolen(now_s)
        case attach.Finish.REASON_SUPERSEDED if request.is_below():
            # A late attempt of the frontend that the client left, or a later execution: one more try tells.
            request.again(faults.SUPERSEDED, now_s, untouched=False)
        case attach.Finish.REASON_SUPERSEDED:
            request.end_with(End(error=faults.superseded()), now_s)
        case _:
            request.again("INTERNAL", now_s, untouched=False)


def on_failure(request: LiveRequest, row: attach.Failure, now_s: float) -> None:
    """Something behind the router broke; the slot ended."""
    router = request.attached.detach()
    attempt = request.attempts[-1]
    fault = faults.of_failure(row.code)
    if request.has_left() or request.end_if_complete(now_s):
        return
    if row.code == attach.Failure.CODE_INVALID:
        request.end_with(End(error=faults.engine_refused("")), now_s)
    elif (
        row.code == attach.Failure.CODE_REPLICA_LOST
        and attempt.has_tokens
        and row.replica == attempt.decode_replica != ""
        and request.hub.has_other(router)
    ):
        request.avoid = router  # perhaps only this router lost the replica
        request.seek(fault, now_s)
    else:
        request.again(fault, now_s, untouched=row.untouched and attempt.is_untouched)


def _refused_in_time(request: LiveRequest, row: attach.Refusal, now_s: float) -> None:
    """A hop behind says that the request cannot be served in time, or that its time is over."""
    order, progress = request.order, request.progress
    if now_s < order.deadline_s and progress.ids and not order.is_clients_deadline:
        # Its class lets it run on: estimates err, and what it has is its answer in the end.
        request.again(faults.INFEASIBLE, now_s, untouched=True, after_s=row.retry_after_ms / 1000)
        return
    left_s, estimate_s = order.left_s(now_s, is_waiting=not progress.ids), row.estimate_ms / 1000
    if estimate_s and left_s > 0:
        request.attempts[-1].fault = faults.INFEASIBLE
        error = faults.infeasible(left_s, estimate_s, len(progress.ids), row.retry_after_ms / 1000 or None)
        request.end_with(End(error=error), now_s)
    else:
        request.end_by_deadline(now_s)


def on_refusal(request: LiveRequest, row: attach.Refusal, now_s: float) -> None:
    """The submit or the adopt was not taken; nothing is held for it."""
    was_adopting = request.state is State.ADOPTING
    router = request.attached.detach()
    if request.may_ask_again(row):
        request.avoid, request.retry_at_s = router, now_s + ADOPT_AGAIN_S
        request.hub.schedule(request)
        return
    if request.has_left():
        return
    if was_adopting:
        if row.reason == attach.Refusal.REASON_SUPERSEDED and not request.is_below():
            request.end_with(End(error=faults.superseded()), now_s)
        else:
            request.give_up_adopting(now_s)
        return
    fault, after_s = faults.of_refusal(row.reason, evicted=row.evicted), row.retry_after_ms / 1000
    if row.reason == attach.Refusal.REASON_DEADLINE:
        _refused_in_time(request, row, now_s)
    elif row.reason == attach.Refusal.REASON_INVALID:
        request.end_with(End(error=faults.engine_refused(row.field)), now_s)
    elif row.reason == attach.Refusal.REASON_SUPERSEDED and not request.may_outbid():
        request.end_with(End(error=faults.superseded()), now_s)
    elif row.reason in faults.FULL and not request.tries.was_taken:
        request.attempts[-1].fault = fault
        error = faults.given_up(fault, len(request.attempts), len(request.progress.ids), after_s)
        request.end_with(End(error=error), now_s)
    else:
        request.avoid = router
        request.again(fault, now_s, untouched=True, after_s=after_s)
