"""Cross-checks the verdict of one engine on a second replica of its role, and ends the request with a final verdict.

Pure. A refusal by the limits of a replica is no verdict: it is final. The first verdict of a role is tested by another
attempt at another replica of that role. The upper half of the retry budget pays for the attempt. A verdict of the second
replica is final. If the second replica serves the request, the first verdict is contradicted. The frontend then notifies
all routers, which count a failure of the first replica. A verdict that is not contradicted counts as no failure (decision
0024).

    first verdict of R ──► contested (R is doubted, or the budget pays) ──► another verdict: confirmed, final
            │                    ▲                                    └──► tokens: contradicted, R is doubted
            ├──► waits while a verdict of R is contested ─────────────┘
            └──► final: no other replica, no execution left, or none of these
"""

from __future__ import annotations

from typing import Final

from services.frontend.requests.outcome import Outcome
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.verdicts import Verdict, Verdicts

WAIT_S: Final = 2.0
"""Longest wait of a verdict for the cross-check of another request."""

CHECK_INTERVAL_S: Final = 0.05
"""Interval at which a waiting verdict checks for the result."""


def on_verdict(request: LiveRequest, verdict: Verdict, now_s: float) -> None:
    """Cross-check `verdict`, let it wait, or end `request` with the verdict's error. The slot of `request` is closed."""
    upstream, known = request.upstream, request.hub.verdicts
    before = upstream.cross_checked.get(verdict.role)
    has_waited, upstream.pending_verdict = upstream.pending_verdict is not None, None
    may_wait = known.is_undecided(verdict.replica, now_s) and now_s - verdict.at_s < WAIT_S
    if before is not None and before.replica != verdict.replica:
        known.confirmed(before.replica, now_s)
    elif verdict.can_cross_check and request.retry_state.executions_left:
        is_paid = known.is_doubted(verdict.replica, now_s)
        if is_paid or (not (has_waited and may_wait) and request.hub.take_spare_retry(now_s)):
            _begin(request, verdict, now_s)
            return
        if may_wait:
            upstream.pending_verdict = verdict
            request.pause(verdict.fault, now_s + CHECK_INTERVAL_S)
            return
        known.unpaid_total += 1
    upstream.current.fault = verdict.fault
    request.end_with(Outcome(error=verdict.error), now_s)


def _begin(request: LiveRequest, verdict: Verdict, now_s: float) -> None:
    request.upstream.cross_checked[verdict.role] = verdict
    request.hub.verdicts.opened(request, verdict.replica)
    request.cross_check(verdict.fault, now_s)


def on_progress(request: LiveRequest, now_s: float) -> None:
    """Handle new tokens of an attempt that tests verdicts: verdicts of roles that made a token are contradicted.

    The prefill replica of an attempt, if there is one, makes its first token. The decode replica makes all others.
    """
    upstream, attempt = request.upstream, request.upstream.current
    placement = attempt.placement
    if placement is None:
        return
    made = len(request.progress.ids) - attempt.start_position
    for verdict in list(upstream.cross_checked.values()):
        if made < 1 + (verdict.role == "decode" and bool(placement.prefill_replica)):
            continue
        del upstream.cross_checked[verdict.role]
        request.hub.verdicts.closed(request, verdict.replica)
        made_by = (attempt.crossing(placement.prefill_replica), attempt.crossing(placement.decode_replica))
        if verdict.replica not in made_by:
            request.hub.verdicts.contradicted(verdict.replica, now_s)
            request.hub.contradict(request.spec, verdict, now_s)


def close(request: LiveRequest) -> None:
    """Note that `request` no longer tests a verdict."""
    while request.upstream.cross_checked:
        _, verdict = request.upstream.cross_checked.popitem()
        request.hub.verdicts.closed(request, verdict.replica)


def assert_consistent(known: Verdicts[LiveRequest]) -> None:
    """Raise AssertionError if a request is listed as the tester of a verdict that it does not have."""
    for replica, testers in known.testers.items():
        assert testers, f"{replica} is tested by no request"
        for request in testers:
            names = {verdict.replica for verdict in request.upstream.cross_checked.values()}
            assert request.outcome is None and replica in names, request
