"""Judges charging exactly once: the tokens settled by the frontends equal the cost of the streams of a run. Pure.

A completed stream costs its prompt and its output, to the token, through any number of frontends. A stream that ended
early costs at least the tokens that its client saw, and at most all of it. The counters of an ended frontend are lost:
runs that end a frontend or Redis are not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tests.chaos.plan import Plan, Stream
from tests.chaos.records import COMPLETE, Census, Seen, Violation


def judge_charges(
    plan: Plan,
    truth: Mapping[int, Sequence[int]],
    seen: Sequence[Seen],
    probes: Iterable[tuple[Stream, Seen | None]],
    before: Census,
    after: Census,
) -> Iterator[Violation]:
    """Yield a violation if the tokens settled between two censuses are not those of the streams and of `probes`.

    A probe without Seen was cancelled: its progress is unknown.
    """
    if plan.run.cell.part in ("frontend", "redis") and plan.run.cell.ends_the_part:
        return
    ends = {one.number: one for one in seen}
    bounds = [bounds_of(each, ends.get(each.number), len(truth[each.number])) for each in plan.streams]
    bounds += [bounds_of(stream, one, stream.max_output_tokens) for stream, one in probes]
    least, most = sum(low for low, _ in bounds), sum(high for _, high in bounds)
    settled = sum(after.settled.values()) - sum(before.settled.values())
    if not least <= settled <= most:
        yield Violation("CHARGED", f"{settled} tokens were settled; the streams cost {least} to {most}")


def bounds_of(stream: Stream, one: Seen | None, output_tokens: int) -> tuple[int, int]:
    """Return the least and the most tokens that `stream` may be charged, prompt and output together."""
    most = len(stream.prompt) + output_tokens
    if one is None:
        return 0, most
    if one.end == COMPLETE:
        return len(stream.prompt) + len(one.ids), len(stream.prompt) + len(one.ids)
    return (len(stream.prompt) + len(one.ids) if one.ids else 0), most
