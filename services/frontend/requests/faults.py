"""Faults of attempts, from refusals and failures behind the frontend, and the errors that a client gets at the end.

Pure. Faults have the names of the protocol: "REPLICA_LOST", "QUEUE_FULL". The frontend adds names of its own, such as
"ROUTER_LOST" and "ADOPTED".
"""

from __future__ import annotations

import math
from typing import Final

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.errors import TABLE, MeshError
from services.frontend.requests.progress import Progress
from services.frontend.requests.request_spec import RequestSpec

ROUTER_LOST: Final = "ROUTER_LOST"
NO_ROUTER: Final = "NO_ROUTER"
NO_REPLICA: Final = "NO_REPLICA"
STALE_SNAPSHOT: Final = "STALE_SNAPSHOT"
GAP: Final = "GAP"
FRONTEND_LOST: Final = "FRONTEND_LOST"
"""The client came from another frontend."""
SILENT: Final = "SILENT"
"""The attempt was silent for longer than its watchdog allows."""
SUPERSEDED: Final = "SUPERSEDED"
INFEASIBLE: Final = "INFEASIBLE_DEADLINE"
INVALID_TOKEN: Final = "INVALID_TOKEN"
"""The engine made a token id outside the vocabulary."""
ADOPTED: Final = "ADOPTED"
"""A late adopt of the same request took the attempt away from its slot."""

ROUTER_GONE: Final = frozenset({ROUTER_LOST, "DRAINING"})
"""The router that had the request died, or drains. A retry after such a fault takes nothing from the retry budget."""

POOL_GONE: Final = frozenset({NO_ROUTER, NO_REPLICA, STALE_SNAPSHOT})
"""Faults after which another pool may serve a request that its own pool cannot."""

UNPLACEABLE: Final = frozenset(
    {pb.Refusal.REASON_NO_REPLICA, pb.Refusal.REASON_STALE_SNAPSHOT, pb.Refusal.REASON_DRAINING}
)
"""Refusals of a router that cannot place new requests."""

FULL: Final = frozenset(
    {pb.Refusal.REASON_QUEUE_FULL, pb.Refusal.REASON_KV_FULL, pb.Refusal.REASON_QUEUE_TIMEOUT}
)
"""Refusals of a mesh without capacity: an immediate retry would only add to its load."""

REGION_FULL: Final = FULL | {pb.Refusal.REASON_GRANT}
"""Refusals of a region without capacity for a request that came from another region."""

GRANT: Final = "GRANT"
"""The grant of the caller's region is used up."""

RETRY_AFTER_S: Final = 1.0
"""Retry-After without a better estimate: the interval at which processes renew their leases."""

_BUGS: Final = frozenset({"ENGINE_ERROR", "INTERNAL", "GAP"})


def of_refusal(reason: pb.Refusal.Reason.ValueType, *, evicted: bool = False) -> str:
    """Return the fault's name for a refusal; an unknown number is INTERNAL. `evicted`: evicted from a queue."""
    if evicted:
        return "SHED"
    name = pb.Refusal.Reason.Name(reason) if reason in pb.Refusal.Reason.values() else ""
    return name.removeprefix("REASON_") if reason and name else "INTERNAL"


def of_failure(code: pb.Failure.Code.ValueType) -> str:
    """Return the fault's name for a failure; an unknown number is INTERNAL."""
    name = pb.Failure.Code.Name(code) if code in pb.Failure.Code.values() else ""
    return name.removeprefix("CODE_") if code and name else "INTERNAL"


def given_up(fault: str, attempts: int, tokens_sent: int, retry_after_s: float | None = None) -> MeshError:
    """Return the error of a request that ends with `fault`, because no further attempt is allowed."""
    metadata = {"fault": fault, "attempts": str(attempts), "tokens_sent": str(tokens_sent)}
    if fault in _BUGS:
        reason = fault if fault in TABLE else "INTERNAL"
        return MeshError(reason, f"the engine or the mesh failed {attempts} times", metadata)
    if fault in TABLE:
        text = _TEXTS.get(fault, "the request cannot be served now")
        return MeshError(
            fault, f"{text}; {tokens_sent} tokens were sent", metadata, retry_after_s or RETRY_AFTER_S
        )
    return MeshError(
        "ATTEMPTS_EXHAUSTED",
        f"{attempts} attempts were lost, the last one by {fault}; {tokens_sent} tokens were sent",
        metadata,
        retry_after_s or RETRY_AFTER_S,
    )


def retries_refused(fault: str, attempts: int, tokens_sent: int) -> MeshError:
    """Return the error of a request that would be retried if the retry budget were not empty."""
    if fault in TABLE:
        return given_up(fault, attempts, tokens_sent)
    return MeshError(
        "RETRY_BUDGET_EXHAUSTED",
        f"the request was lost before it started ({fault}), and the retry budget is empty",
        {"fault": fault, "attempts": str(attempts), "tokens_sent": str(tokens_sent)},
        RETRY_AFTER_S,
    )


def deadline(
    reason: str, limit_s: float, tokens_sent: int, *, is_rest: bool = False, fault: str = ""
) -> MeshError:
    """Return the error of a request that reached its deadline. `reason`: DEADLINE or TTFT_TIMEOUT.

    `is_rest`: `limit_s` is the time left at the request's arrival; the request may have run at another frontend before.
    `fault`: the reason why the request was not running at its deadline.
    """
    what = "the first token did not come" if reason == "TTFT_TIMEOUT" else "the request did not end"
    within = f"the {limit_s:.3f} s that were left when it came here" if is_rest else f"{limit_s:.3f} s"
    why = f": {_TEXTS.get(fault) or f'its last attempt ended with {fault}'}" if fault else ""
    return MeshError(
        reason,
        f"{what} within {within}{why}; {tokens_sent} tokens were sent",
        {"tokens_sent": str(tokens_sent), "limit_s": f"{limit_s:.3f}"} | ({"fault": fault} if fault else {}),
    )


def time_over(spec: RequestSpec, progress: Progress, fault: str = "") -> MeshError:
    """Return the error of a request at its deadline, or at the deadline of its first token. `fault`: see `deadline`."""
    timing = spec.timing
    reason, until_s = "DEADLINE", timing.deadline_s
    is_waiting = progress.first_token_s is None
    if is_waiting and timing.ttft_deadline_s is not None and timing.ttft_deadline_s < until_s:
        reason, until_s = "TTFT_TIMEOUT", timing.ttft_deadline_s
    is_rest = reason == "DEADLINE" and timing.is_clients_deadline and spec.execution.is_repeatable
    return deadline(reason, until_s - timing.arrived_s, len(progress.ids), is_rest=is_rest, fault=fault)


def too_short(left_s: float, least_s: float, estimate_s: float = 0.0) -> MeshError:
    """Return the error of a request with less than `least_s` left, the least time with which any request starts.

    `estimate_s`: measured time until the first token, or 0 without a measurement. An estimate above `least_s` is reported
    instead.
    """
    if estimate_s > least_s:
        return infeasible(left_s, estimate_s)
    left_ms = math.floor(max(0.0, left_s) * 1000 + 1e-6)
    return MeshError(
        INFEASIBLE,
        f"deadline too short: {left_ms / 1000:.3f} s left, at least {least_s:.3f} s needed"
        f" (frontend.start_min_s); 0 tokens were sent",
        {"start_min_ms": f"{least_s * 1000:.0f}", "remaining_ms": str(left_ms), "tokens_sent": "0"},
    )


def infeasible(
    left_s: float, estimate_s: float, tokens_sent: int = 0, retry_after_s: float | None = None
) -> MeshError:
    """Return the error of a request that is not started: less time is left than the first token needs."""
    left_s = max(0.0, left_s)
    return MeshError(
        "INFEASIBLE_DEADLINE",
        f"deadline too short: {left_s:.3f} s left, {estimate_s:.3f} s estimated until the first token;"
        f" {tokens_sent} tokens were sent",
        {
            "estimate_ms": f"{estimate_s * 1000:.0f}",
            "remaining_ms": f"{left_s * 1000:.0f}",
            "tokens_sent": str(tokens_sent),
        },
        retry_after_s,
    )


def engine_refused(field: str) -> MeshError:
    """Return the error of a request that no engine of the mesh takes, even if it is sent again."""
    metadata = {"field": field} if field else {}
    what = f"the engine refuses {field} of this request" if field else "the engine refuses this request"
    return MeshError("ENGINE_REFUSED", f"{what}; the same request will be refused again", metadata)


def region_unavailable(pinned: tuple[str, ...]) -> MeshError:
    """Return the error of a request that no region may take which can. `pinned`: the tenant's regions; empty: any."""
    if not pinned:
        text = "this region cannot serve the request now, and sends guests nowhere else"
        return MeshError("REGION_UNAVAILABLE", text, {}, RETRY_AFTER_S)
    allowed = ",".join(pinned)
    text = f"the tenant is pinned to the regions {allowed}, and none of them can serve the request here now"
    return MeshError("REGION_UNAVAILABLE", text, {"regions": allowed}, RETRY_AFTER_S)


def slow_reader(tokens_sent: int) -> MeshError:
    """Return the error of a client that did not read."""
    return MeshError(
        "SLOW_READER",
        f"the stream was not read for too long; {tokens_sent} tokens were sent",
        {"tokens_sent": str(tokens_sent)},
        RETRY_AFTER_S,
    )


def draining(tokens_sent: int) -> MeshError:
    """Return the error of a stream that another frontend can continue: its running attempt waits for a takeover."""
    return MeshError(
        "DRAINING",
        f"the frontend is shutting down; {tokens_sent} tokens were sent; resume at another frontend",
        {"tokens_sent": str(tokens_sent)},
        retry_after_s=0.1,
    )


def superseded() -> MeshError:
    """Return the error of a stream with a request that was resumed on another stream."""
    return MeshError("SUPERSEDED", "the request was resumed on another stream and continues there")


_TEXTS: Final = {
    "QUEUE_FULL": "the mesh's queue is full",
    "QUEUE_TIMEOUT": "the request waited too long in the queue",
    "KV_FULL": "no KV cache is free",
    "SHED": "the request was evicted from the queue by more important work",
    "DRAINING": "the mesh is shutting down",
    "NO_ROUTER": "no router is reachable",
    "NO_REPLICA": "no replica serves the model now",
    "REGION_UNAVAILABLE": "the regions that may serve the request cannot serve it now",
    "STALE_SNAPSHOT": "the model version is not served any more",
}


def not_exact(why: str) -> MeshError:
    """Return the error of a request that cannot continue with the same output behind the client's last event."""
    return MeshError(
        "RESUME_NOT_EXACT", f"the request cannot go on behind Last-Event-ID: {why}", {"why": why}
    )
