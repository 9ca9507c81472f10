"""The document of a shadow: reports of frontends in any order, bounds, hostile reports."""

from __future__ import annotations

import random

import pytest

from controlplane.rollouts.document import DOCUMENT_BYTES_MAX, DocumentError
from controlplane.shadow import document as documents
from controlplane.shadow.document import DIFFERENCES_MAX, FRONTENDS_MAX, ShadowDocument, is_sound
from kvmesh.control.v1 import shadow_pb2 as pb
from tests.unit.controlplane.shadow.shadows import order, tally_of


def test_repeated_and_late_reports_change_nothing() -> None:
    """Each report has the counts since the start of its frontend: the last one counts, once."""
    draw = random.Random(1)
    reports = []
    tally = tally_of(draw, 2_000)
    for _ in range(5):
        tally.drop("late")
        reports += list(tally.report())
    document = ShadowDocument(order=order())
    for each in reports:
        document = document.with_report("frontend-0", each)
    for each in draw.sample(reports, 5):
        document = document.with_report("frontend-0", each)
    assert document.counts() == documents.summed([tally.counts]) and len(document.frontends) == 1


def test_boots_beyond_the_bound_are_added_up() -> None:
    """A frontend that restarts all day costs a bounded document, and no count is lost."""
    document, total = ShadowDocument(order=order()), 0
    for boot in range(3 * FRONTENDS_MAX):
        report = pb.ShadowReport(shadow=order().id, boot_id=f"boot-{boot}", sequence=1)
        report.counts.sampled = boot
        report.counts.target.errors["STALLED"] = 1
        total += boot
        document = document.with_report("frontend-0", report)
        assert len(document.frontends) <= FRONTENDS_MAX + 1
    assert document.counts().sampled == total
    assert document.counts().target.errors["STALLED"] == 3 * FRONTENDS_MAX


def test_bytes_keep_a_document_and_the_last_differences() -> None:
    """The latest 1,000 differences stay, with their tokens; a document that is too large loses the oldest."""
    document = ShadowDocument(order=order())
    for number in range(1, 1_501):
        report = pb.ShadowReport(shadow=order().id, boot_id="boot", sequence=number)
        report.differences.add(
            *(), number=number, request_id=f"{number:032x}", pool="next", kind="tokens", user_tokens=[1] * 16
        )
        document = document.with_report("frontend-0", report)
    assert len(document.differences) == DIFFERENCES_MAX and document.differences[-1].number == 1_500
    data = documents.encode(document)
    assert len(data) <= DOCUMENT_BYTES_MAX
    assert documents.decode(document.id, data) == document
    with pytest.raises(DocumentError, match="contradicts itself"):
        documents.decode("shadow-2", data)
    with pytest.raises(DocumentError, match="cannot be read"):
        documents.decode(document.id, data[:-5])


def _hostile() -> list[pb.ShadowReport]:
    nan = pb.ShadowReport()
    nan.counts.target.length_sum = float("nan")
    bins = pb.ShadowReport()
    bins.counts.latency.ttft[2_000_000] = 1
    names = pb.ShadowReport()
    names.counts.dropped["x" * 300] = 1
    escape = pb.ShadowReport()
    escape.counts.target.errors["\x1b[2J"] = 1
    large = pb.ShadowReport(off_reason="x" * (256 << 10))
    rate = pb.ShadowReport()
    rate.counts.target.differences = 5
    shares = pb.ShadowReport()
    shares.counts.baseline.error_sessions = 5
    row = pb.ShadowReport()
    row.differences.add(request_id="\x1b[2J")
    return [nan, bins, names, escape, large, rate, shares, row]


@pytest.mark.parametrize("number", range(len(_hostile())))
def test_an_unsound_report_is_ignored(number: int) -> None:
    """A frontend of another release, or a broken one, cannot break the leader or its terminal."""
    report = _hostile()[number]
    document = ShadowDocument(order=order())
    assert not is_sound(report) and document.with_report("frontend-0", report) is document
