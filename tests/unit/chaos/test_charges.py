"""Charges: exactly what complete streams cost, between what was seen and all of it for others; else a violation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.cells import FAULTS, PARTS
from tests.chaos.charges import bounds_of, judge_charges
from tests.chaos.plan import probe_of
from tests.chaos.records import COMPLETE, Seen
from tests.unit.chaos.runs import Judged, good_run


def kinds(run: Judged, settled: int, probes: int = 0) -> set[str]:
    """Return the kinds of violation if so many tokens were settled, `probes` requests of 130 + 2 tokens beside."""
    after = replace(run.after, settled={"frontend-0": settled, "frontend-1": 500})
    before = replace(run.before, settled={"frontend-0": 0, "frontend-1": 500})
    probed = [(probe_of(run.plan.run, number, 0), None) for number in range(probes)]
    found = judge_charges(run.plan, run.truth, list(run.seen.values()), probed, before, after)
    return {violation.kind for violation in found}


def range_of(run: Judged) -> tuple[int, int]:
    """Return the least and the most that the streams of `run` cost."""
    bounds = [
        bounds_of(each, run.seen[each.number], len(run.truth[each.number])) for each in run.plan.streams
    ]
    return sum(low for low, _ in bounds), sum(high for _, high in bounds)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_token_too_few_or_too_many_is_seen(part: str, fault: str) -> None:
    """In every cell but those in which the counters, or what was settled, end with their process."""
    for seed in (1, 2):
        run = good_run(part, fault, seed)
        low, high = range_of(run)
        forgets = part in ("frontend", "redis") and fault in ("kill", "term")
        assert kinds(run, low) == kinds(run, high) == set()
        assert kinds(run, low - 1) == kinds(run, high + 1) == (set() if forgets else {"CHARGED"})


def test_streams_that_complete_leave_no_room() -> None:
    """All of the prompt, all of the output, once."""
    run = good_run()
    for stream in run.plan.streams:
        one = run.seen[stream.number]
        one.end, one.ids = COMPLETE, run.truth[stream.number]
    low, high = range_of(run)
    assert low == high == sum(len(each.prompt) + each.max_output_tokens for each in run.plan.streams)


def test_a_stream_that_ended_early_is_charged_what_was_seen() -> None:
    """Its last message too; one without tokens may be free."""
    run = good_run()
    stream = run.plan.streams[0]
    cost = len(stream.prompt)
    for count, low in ((0, 0), (1, cost + 1), (9, cost + 9)):
        one = Seen(stream.number, 0.0, ids=run.truth[stream.number][:count])
        assert bounds_of(stream, one, 260) == (low, cost + 260)


def test_cancelled_probes_may_cost_all_or_nothing() -> None:
    """Each widens the range by its prompt and its output."""
    run = good_run()
    _, high = range_of(run)
    assert kinds(run, high + 3 * 132, probes=3) == set()
    assert kinds(run, high + 3 * 132 + 1, probes=3) == {"CHARGED"}
