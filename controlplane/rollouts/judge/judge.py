"""The judge of a rollout: takes observations and events, and looks at them at planned sample sizes. Pure.

The owner calls `begin_step` with each step, `weigh` with each weight of the canary, `observe` with each batch, also
before the first step, `note` with each event, and `look` about each second. A comparison is made only when a look is
due; gates without a comparison are evaluated by every call. A verdict FAIL is final.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from controlplane.rollouts.judge import comparison
from controlplane.rollouts.judge.comparison import Arms
from controlplane.rollouts.judge.events import (
    Ejection,
    Event,
    MemoryReading,
    ReplicaBoot,
)
from controlplane.rollouts.judge.evidence import RecentStable, StepEvidence
from controlplane.rollouts.judge.frontends import SILENCE_S, Frontends
from controlplane.rollouts.judge.gates.hang import judge_hang, open_counts
from controlplane.rollouts.judge.gates.replica_facts import ReplicaFacts
from controlplane.rollouts.judge.observation import (
    CANARY,
    STABLE,
    TRACKS,
    Batch,
    OpenRequest,
    Track,
)
from controlplane.rollouts.judge.refusal import check_batch, check_event
from controlplane.rollouts.judge.samples import OpenBySession, open_by_session
from controlplane.rollouts.judge.session import session_key
from controlplane.rollouts.judge.settings import JudgeSettings, Step
from controlplane.rollouts.judge.track import TrackStatistics
from controlplane.rollouts.judge.verdict import (
    ArmReport,
    GateReport,
    GateState,
    Need,
    Status,
    Verdict,
    VerdictKind,
)

THIN_MIN: Final = 128
"""Sessions of a track that always stay."""

CARRIED_MAX: Final = 8
"""Finished steps before 50 % that are kept, the latest."""


class JudgeState(msgspec.Struct):
    """All that a new leader needs to continue, in the rollout's document. Open requests come with the next batches."""

    evidence: StepEvidence | None = None
    clock_s: float = 0.0
    """Time at which the state was saved."""
    baked_s: float = 0.0
    looks: int = 0
    """Spent in this step."""
    next_look: int = 0
    """Canary sessions of the step."""
    compared: list[GateReport] = []
    """Gates of the last look in this step."""
    needs: list[Need] = []
    failed: Verdict | None = None
    carried: list[StepEvidence] = []
    """Finished steps before 50 %."""
    recent: RecentStable = msgspec.field(default_factory=RecentStable)
    earlier: TrackStatistics | None = None
    """Stable before the steps above 50 %."""
    frontends: Frontends = msgspec.field(default_factory=Frontends)
    facts: ReplicaFacts = msgspec.field(default_factory=ReplicaFacts)


class Judge:
    """Judges one rollout."""

    def __init__(
        self, settings: JudgeSettings, state: JudgeState | None = None, *, now_s: float = 0.0
    ) -> None:
        """Start, or continue from the `state` that another leader has saved."""
        self._settings = settings
        self._state = JudgeState() if state is None else state
        self._counted_s = now_s
        self._open: dict[str, tuple[OpenRequest, ...]] = {}

    def save(self, now_s: float) -> JudgeState:
        """Return the state, for the document. It is live: encode it before the next call."""
        self._bake(now_s)
        self._state.clock_s = now_s
        return self._state

    def thin(self) -> bool:
        """Keep half of the sessions, a uniform sample, so that the state gets smaller. False: they are few already."""
        state = self._state
        kept = [each.statistics for each in state.recent.slices]
        for evidence in (*state.carried, *((state.evidence,) if state.evidence is not None else ())):
            kept += evidence.tracks.values()
        if state.earlier is not None:
            kept.append(state.earlier)
        largest = max((len(each.sessions) for each in kept), default=0) // 2
        if largest < THIN_MIN:
            return False
        for each in kept:
            each.sessions_max = min(each.sessions_max, largest)
            each.trim(each.sessions_max)
        return True

    @property
    def has_failed(self) -> bool:
        """Whether a look gave the verdict FAIL. No step begins after it."""
        return self._state.failed is not None

    def recent_sessions(self) -> int:
        """Return the stable sessions of the last 10 minutes, at least: the comparison arm above 50 %."""
        return self._state.recent.session_count()

    def recent_seconds(self) -> int:
        """Return the seconds in which a request of those sessions ended."""
        return self._state.recent.second_count()

    def begin_step(self, step: Step, now_s: float) -> None:
        """Begin a step with a sample of its own. Raises ValueError after a verdict FAIL."""
        state = self._state
        if state.failed is not None:
            raise ValueError(f"step {step.index} cannot begin: {state.failed.reason}")
        if state.evidence is not None and state.evidence.step.is_before_half:
            state.carried = [*state.carried, state.evidence.carried()][-CARRIED_MAX:]
        state.earlier = state.recent.merged(self._settings.sessions_max) if step.is_past_half else None
        state.evidence = StepEvidence.begin(step, now_s, self._settings.sessions_max)
        state.baked_s, self._counted_s = 0.0, now_s
        state.looks, state.next_look = 0, self._settings.look_after(0)
        state.compared, state.needs = [], []

    def weigh(self, weight_percent: float, now_s: float) -> None:
        """Take the weight of the canary. Another one begins the samples of the step anew, but not its time and its looks.

        Raises ValueError before the first step.
        """
        state = self._state
        if self._begun().weigh(weight_percent, now_s) and state.failed is None:
            state.next_look = self._settings.look_after(0)
            state.compared, state.needs = [], []

    def observe(self, batch: Batch, now_s: float) -> None:
        """Take a batch. Raises ObservationError, and takes nothing of it, if a field is out of range."""
        check_batch(batch)
        self.take(batch, now_s)

    def take(self, batch: Batch, now_s: float) -> None:
        """Take a batch that `check_batch` has passed. A batch that has counted before changes nothing."""
        lost = self._state.frontends.take(batch, now_s)
        if lost is None:
            return
        self._open[batch.frontend] = batch.open_requests
        evidence = self._state.evidence
        keys = [session_key(end.session) for end in batch.ends]
        if evidence is not None:
            evidence.add(batch, keys, lost)
        is_past_half = evidence is not None and evidence.step.is_past_half
        for key, end in zip(keys, batch.ends, strict=True):
            if end.track == STABLE and not is_past_half:
                self._state.recent.add(key, end)

    def note(self, event: Event) -> None:
        """Take an event about a replica. Raises ObservationError if a field is out of range."""
        check_event(event)
        facts = self._state.facts
        match event:
            case ReplicaBoot():
                facts.add_boot(event)
            case Ejection():
                facts.add_ejection(event)
            case MemoryReading():
                if self._state.evidence is not None:
                    self._state.evidence.memory.add(event)

    def look(self, now_s: float) -> Verdict:
        """Return the verdict; spend a look if one is due. Raises ValueError before the first step."""
        state, evidence = self._state, self._begun()
        self._bake(now_s)
        if state.failed is not None:
            return state.failed
        sessions = evidence.track(CANARY).session_count()
        is_due = sessions >= state.next_look
        waiting = self._waiting(now_s) if is_due else {}
        arms = self._arms(waiting)
        if is_due:
            state.looks += 1
            state.next_look = self._settings.look_after(sessions)
            compared = comparison.judge(evidence, arms, waiting, self._settings)
            state.compared = [self._doubted(report, now_s) for report in compared]
            state.needs = comparison.needs(state.carried, evidence, arms, self._settings)
        verdict = self._verdict(arms, now_s, is_look=is_due)
        if verdict.kind == VerdictKind.FAIL:
            state.failed = verdict
        return verdict

    def status(self, now_s: float) -> Status:
        """Return what `rollout status` shows. It spends no look. Raises ValueError before the first step."""
        state, evidence = self._state, self._begun()
        self._bake(now_s)
        sessions = evidence.track(CANARY).session_count()
        return Status(
            verdict=state.failed or self._verdict(self._arms({}), now_s, is_look=False),
            arms=self._arm_reports(now_s),
            next_look_sessions=state.next_look,
            missing_sessions=max(0, state.next_look - sessions),
            since_observation_s=state.frontends.since_last_s(now_s),
            silent_frontends=state.frontends.silent(now_s),
        )

    def confirmed(self) -> dict[str, int]:
        """Return the last batch of each frontend. Confirm it once the saved state is written."""
        return {name: last.number for name, last in self._state.frontends.seen.items()}

    def _begun(self) -> StepEvidence:
        if self._state.evidence is None:
            raise ValueError("no step has begun")
        return self._state.evidence

    def _arms(self, waiting: Mapping[str, OpenBySession]) -> Arms:
        earlier = self._state.earlier or TrackStatistics(1)
        return comparison.choose(self._begun(), earlier, waiting, self._settings)

    def _bake(self, now_s: float) -> None:
        self._state.baked_s += max(0.0, now_s - self._counted_s)
        self._counted_s = now_s

    def _open_requests(self, track: Track, now_s: float) -> Iterator[OpenRequest]:
        """Yield the open requests of a track, but those of silent frontends."""
        silent = self._state.frontends.silent(now_s)
        for frontend, requests in self._open.items():
            if frontend not in silent:
                yield from (request for request in requests if request.track == track)

    def _waiting(self, now_s: float) -> dict[str, OpenBySession]:
        age_max_s = now_s - self._begun().began_s
        return {track: open_by_session(self._open_requests(track, now_s), age_max_s) for track in TRACKS}

    def _doubted(self, report: GateReport, now_s: float) -> GateReport:
        """Return a gate with a comparison, inconclusive instead of failing if too many observations are missing."""
        coverage = self._begun().coverage(self._state.frontends.since_last_s(now_s), SILENCE_S)
        if report.state != GateState.FAIL or coverage.state == GateState.PASS:
            return report
        return replace(report, state=GateState.INCONCLUSIVE, reason=f"{coverage.reason}; {report.reason}")

    def _immediate(self, now_s: float) -> list[GateReport]:
        """Return the gates that need no look."""
        state, evidence = self._state, self._begun()
        age_s = self._settings.hang_age_s
        canary = open_counts(self._open_requests(CANARY, now_s), age_s)
        others = [
            request for track in TRACKS if track != CANARY for request in self._open_requests(track, now_s)
        ]
        return [
            evidence.coverage(state.frontends.since_last_s(now_s), SILENCE_S),
            judge_hang(canary, open_counts(others, age_s), self._settings),
            *state.facts.reports(now_s),
            evidence.memory.report(self._settings),
        ]

    def _verdict(self, arms: Arms, now_s: float, *, is_look: bool) -> Verdict:
        state, evidence = self._state, self._begun()
        gates = [*self._immediate(now_s), *state.compared]
        kind, reason = self._kind(gates, evidence)
        return Verdict(
            kind=kind,
            at_s=now_s,
            step=evidence.step.index,
            weight_percent=evidence.step.weight_percent,
            baked_s=state.baked_s,
            looks=state.looks,
            is_look=is_look,
            comparison=arms.name,
            is_weaker=arms.is_weaker,
            arms=self._arm_reports(now_s),
            gates=tuple(gates),
            needs=tuple(state.needs),
            reason=reason,
        )

    def _kind(self, gates: list[GateReport], evidence: StepEvidence) -> tuple[VerdictKind, str]:
        for state, kind in _KINDS:
            told = [f"{gate.gate}: {gate.reason}" for gate in gates if gate.state == state]
            if told:
                return kind, "; ".join(told)
        if not self._state.compared:
            sessions = evidence.track(CANARY).session_count()
            return (
                VerdictKind.NEEDS_MORE,
                f"{sessions} of {self._state.next_look} canary sessions for the first look at this weight",
            )
        looks = self._state.looks
        return VerdictKind.PASS, f"no gate fails after {looks} look{'' if looks == 1 else 's'}"

    def _arm_reports(self, now_s: float) -> tuple[ArmReport, ...]:
        return tuple(self._arm_report(track, now_s) for track in TRACKS)

    def _arm_report(self, track: Track, now_s: float) -> ArmReport:
        evidence = self._begun()
        statistics, tally = evidence.track(track), evidence.tallies[track]
        totals = statistics.requests
        number = totals.ok + totals.client + totals.failed
        return ArmReport(
            track=track,
            sessions=statistics.session_count(),
            ok=totals.ok,
            client=totals.client,
            failed=totals.failed,
            error_sessions=statistics.error_session_count(),
            open=sum(1 for _ in self._open_requests(track, now_s)),
            dropped=tally.dropped,
            output_tokens_mean=totals.output_tokens / number if number else None,
            finish_reasons=tuple(sorted(totals.finish_reasons.items())),
        )


_KINDS: Final = (
    (GateState.FAIL, VerdictKind.FAIL),
    (GateState.INCONCLUSIVE, VerdictKind.INCONCLUSIVE),
    (GateState.NEEDS_MORE, VerdictKind.NEEDS_MORE),
)
