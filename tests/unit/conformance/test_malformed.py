"""Answers that cannot be read, or have no end: each check has its row, and nothing is left in the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engines.contract.outputs import RequestOutput
from kvmesh.conformance import judgements, recording
from kvmesh.conformance.check import Check
from kvmesh.conformance.checks.all_checks import all_checks
from kvmesh.conformance.recording import Recording
from kvmesh.conformance.trial import Trial
from kvmesh.conformance.verdict import Judged, Outcome, Verdict, failed, passed
from kvmesh.triton.errors import EngineError
from tests.unit.conformance import runs
from tests.unit.conformance.fake_server import FakeServer, Stream
from tests.unit.conformance.runs import CANCELS, run

EMPTY = Recording(is_final=True)


@pytest.mark.parametrize(
    "judge",
    [
        lambda: judgements.logprobs(EMPTY, 8),
        lambda: judgements.top_logprobs(EMPTY, 2),
        lambda: judgements.end_token_of(()),
        lambda: judgements.deltas((1, 2), [EMPTY, EMPTY], [EMPTY, EMPTY], 0),
        lambda: judgements.streaming([EMPTY], 8),
    ],
)
def test_an_empty_answer_fails(judge: Callable[[], Any]) -> None:
    """With a sentence, and no judgement passes it."""
    try:
        verdict = judge()
    except Judged as judged:
        verdict = judged.verdict
    assert verdict.outcome is Outcome.FAIL and verdict.why


def test_an_empty_answer_goes_on_nowhere() -> None:
    """Nothing behind nothing is no resume."""
    assert judgements.resumed((), 0, EMPTY) == "the answer is empty"


class Malformed(FakeServer):
    """Each response of a call has an output of a wrong size."""

    at = 0

    def response(self, stream: Stream, output: RequestOutput) -> Any:
        made = super().response(stream, output)
        made.raw_output_contents[self.at] = made.raw_output_contents[self.at] + b"?"
        return made


class WrongReuse(FakeServer):
    """kv_cache_reused_blocks has 8 bytes."""

    def response(self, stream: Stream, output: RequestOutput) -> Any:
        made = super().response(stream, output)
        for at, each in enumerate(made.outputs):
            if each.name == "kv_cache_reused_blocks":
                made.raw_output_contents[at] = bytes(8)
        return made


class Empty(FakeServer):
    """Each answer ends at once, without a token."""

    def response(self, stream: Stream, output: RequestOutput) -> Any:
        made = super().response(stream, output)
        made.raw_output_contents[0] = b""
        return made


@pytest.mark.parametrize("server", [Malformed, WrongReuse, Empty])
def test_bad_answers_fail_and_keep_the_table(server: type[FakeServer]) -> None:
    """Every check has its row, and those of bad input do not take a malformed response for a refusal."""
    rows, engine = run(server, pair=server)
    assert len(rows) == len(all_checks(CANCELS)) and engine.is_empty()
    found = runs.failed(rows)
    assert "streaming: several responses before the end" in found and "finish: length" in found
    assert "cannot read" not in " ".join(found.values())
    if server is not Empty:
        assert "malformed response: " in found["finish: length"]
        assert found["streaming: several responses before the end"].startswith("EngineError: malformed")


class Endless(FakeServer):
    """A call has one response after the other, and no end."""

    sent = 0

    def send(self, stream: Stream, output: RequestOutput) -> None:
        self.sent += 1
        output.is_final = False
        for _ in range(40):
            super().send(stream, output)


@pytest.mark.parametrize(("name", "most"), [("RESPONSES_MAX", 60), ("BYTES_MAX", 4000)])
def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    """Beyond a count or a size the call is cancelled and the check fails with a sentence."""
    monkeypatch.setattr(recording, name, most)
    checks = tuple(each for each in all_checks(CANCELS) if each.name in ("length", "an empty prompt"))
    rows, engine = run(Endless, checks=checks)
    found = runs.failed(rows)
    assert "one call got " in found["finish: length"] and "allowed are " in found["finish: length"]
    assert engine.is_empty()


def test_a_recording_is_bounded() -> None:
    """By count and by bytes, also where each response is small or a single one is large."""
    server, stream = FakeServer("a:1"), Stream(FakeServer("b:1"), [], "r", {})
    made = Recording()
    small = server.response(stream, RequestOutput(tokens=[1]))
    with pytest.raises(EngineError, match="one call got 10,001 responses"):
        for _ in range(2 * recording.RESPONSES_MAX):
            made.add(small)
    with pytest.raises(EngineError, match="allowed are 10,000 responses and 8 MiB"):
        Recording().add(server.response(stream, RequestOutput(tokens=[1] * (recording.BYTES_MAX // 4))))


def _raises(error: Exception) -> Callable[[Trial], Awaitable[Verdict]]:
    async def check(_: Trial) -> Verdict:
        raise error

    return check


async def _passes(_: Trial) -> Verdict:
    return passed("it ran")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ZeroDivisionError("by zero"), "the check cannot read what came: ZeroDivisionError: by zero"),
        (ExceptionGroup("tasks", [KeyError("boot")]), "the check cannot read what came: KeyError: 'boot'"),
        (ExceptionGroup("tasks", [EngineError("gone")]), "EngineError: gone"),
        (ExceptionGroup("tasks", [Judged(failed("so"))]), "so"),
    ],
)
def test_any_error_of_a_check_is_a_row(error: Exception, why: str) -> None:
    """With its type; the checks behind it run."""
    checks = (Check("one", "raises", _raises(error)), Check("two", "passes", _passes))
    rows, _ = run(checks=checks)
    assert [(row.verdict.outcome, row.verdict.why) for row in rows] == [
        (Outcome.FAIL, why),
        (Outcome.PASS, "it ran"),
    ]
