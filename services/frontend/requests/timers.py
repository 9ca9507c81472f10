"""The timers of an admitted request: due times and the action of each.

Pure. One table has both, so that a request is never woken without an action.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from kvmesh.attach.v1 import attach_pb2 as attach
from kvmesh.deadlines import earliest
from services.frontend.requests import cross_check, faults
from services.frontend.requests.request import LiveRequest
from services.frontend.requests.state import State

Action: TypeAlias = Callable[[LiveRequest, float], None]
Timer: TypeAlias = tuple[float | None, Action]
"""Due time, or None for a timer that is not set, and the action at that time."""


def wake_s(request: LiveRequest) -> float | None:
    """Return the time at which `fire` has an action for `request`."""
    return earliest(*[at_s for at_s, _ in of(request)])


def fire(request: LiveRequest, now_s: float) -> None:
    """Run the most important due action of `request`."""
    for at_s, act in of(request):
        if at_s is not None and now_s >= at_s:
            act(request, now_s)
            return


def of(request: LiveRequest) -> tuple[Timer, ...]:
    """Return the timers of `request`, the most important first."""
    if request.state is State.ENDED:
        return ()
    takeover_until_s = request.upstream.takeover.until_s
    if request.outcome is not None:
        return (takeover_until_s, _stop_takeover), (request.retry_at_s, _ask)
    spec, is_waiting = request.spec, request.progress.first_token_s is None
    return (
        (spec.timing.deadline_s, _time_over),
        (spec.timing.ttft_deadline_s if is_waiting else None, _time_over),
        (takeover_until_s, _takeover_failed),
        (_silent_s(request), _too_silent),
        (request.retry_at_s, _ask),
        (request.router_until_s, _no_router),
    )


def _silent_s(request: LiveRequest) -> float | None:
    """Return the time at which the silence of the current attempt is too long (failure detector)."""
    if request.state is not State.ATTACHED:
        return None
    is_full = len(request.progress.ids) >= request.progress.window_end
    return request.limits.watchdog.due_s(request.upstream.current, is_full=is_full)


def _stop_takeover(request: LiveRequest, _: float) -> None:
    request.abandon()


def _time_over(request: LiveRequest, now_s: float) -> None:
    request.end_by_deadline(now_s)


def _takeover_failed(request: LiveRequest, now_s: float) -> None:
    request.upstream.cancel(attach.Cancel.REASON_SUPERSEDED)
    request.give_up_takeover(now_s)


def _too_silent(request: LiveRequest, now_s: float) -> None:
    upstream = request.upstream
    upstream.avoid = upstream.cancel(attach.Cancel.REASON_SUPERSEDED)
    upstream.current.failed_replica = upstream.current.serving_replica
    request.try_again(faults.SILENT, now_s, untouched=upstream.current.is_untouched)


def _ask(request: LiveRequest, now_s: float) -> None:
    request.retry_at_s = None
    pending = request.upstream.pending_verdict
    if pending is not None:
        cross_check.on_verdict(request, pending, now_s)
    elif request.state is State.WAITING:
        request.submit(now_s)
    else:
        request.take_over(now_s)


def _no_router(request: LiveRequest, now_s: float) -> None:
    request.router_wait_over(now_s)
