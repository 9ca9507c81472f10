"""Judges an attack: memory, legitimate calls and their tokens, every process, and state left behind. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tests.abuse.attack import Bounds
from tests.abuse.bystanders import Call
from tests.abuse.records import Evidence
from tests.chaos.judge import KNOWN_KEYS, LIMITS, most, peers
from tests.chaos.records import Census

TASKS_MORE = LIMITS.tasks
"""Allowed asyncio tasks above the number before the attack: connections inside the mesh may be new."""

FDS_MORE = LIMITS.fds


def judge(bounds: Bounds, evidence: Evidence, *, is_short: bool) -> list[str]:
    """Return all violations; empty if the mesh withstood the attack. The short form judges no times."""
    return [
        *evidence.outcome.violations,
        *_judge_calls(bounds, evidence, is_short=is_short),
        *_judge_memory(bounds, evidence),
        *judge_remains(bounds, evidence.before, evidence.after),
        *_judge_words(evidence),
    ]


def p99_s(calls: list[Call]) -> float | None:
    """Return the 99th percentile of the times of `calls`, the largest of fewer than 100."""
    times = sorted(call.ended_s - call.sent_s for call in calls)
    return times[min(len(times) - 1, len(times) * 99 // 100)] if times else None


def late_s(evidence: Evidence) -> float:
    """Return the longest delay with which the machine woke the legitimate clients, as they reported it."""
    return max((call.late_s for call in evidence.calls), default=0.0)


def _judge_calls(bounds: Bounds, evidence: Evidence, *, is_short: bool) -> Iterator[str]:
    calls = evidence.calls
    answered = [call for call in calls if call.code == "OK"]
    failed = [call for call in calls if call.code != "OK" and call.reason not in bounds.refusals]
    if not calls:
        yield "no legitimate call was made: the attack proves nothing"
    elif len(calls) - len(failed) < bounds.answered * len(calls):
        reasons = sorted({f"{call.code} {call.reason} {call.text[:80]}".strip() for call in failed})
        yield f"{len(answered)} of {len(calls)} legitimate calls were answered: {'; '.join(reasons[:4])}"
    for call in calls:
        right = list(evidence.truth[call.number])
        if call.ids != (right if call.code == "OK" else right[: len(call.ids)]):
            yield f"legitimate call {call.number} got wrong tokens"
    slowest = p99_s(answered)
    bound_s = bounds.p99_s + late_s(evidence)
    if not is_short and slowest is not None and slowest > bound_s:
        yield f"p99 of legitimate calls {slowest:.2f} s; {bound_s:.2f} s is the bound"


def _judge_memory(bounds: Bounds, evidence: Evidence) -> Iterator[str]:
    for name, start in evidence.start_mb.items():
        peak, after = evidence.peak_mb.get(name, 0.0), evidence.after_mb.get(name, 0.0)
        if _is_service(name) and peak > bounds.peak_mb:
            yield f"{name}: {peak:.0f} MB of memory at its peak, {start:.0f} before; {bounds.peak_mb:g} is the bound"
        if not _is_service(name) and peak > start + bounds.engine_growth_mb:
            more = bounds.engine_growth_mb
            yield f"{name}: {peak:.0f} MB of memory at its peak, {start:.0f} before; {more:g} more are allowed"
        if after > start + bounds.after_mb:
            yield f"{name}: {after:.0f} MB of memory after it, {start:.0f} before; {bounds.after_mb:g} more are allowed"


def judge_remains(bounds: Bounds, before: Census, after: Census) -> Iterator[str]:
    """Yield differences from the mesh before the attack: processes, tasks, descriptors, keys without an expiry."""
    if not before.processes:
        yield "the mesh did not answer before the attack: it proves nothing"
    for name, old in before.processes.items():
        new = after.processes.get(name)
        if new is None or (bounds.is_whole and not new.is_serving):
            yield f"{name} does not serve any more"
            continue
        if bounds.is_whole and new.life != old.life:
            yield f"{name} was restarted"
        alike = peers(before, name)
        for what, was, now, more in (
            ("tasks", most(one.tasks for one in alike), new.tasks, TASKS_MORE),
            ("file descriptors", most(one.fds for one in alike), new.fds, FDS_MORE),
        ):
            if was is not None and now is not None and now > was + more:
                yield f"{name}: {now} {what}, {was} before; {more} more are allowed"
    for key in after.keys_for_good:
        if not any(pattern.fullmatch(key) for pattern in KNOWN_KEYS):
            yield f"the Redis key {key} never expires"


def _judge_words(evidence: Evidence) -> Iterator[str]:
    if evidence.still_held:
        yield f"still held afterwards: {evidence.still_held}"
    for line in evidence.tracebacks[:3]:
        yield f"a traceback in a log: {line[:300]}"


def _is_service(name: str) -> bool:
    return name != "redis" and not name.endswith("-engine")
