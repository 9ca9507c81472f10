"""The invariants that must hold after every run, whatever its fault. Pure.

INVARIANT: every request ended exactly once, complete and token-exact or with an actionable error. No client waited longer
than the watchdogs allow. No state is left behind. Retries stayed within the retry budget. Every part serves again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvmesh.errors import TABLE
from kvmesh.roles import CONTROL
from tests.chaos.cells import DUPLICATE
from tests.chaos.plan import Plan, Stream, members_of, replica_of
from tests.chaos.records import (
    CANCELLED,
    COMPLETE,
    FAILED,
    STUCK,
    Budget,
    Census,
    ColdReturn,
    Moments,
    Placing,
    Process,
    Seen,
    Violation,
)

BUGS: Final = frozenset({"INTERNAL", "ENGINE_ERROR"})
"""Typed errors that give a client no remedy."""

ACTIONABLE: Final = frozenset({*TABLE, "FRONTEND_LOST"}) - BUGS
"""Reasons of the mesh, and the one that the client library adds."""

DRAIN_S: Final = 28.0
"""A draining frontend keeps a plain client's stream for this long, or to its end."""

NO_TIME_S: Final = 1.25
"""RetryInfo of a second and its jitter of a quarter. A client with less time left gets the error at once."""

KNOWN_KEYS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"[^:]+:procs",
        r"[^:]+:kv",
        r"[^:]+:region",
        r"[^:]+:resume-secret",
        r"[^:]+:snap:[^:]+",
        r"[^:]+:snapshot",
        r"[^:]+:control:(term|rollouts|desired|snapshots|events|packages|prefixes)",
    )
)
"""Redis keys without an expiry that are allowed: one of each, or one per replica, for any number of requests."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Tolerances of the invariants."""

    silent_s: float
    """Longest wait of a client for a message: the time of the mesh's watchdogs, and of the failover."""
    deadline_early_s: float = 0.05
    """Each hop takes 5 ms off a deadline."""
    deadline_late_s: float = 2.0
    """Longest delay of a deadline error."""
    unavailable_s: float = 1.0
    """Longest time until a plain client of a killed frontend gets its error."""
    told_s: float = 5.0
    """Longest time from the return of an unavailable frontend to the error of its plain clients: the watchdogs' time."""
    on_way_s: float = 0.5
    """A request sent this long before the drain of a frontend may have met the drain."""
    takeover_s: float = 5.0
    """Longest time until a part serves after the other process of its name was killed."""
    known_engine_s: float = 2.0
    """Longest warm-up of a replica after a new start of its service alone: its engine served before."""
    found_s: float = 1.0
    """Longest time beside the warm-up: until its begin, and from its end to the first token of a probing request."""
    tasks: int = 12
    """Additional tasks: a stream between two processes costs four, and processes reconnect."""
    fds: int = 20
    """Additional file descriptors, for connections: a process keeps up to 16 to Redis, the most that it once needed."""
    resident_bytes: int = 96 << 20
    """Additional memory above a fresh process: caches fill, arenas stay. The soak finds leaks; this finds floods."""
    retry_ratio: float = 0.1
    retry_per_s: float = 3.0
    retry_burst: float = 40.0
    """Burst of the retry budget: ten seconds of `retry_per_s` and the ratio of a hundred requests."""
    repeat_ratio: float = 1.0
    """All retries of a frontend per request, and all rescheduled placements of a router per attempt, paid from the budget
    or not. A lost router costs each of its requests one, a prefill that starts no prompt each of its prompts one."""
    repeat_burst: float = 20.0
    """Allowance for a few requests that meet the fault several times."""

    def behind(self, late_s: float) -> Limits:
        """Return the limits for a runner that the machine woke with a delay of up to `late_s`."""
        return replace(
            self,
            silent_s=self.silent_s + late_s,
            deadline_late_s=self.deadline_late_s + late_s,
            unavailable_s=self.unavailable_s + late_s,
            told_s=self.told_s + late_s,
            on_way_s=self.on_way_s + late_s,
            takeover_s=self.takeover_s + late_s,
            found_s=self.found_s + late_s,
        )


LIMITS: Final = Limits(silent_s=10.0)
"""Limits of every run. The failure detectors take 3 s for a silent engine or peer, 2.5 s for a KV transfer, and 2.5 s for
a client's frontend. The rest is failover: a queue that one replica less drains, on a machine that runs the whole mesh."""


def judge(
    plan: Plan,
    truth: Mapping[int, Sequence[int]],
    seen: Sequence[Seen],
    moments: Moments,
    before: Census,
    after: Census,
    limits: Limits,
) -> list[Violation]:
    """Return all violations, those of streams first; empty if all invariants hold."""
    return [
        *judge_streams(plan, truth, seen, moments, limits),
        *judge_remains(plan, before, after, limits),
        *judge_return(plan, moments, limits),
    ]


def judge_streams(
    plan: Plan,
    truth: Mapping[int, Sequence[int]],
    seen: Sequence[Seen],
    moments: Moments,
    limits: Limits,
) -> Iterator[Violation]:
    """Yield violations of streams. Each stream of the plan has exactly one entry in `seen`."""
    ends = {one.number: one for one in seen}
    for stream in plan.streams:
        one = ends.get(stream.number)
        if one is None:
            yield Violation("HANG", f"{_name(stream)} has no record of its end")
            continue
        for broken in one.broken_rules:
            yield Violation("RULE", f"{_name(stream)}: {broken}")
        yield from _judge_tokens(stream, one, truth[stream.number])
        yield from _judge_end(plan, stream, one, moments, limits)
        yield from _judge_waits(plan, stream, one, limits)


def _judge_tokens(stream: Stream, one: Seen, want: Sequence[int]) -> Iterator[Violation]:
    have = one.ids
    for position, token in enumerate(have):
        if position >= len(want) or token != want[position]:
            wanted = want[position] if position < len(want) else "the end"
            yield Violation("TOKENS", f"{_name(stream)}: {token} at {position} where {wanted} is right")
            return
    if one.end == COMPLETE and len(have) < len(want):
        yield Violation(
            "TOKENS",
            f"{_name(stream)}: ended as {one.finish_reason or 'complete'} after {len(have)} of {len(want)} tokens",
        )


def _judge_end(
    plan: Plan, stream: Stream, one: Seen, moments: Moments, limits: Limits
) -> Iterator[Violation]:
    name, lived_s = _name(stream), one.ended_s - one.sent_s
    if one.end == STUCK:
        yield Violation("HANG", f"{name} had not ended after {lived_s:.1f} s, {len(one.ids)} tokens in")
    elif one.end == CANCELLED and stream.cancel_s is None:
        yield Violation("LOST", f"{name} was cancelled without its client's request")
    elif one.end == FAILED and is_deadline(stream, one):
        assert stream.deadline_s is not None
        # A refusal for a deadline that cannot be met comes while time is left, before any work.
        is_early = (
            lived_s < stream.deadline_s - limits.deadline_early_s and one.reason != "INFEASIBLE_DEADLINE"
        )
        if one.code == "DEADLINE_EXCEEDED" and is_early:
            yield Violation(
                "DEADLINE",
                f"{name}: {one.reason} after {lived_s:.2f} of {stream.deadline_s:.2f} s: {one.text}",
            )
        if lived_s > stream.deadline_s + limits.deadline_late_s:
            yield Violation(
                "DEADLINE", f"{name}: the deadline error came {lived_s - stream.deadline_s:.1f} s late"
            )
    elif one.end == FAILED:
        yield from _judge_failure(plan, stream, one, moments, limits)


def _judge_failure(
    plan: Plan, stream: Stream, one: Seen, moments: Moments, limits: Limits
) -> Iterator[Violation]:
    name = _name(stream)
    how = f"{one.code} {one.reason or 'without a reason'} after {len(one.ids)} tokens: {one.text}"
    if stream.deadline_s is not None:
        how += f" ({stream.deadline_s - (one.ended_s - one.sent_s):.2f} s before its deadline)"
    if not is_excused(plan, stream, one, moments, limits):
        yield Violation("LOST", f"{name}: {how}")
        return
    if one.reason and one.reason not in ACTIONABLE:
        yield Violation("UNTYPED", f"{name}: {how}")
    late_s = one.ended_s - moments.fault_s
    if plan.run.cell.fault == "kill" and one.was_live(moments.fault_s) and late_s > limits.unavailable_s:
        yield Violation("LATE", f"{name}: {one.code} only {late_s:.2f} s after its frontend was killed")


def is_deadline(stream: Stream, one: Seen) -> bool:
    """True if the client's own deadline ended the stream, or left no time to wait for RetryInfo."""
    if one.end != FAILED or stream.deadline_s is None:
        return False
    if one.code == "DEADLINE_EXCEEDED":
        return True
    left_s = stream.deadline_s - (one.ended_s - one.sent_s)
    return one.code == "UNAVAILABLE" and one.reason in ACTIONABLE and left_s < NO_TIME_S


def is_excused(plan: Plan, stream: Stream, one: Seen, moments: Moments, limits: Limits) -> bool:
    """True if the failure is by design: a plain client's own frontend was unavailable, and the client got UNAVAILABLE.

    That holds from the fault to the return of the frontend; the client gets the error a little later. A slow frontend
    stays available. A draining one keeps its streams and refuses new ones.
    """
    fault = plan.run.cell.fault
    is_own = (
        plan.run.cell.part == "frontend" and stream.is_plain and plan.target == f"frontend-{stream.frontend}"
    )
    was_away = (
        one.sent_s <= moments.returned_s
        and moments.fault_s <= one.ended_s <= moments.returned_s + limits.told_s
    )
    if one.code != "UNAVAILABLE" or not (is_own and was_away):
        return False
    if fault == "term":
        is_drained = one.reason == "DRAINING" and one.ended_s - moments.fault_s >= DRAIN_S
        is_refused = one.reason in ("", "DRAINING") and not one.ids
        return is_drained or (is_refused and one.sent_s >= moments.fault_s - limits.on_way_s)
    return fault in ("kill", "pause", "cut")


def _judge_waits(plan: Plan, stream: Stream, one: Seen, limits: Limits) -> Iterator[Violation]:
    wait_s, since_s = one.longest_wait
    limit_s = limits.silent_s
    if stream.is_plain and plan.target == f"frontend-{stream.frontend}":
        # No other frontend can reach this client while its own is unavailable.
        limit_s += plan.away_s
    if wait_s > limit_s:
        yield Violation(
            "SILENCE",
            f"{_name(stream)}: {wait_s:.1f} s without a message from {since_s:.1f} s on; {limit_s:g} s is the limit",
        )


def judge_remains(plan: Plan, before: Census, after: Census, limits: Limits) -> Iterator[Violation]:
    """Yield state that the run left behind in the mesh, compared to an earlier moment without requests."""
    for what, count in after.held.items():
        yield Violation("LEAK", f"{what}: {count}")
    for name, old in before.processes.items():
        new = after.processes.get(name)
        if new is None or not new.is_serving:
            yield Violation("NOT_SERVING", f"{name} does not answer health any more")
            continue
        may_differ = name in members_of(plan.target) and plan.run.cell.ends_the_part
        if new.life != old.life and not may_differ:
            yield Violation("RESTART", f"{name} restarted without an order: {old.life} became {new.life}")
        alike = peers(before, name)
        for what, was, now, slack in (
            ("tasks", most(one.tasks for one in alike), new.tasks, limits.tasks),
            ("file descriptors", most(one.fds for one in alike), new.fds, limits.fds),
            (
                "bytes of memory",
                most(one.resident_bytes for one in alike),
                new.resident_bytes,
                limits.resident_bytes,
            ),
        ):
            if was is not None and now is not None and now > was + slack:
                yield Violation("LEAK", f"{name}: {now} {what}, {was} before; {slack} more are allowed")
    for key in after.keys_for_good:
        if not any(pattern.fullmatch(key) for pattern in KNOWN_KEYS):
            yield Violation("LEAK", f"the Redis key {key} never expires")
    yield from _judge_rollout(before, after)
    yield from _judge_retries(before, after, limits)


def peers(before: Census, name: str) -> list[Process]:
    """Return the process before the run. Of a control process all of them: another one may lead now.

    The leader has the streams of all receivers.
    """
    if not name.startswith(CONTROL):
        return [before.processes[name]]
    return [process for peer, process in before.processes.items() if peer.startswith(CONTROL)]


def most(values: Iterable[int | None]) -> int | None:
    """Return the largest known value. None: none is known."""
    return max((value for value in values if value is not None), default=None)


def _judge_rollout(before: Census, after: Census) -> Iterator[Violation]:
    """Yield a violation if the rollout under way has changed, or if receivers hold different snapshots.

    No fault touches the canary, so no fault may take the rollout back.
    """
    if not before.rollout:
        return
    if after.rollout != before.rollout:
        yield Violation("ROLLOUT", f"{before.rollout} before, {after.rollout or 'nothing'} now")
    held = sorted(set(after.snapshots.values()))
    if len(held) > 1:
        names = ", ".join(
            f"{name} {snapshot or 'none'}" for name, snapshot in sorted(after.snapshots.items())
        )
        yield Violation("SNAPSHOTS", f"receivers hold {len(held)} snapshots: {names}")


def _judge_retries(before: Census, after: Census, limits: Limits) -> Iterator[Violation]:
    seconds = after.at_s - before.at_s
    for name, now in after.budgets.items():
        was = before.budgets.get(name)
        if was is None or now.requests < was.requests:
            was = Budget(0, 0)  # the frontend restarted
        requests, retries = now.requests - was.requests, now.retries - was.retries
        allowed = limits.retry_burst + limits.retry_ratio * requests + limits.retry_per_s * seconds
        if retries > allowed:
            yield Violation(
                "RETRIES",
                f"{name}: {retries} for {requests} requests in {seconds:.0f} s; {allowed:.0f} are allowed",
            )
        yield from _judge_repeats(
            name, "retries", now.all_retries - was.all_retries, "requests", requests, limits
        )
    for name, placing in after.placings.items():
        old = before.placings.get(name)
        if old is None or placing.attempts < old.attempts:
            old = Placing(0, 0)
        again, attempts = (
            placing.rescheduled_requests - old.rescheduled_requests,
            placing.attempts - old.attempts,
        )
        yield from _judge_repeats(name, "placements again", again, "attempts", attempts, limits)


def _judge_repeats(
    name: str, what: str, repeats: int, of: str, count: int, limits: Limits
) -> Iterator[Violation]:
    """Yield a violation if work was tried again more than once on average, paid from a budget or not."""
    allowed = limits.repeat_burst + limits.repeat_ratio * count
    if repeats > allowed:
        yield Violation("RETRIES", f"{name}: {repeats} {what} for {count} {of}; {allowed:.0f} are allowed")


def judge_return(plan: Plan, moments: Moments, limits: Limits) -> Iterator[Violation]:
    """Yield a violation if the part served late after a duplicate of its name, or was not used again."""
    took_s = moments.returned_s - moments.mended_s
    if plan.run.cell.fault == DUPLICATE and took_s > limits.takeover_s:
        yield Violation(
            "LATE", f"{plan.target} serves {took_s:.1f} s after the other process of its name was killed"
        )
    if moments.served_s is None:
        yield Violation("NOT_READMITTED", f"{plan.target} came back, but serves no request")


def judge_cold(plan: Plan, cold: ColdReturn, moments: Moments, limits: Limits) -> Iterator[Violation]:
    """Yield a violation if a fresh engine was not held, a user met a held replica, or it came into use too late."""
    target, ends = plan.target, plan.run.cell.ends_the_part
    is_fresh = ends and target != replica_of(target)
    if is_fresh and not cold.held_looks:
        yield Violation("NOT_HELD", f"{target} came back cold, and was not held")
    for what in cold.placed:
        yield Violation("PLACED", f"{what} while it is held")
    bound_s = limits.found_s + (limits.known_engine_s if ends and not is_fresh else cold.bound_s)
    took_s = None if moments.served_s is None else moments.served_s - moments.returned_s
    if took_s is not None and took_s > bound_s:
        yield Violation(
            "LATE", f"{target} is in use {took_s:.1f} s after its return; {bound_s:g} s is the limit"
        )


def _name(stream: Stream) -> str:
    kind = "plain stream" if stream.is_plain else "stream"
    return f"{kind} {stream.number} ({stream.phase} the fault)"
