"""The verdict as documents and screens have it: the golden prompts' gate, and what a step lacks, in plain words."""

from __future__ import annotations

import pytest

from controlplane.judging import GOLDEN, Judging, missing, with_golden
from controlplane.rollouts import verdict as verdicts
from controlplane.rollouts.document import RolloutDocument
from controlplane.rollouts.judge.gates.errors import need_few_errors
from controlplane.rollouts.judge.samples import ErrorCounts
from controlplane.rollouts.judge.settings import JudgeSettings
from controlplane.rollouts.view import GoldenFacts, GoldenState
from tests.unit.controlplane.rollouts.facts import in_state

T0 = 1_800_000_000.0


def judged(document: RolloutDocument) -> verdicts.Verdict:
    """Return the verdict of a step without any observation."""
    judging = Judging(document, T0)
    judging.follow(document, T0)
    return judging.verdict(T0 + 1)


def golden(verdict: verdicts.Verdict) -> verdicts.Gate:
    """Return the gate of the golden prompts."""
    (found,) = (gate for gate in verdict.gates if gate.name == GOLDEN)
    return found


@pytest.mark.parametrize(
    ("facts", "result", "reason"),
    [
        (
            GoldenFacts(1, GoldenState.GREEN),
            "passes",
            "the golden prompts of this step have the expected tokens",
        ),
        (GoldenFacts(1, GoldenState.MISSING), "needs more", "the runs of this step have not ended"),
        (GoldenFacts(1, GoldenState.RED, "prompt 3 differs"), "fails", "prompt 3 differs"),
    ],
)
def test_the_golden_gate_shows_the_result_by_which_the_rollout_is_decided(
    facts: GoldenFacts, result: str, reason: str
) -> None:
    """The kind of the verdict stays the judge's."""
    verdict = judged(in_state("BAKING"))
    shown = with_golden(verdict, facts)
    assert (golden(shown).result, golden(shown).reason) == (result, reason)
    assert shown.kind is verdict.kind
    assert [gate for gate in shown.gates if gate.name != GOLDEN] == [
        gate for gate in verdict.gates if gate.name != GOLDEN
    ]


def test_a_missing_bound_is_told_in_plain_words() -> None:
    """It names the gate, the samples that are there, and the figure beside its bound."""
    few = need_few_errors(ErrorCounts(50), ErrorCounts(400), JudgeSettings())
    assert missing(few) == (
        "errors: 50 of about 187 canary sessions without an error; upper 99 % bound of the difference is 0.08991, and "
        "below 0.025 is needed"
    )
    none = need_few_errors(ErrorCounts(0), ErrorCounts(0), JudgeSettings())
    assert missing(none) == "errors: an arm has no sessions with an outcome"
