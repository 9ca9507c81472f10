"""The invariants: what must be true after every run, whatever was broken in it. Pure.

Every request ended exactly once, complete and token-exact, or with an error its client may act on; nobody waited longer
than the watchdogs allow; nothing is left behind; retries stayed inside their budget; everybody serves again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvmesh.errors import TABLE
from tests.chaos.cells import DUPLICATE
from tests.chaos.plan import Plan, Stream
from tests.chaos.records import (
    CANCELLED,
    COMPLETE,
    FAILED,
    STUCK,
    Budget,
    Census,
    Moments,
    Placing,
    Seen,
    Violation,
)

BUGS: Final = frozenset({"INTERNAL", "ENGINE_ERROR"})
"""Typed, but nothing a client can act on."""

ACTIONABLE: Final = frozenset({*TABLE, "FRONTEND_LOST"}) - BUGS
"""Reasons of the mesh, and the one of the client's own."""

DRAIN_S: Final = 28.0
"""A plain client keeps the stream it has at a frontend that drains for this long, or to its end."""

NO_TIME_S: Final = 1.25
"""A client that is asked to come back in a second, and a quarter by chance, and has less than that, is told so at once."""

KNOWN_KEYS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"[^:]+:procs",
        r"[^:]+:kv",
        r"[^:]+:resume-secret",
        r"[^:]+:snap:[^:]+",
    )
)
"""Redis keys that may live for good: there is one of each, or one per replica, however many requests came."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of what is still fine."""

    silent_s: float
    """Longest wait of a client for anything, while the mesh's watchdogs work: what they allow, and the way to go on."""
    deadline_early_s: float = 0.05
    """Each hop takes 5 ms off a deadline."""
    deadline_late_s: float = 2.0
    """A client may learn of its deadline this much later."""
    unavailable_s: float = 1.0
    """A plain client whose frontend was killed knows within this time."""
    told_s: float = 5.0
    """A plain client of a frontend that was away is told so at most this long after its return: the watchdogs' time."""
    on_way_s: float = 0.5
    """A request that was sent this long before a frontend began to drain may have met the drain."""
    takeover_s: float = 5.0
    """A part is listed and serves at most this long after the other process of its name was killed."""
    tasks: int = 12
    """More tasks than before: a stream between two processes costs four, and they reconnect."""
    fds: int = 20
    """More file descriptors than before, for connections: a process holds up to 16 to Redis, as many as it once needed."""
    resident_bytes: int = 96 << 20
    """More memory than when it was fresh: caches fill, arenas stay. Leaks show in the soak; here only floods do."""
    retry_ratio: float = 0.1
    retry_per_s: float = 3.0
    retry_burst: float = 40.0
    """Retries saved up: ten seconds of the trickle and the ratio of a hundred requests."""
    repeat_ratio: float = 1.0
    """All retries of a frontend per request, and all placements again of a router per attempt, paid from the budget or
    not: a lost router costs each of its requests one, a prefill that starts nothing each of its prompts one."""
    repeat_burst: float = 20.0
    """So that a few requests that meet the fault several times are no violation."""

    def behind(self, late_s: float) -> Limits:
        """Return the limits for a runner that the machine woke up to `late_s` late."""
        return replace(
            self,
            silent_s=self.silent_s + late_s,
            deadline_late_s=self.deadline_late_s + late_s,
            unavailable_s=self.unavailable_s + late_s,
            told_s=self.told_s + late_s,
            on_way_s=self.on_way_s + late_s,
            takeover_s=self.takeover_s + late_s,
        )


LIMITS: Final = Limits(silent_s=10.0)
"""What every run is held to. The watchdogs: 3 s for an engine or a peer that says nothing, 2.5 s for a transfer of KV,
2.5 s for a client's frontend; on top the way to go on, behind a queue that one replica less works off, on a machine
that does all of it."""


def judge(
    plan: Plan,
    truth: Mapping[int, Sequence[int]],
    seen: Sequence[Seen],
    moments: Moments,
    before: Census,
    after: Census,
    limits: Limits,
) -> list[Violation]:
    """Return everything that is wrong, streams first; empty if all invariants hold."""
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
    """Yield what is wrong with streams. Each of the plan has exactly one entry in `seen`."""
    ends = {one.number: one for one in seen}
    for stream in plan.streams:
        one = ends.get(stream.number)
        if one is None:
            yield Violation("HANG", f"{_name(stream)} was never heard of again")
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
        yield Violation("LOST", f"{name} was cancelled, and not by its client")
    elif one.end == FAILED and is_deadline(stream, one):
        assert stream.deadline_s is not None
        # Refused because it cannot be done any more: that is told while there is time left, and nothing is begun.
        is_early = (
            lived_s < stream.deadline_s - limits.deadline_early_s and one.reason != "INFEASIBLE_DEADLINE"
        )
        if one.code == "DEADLINE_EXCEEDED" and is_early:
            yield Violation(
                "DEADLINE",
                f"{name}: {one.reason} after {lived_s:.2f} of {stream.deadline_s:.2f} s: {one.text}",
            )
        if lived_s > stream.deadline_s + limits.deadline_late_s:
            yield Violation("DEADLINE", f"{name}: told {lived_s - stream.deadline_s:.1f} s late")
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
    """True if the client's own deadline ended the stream, or was so near that there was no time to wait for the mesh."""
    if one.end != FAILED or stream.deadline_s is None:
        return False
    if one.code == "DEADLINE_EXCEEDED":
        return True
    left_s = stream.deadline_s - (one.ended_s - one.sent_s)
    return one.code == "UNAVAILABLE" and one.reason in ACTIONABLE and left_s < NO_TIME_S


def is_excused(plan: Plan, stream: Stream, one: Seen, moments: Moments, limits: Limits) -> bool:
    """True if this failure is what must happen: a plain client's own frontend was away, and it is told UNAVAILABLE.

    Only while it was away: from the fault to the return, which a client hears of a little later. A slow frontend is not
    away at all. One that drains keeps the streams it has and refuses others.
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
        # Nobody else can speak to this client while its frontend is away.
        limit_s += plan.away_s
    if wait_s > limit_s:
        yield Violation(
            "SILENCE",
            f"{_name(stream)}: {wait_s:.1f} s without a word from {since_s:.1f} s on; {limit_s:g} s is the limit",
        )


def judge_remains(plan: Plan, before: Census, after: Census, limits: Limits) -> Iterator[Violation]:
    """Yield what the run left behind in the mesh, compared to an earlier moment without requests."""
    for what, count in after.held.items():
        yield Violation("LEAK", f"{what}: {count}")
    for name, old in before.processes.items():
        new = after.processes.get(name)
        if new is None or not new.is_serving:
            yield Violation("NOT_SERVING", f"{name} does not answer health any more")
            continue
        may_differ = name == plan.target and plan.run.cell.ends_the_part
        if new.life != old.life and not may_differ:
            yield Violation(
                "RESTART", f"{name} was started again by nobody's order: {old.life} became {new.life}"
            )
        for what, was, now, slack in (
            ("tasks", old.tasks, new.tasks, limits.tasks),
            ("file descriptors", old.fds, new.fds, limits.fds),
            ("bytes of memory", old.resident_bytes, new.resident_bytes, limits.resident_bytes),
        ):
            if was is not None and now is not None and now > was + slack:
                yield Violation("LEAK", f"{name}: {now} {what}, {was} before; {slack} more are fine")
    for key in after.keys_for_good:
        if not any(pattern.fullmatch(key) for pattern in KNOWN_KEYS):
            yield Violation("LEAK", f"the Redis key {key} never expires")
    yield from _judge_retries(before, after, limits)


def _judge_retries(before: Census, after: Census, limits: Limits) -> Iterator[Violation]:
    seconds = after.at_s - before.at_s
    for name, now in after.budgets.items():
        was = before.budgets.get(name)
        if was is None or now.requests < was.requests:
            was = Budget(0, 0)  # it was started anew
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
    """Yield a violation if work was tried again more than once on average, whoever pays for it."""
    allowed = limits.repeat_burst + limits.repeat_ratio * count
    if repeats > allowed:
        yield Violation("RETRIES", f"{name}: {repeats} {what} for {count} {of}; {allowed:.0f} are allowed")


def judge_return(plan: Plan, moments: Moments, limits: Limits) -> Iterator[Violation]:
    """Yield a violation if the part came back late, where another process had its name, or was not used again."""
    took_s = moments.returned_s - moments.mended_s
    if plan.run.cell.fault == DUPLICATE and took_s > limits.takeover_s:
        yield Violation(
            "LATE", f"{plan.target} serves {took_s:.1f} s after the other process of its name was killed"
        )
    if moments.served_s is None:
        yield Violation("NOT_READMITTED", f"{plan.target} is back and serves no request")


def _name(stream: Stream) -> str:
    kind = "plain stream" if stream.is_plain else "stream"
    return f"{kind} {stream.number} ({stream.phase} the fault)"
