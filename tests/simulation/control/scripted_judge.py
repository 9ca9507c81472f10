"""A judge and golden prompts with scripted answers."""

from __future__ import annotations

from collections.abc import Iterable

from controlplane.actions import RunGolden
from controlplane.judging import Judging
from controlplane.rollouts.document import RolloutDocument
from controlplane.rollouts.verdict import TrackSamples, Verdict, VerdictKind
from controlplane.rollouts.view import GoldenFacts, GoldenState
from kvmesh.membership.member import Member


class ScriptedJudge(Judging):
    """A judge that passes each step after a few seconds, or fails the rollout at one step."""

    fails_at: int = 0
    passes_after_s: float = 3.0

    def __init__(self, document: RolloutDocument, now_s: float) -> None:
        super().__init__(document, now_s)
        self._began_s = now_s

    def follow(self, document: RolloutDocument, now_s: float) -> None:
        """Begin a new step."""
        if document.step != self.step:
            self._began_s = now_s
        super().follow(document, now_s)

    def lost_batches(self, now_s: float) -> int:
        """Return the batches of observations that are missing in this step."""
        evidence = self._judge.save(now_s).evidence
        return evidence.lost_batches if evidence is not None else 0

    def verdict(self, now_s: float) -> Verdict:
        """Return the scripted verdict."""
        if not self.step:
            stable = TrackSamples(track="stable", sessions=1000, seconds=1000)
            return Verdict(kind=VerdictKind.NONE, samples=(stable,))
        if 0 < self.fails_at <= self.step:
            return Verdict(kind=VerdictKind.FAIL, reason="scripted")
        if abs(now_s - self._began_s) < self.passes_after_s:
            return Verdict(kind=VerdictKind.NEEDS_MORE, reason="scripted")
        return Verdict(kind=VerdictKind.PASS, reason="scripted")


class GreenGolden:
    """Golden prompts that pass."""

    def due(self, document: RolloutDocument, members: Iterable[Member], now_s: float) -> list[RunGolden]:
        """Return nothing to run."""
        return []

    def facts(self, document: RolloutDocument) -> GoldenFacts:
        """Return a pass for the present step."""
        return GoldenFacts(document.step, GoldenState.GREEN)
