"""The judge of the running rollout, fed with the observations of frontends and the facts of replicas. Pure.

Times are seconds of the leader's clock, near Unix time, so that a new leader continues with the state of the last one.
The judge gets them without the clock's steps back.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping
from typing import Final, TypedDict

import msgspec
from msgspec.structs import replace

from controlplane.observing import batch_of
from controlplane.pools.registry import Boot
from controlplane.rollouts import verdict as verdicts
from controlplane.rollouts.document import WEIGHTED, RolloutDocument
from controlplane.rollouts.judge import judge as judging
from controlplane.rollouts.judge.events import Ejection, Event, MemoryReading, ReplicaBoot
from controlplane.rollouts.judge.gates.leak import GATE as LEAK
from controlplane.rollouts.judge.judge import Judge, JudgeState
from controlplane.rollouts.judge.observation import STABLE, Track
from controlplane.rollouts.judge.refusal import ObservationError
from controlplane.rollouts.judge.settings import MIB, JudgeSettings, Step
from controlplane.rollouts.judge.steady_clock import SteadyClock
from controlplane.rollouts.judge.verdict import GateState, Need, Verdict, VerdictKind
from controlplane.rollouts.view import GoldenFacts, GoldenState
from controlplane.rollouts.weights import baseline_target
from controlplane.snapshots.receivers import RECEIVERS_MAX, Receiver
from kvmesh.control.v1 import snapshot_pb2 as pb

SAVE_S: Final = 5.0
"""Longest time between two savings of the judge's state. A new leader gets what is younger from the frontends again."""

STATE_BYTES_MAX: Final = 16 << 20
"""Largest state of a judge, before its compression. A larger one is not read."""

TEXT_BYTES_MAX: Final = 512 << 10
"""Largest state of a judge in a document. A larger one is thinned out: it keeps fewer sessions, chosen by hash."""

EJECTIONS_MAX: Final = 8
"""Ejections of one report that are counted. Two fail a rollout."""

_KINDS: Final = {
    VerdictKind.PASS: verdicts.VerdictKind.PASS,
    VerdictKind.NEEDS_MORE: verdicts.VerdictKind.NEEDS_MORE,
    VerdictKind.FAIL: verdicts.VerdictKind.FAIL,
    VerdictKind.INCONCLUSIVE: verdicts.VerdictKind.INCONCLUSIVE,
}
GOLDEN: Final = "golden"
"""Gate of the golden prompts."""

_GOLDEN: Final = {
    GoldenState.GREEN: ("passes", "the golden prompts of this step have the expected tokens"),
    GoldenState.RED: ("fails", "a golden prompt differs"),
    GoldenState.MISSING: ("needs more", "the runs of this step have not ended"),
}
_RESULTS: Final = {
    GateState.PASS: "passes",
    GateState.FAIL: "fails",
    GateState.NEEDS_MORE: "needs more",
    GateState.INCONCLUSIVE: "inconclusive",
    GateState.NOT_APPLICABLE: "reported",
}
_PERCENT: Final = 100.0
_UNITS: Final = {
    "errors": (_PERCENT, "% of sessions"),
    "errors_absolute": (_PERCENT, "% of sessions"),
    "ttft_absolute": (_PERCENT, "% of sessions"),
    "ttft": (1.0, "ratio"),
    "gap": (1.0, "ratio"),
    "computed_share": (1.0, "ratio"),
    "observations": (_PERCENT, "% missing"),
    "hang": (_PERCENT, "% of open requests"),
    "crash_loop": (1.0, "boots"),
    "ejections": (1.0, "ejections"),
    LEAK: (1.0 / MIB, "MiB"),
}
"""By gate: factor of figure and bound, and their unit."""


class Judging:
    """See the module. One for each rollout at each leader."""

    def __init__(self, document: RolloutDocument, now_s: float) -> None:
        """Continue with the judge's state in `document`; start afresh without one, or with an unreadable one."""
        self.rollout = document.id
        self.refused_total = 0
        """Batches that were out of range. The judge took nothing of them."""
        self.last_refusal = ""
        settings = document.settings
        self._settings = JudgeSettings(
            ttft_p95_max_s=settings.ttft_p95_max_s or None, error_share_max=settings.error_share_max or None
        )
        state = _state(document.judge)
        self._clock = SteadyClock(state.clock_s if state is not None else 0.0)
        self._judge = Judge(self._settings, state, now_s=self._clock.at(now_s))
        self._step = _begun(state)
        self._ejections: dict[str, int] = {}
        self._looks = 0
        self._saved = (0, 0)
        """Step and looks of the last saved state."""
        self._saved_s = float("-inf")

    @property
    def step(self) -> int:
        """Step that is judged, from 1; 0 before the first."""
        return self._step

    def follow(self, document: RolloutDocument, now_s: float) -> None:
        """Begin the step of `document` if it is a new one, and take its weight. After the verdict FAIL none begins."""
        if document.state not in WEIGHTED or self._judge.has_failed:
            return
        at_s = self._clock.at(now_s)
        if document.step != self._step:
            self._step = document.step
            settings = document.settings
            step = Step(
                document.step,
                float(document.target_percent),
                has_baseline=bool(baseline_target(document)),
                is_restricted=bool(settings.only_tenants or settings.never_tenants),
            )
            self._judge.begin_step(step, at_s)
        self._judge.weigh(float(document.weight_percent), at_s)

    def observe(
        self, message: pb.ObservationBatch, frontend: str, tracks: Mapping[str, Track], now_s: float
    ) -> bool:
        """Take a batch, also before the first step. False: it is out of range, and nothing of it was taken."""
        at_s = self._clock.at(now_s)
        try:
            self._judge.observe(batch_of(message, frontend, tracks, self.rollout, at_s), at_s)
        except ObservationError as error:
            self.refused_total += 1
            self.last_refusal = f"{frontend}: {error}"
            return False
        return True

    def boots(self, boots: Iterable[Boot], tracks: Mapping[str, Track]) -> None:
        """Take the starts of processes."""
        for boot in boots:
            track = tracks.get(boot.pool)
            if track is not None:
                self._note(ReplicaBoot(track, boot.process_id, self._clock.at(boot.at_s)))

    def report(self, receiver: Receiver, track: Track | None, now_s: float) -> None:
        """Take the report of a router or a replica: ejections and memory."""
        report = receiver.report
        if track is None or report is None:
            return
        role, at_s = receiver.role, self._clock.at(now_s)
        name = f"{receiver.process_id}/{receiver.boot_id}"
        if role in ("prefill", "decode") and report.engine_memory_bytes:
            self._note(MemoryReading(track, name, role, report.engine_memory_bytes, at_s))
        if role == "router":
            known = self._ejections.pop(name, report.ejection_total)
            self._ejections[name] = report.ejection_total
            while len(self._ejections) > RECEIVERS_MAX:
                del self._ejections[next(iter(self._ejections))]
            for _ in range(min(EJECTIONS_MAX, max(0, report.ejection_total - known))):
                self._note(Ejection(track, receiver.process_id, at_s))

    def note(self, event: Event) -> None:
        """Take an event about a replica."""
        self._note(event)

    def verdict(self, now_s: float) -> verdicts.Verdict:
        """Return the judge's verdict on the present step. Before the first it has the sessions of stable alone."""
        if not self._step:
            stable = verdicts.TrackSamples(
                track=STABLE,
                sessions=self._judge.recent_sessions(),
                seconds=self._judge.recent_seconds(),
            )
            return replace(verdicts.NO_VERDICT, samples=(stable,))
        at_s = self._clock.at(now_s)
        verdict = self._judge.look(at_s)
        self._looks = verdict.looks
        return _told(verdict, self._judge, at_s)

    def save(self, now_s: float) -> tuple[str, dict[str, int]] | None:
        """Return the judge's state as text, and the last batch of each frontend that it holds. None: not due.

        The state has some hundred bytes for each session. So it is due at each look, at each step, and each SAVE_S.
        """
        position = (self._step, self._looks)
        if position == self._saved and 0 <= now_s - self._saved_s < SAVE_S:
            return None
        self._saved, self._saved_s = position, now_s
        text = _packed(self._judge.save(self._clock.at(now_s)))
        while len(text) > TEXT_BYTES_MAX and self._judge.thin():
            text = _packed(self._judge.save(self._clock.at(now_s)))
        return text, self._judge.confirmed()

    def _note(self, event: Event) -> None:
        try:
            self._judge.note(event)
        except ObservationError as error:
            self.refused_total += 1
            self.last_refusal = str(error)


def _packed(state: JudgeState) -> str:
    """Return the state as compressed JSON in base64. Sessions have much in common, so it shrinks to about half."""
    return base64.b64encode(zlib.compress(msgspec.json.encode(state), level=1)).decode()


def _state(text: str) -> JudgeState | None:
    """Return the state in `text`; None without one, or for one that this release cannot read."""
    if not text:
        return None
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), STATE_BYTES_MAX)
        return msgspec.json.decode(data, type=JudgeState)
    except (ValueError, zlib.error):  # msgspec's and base64's errors are ValueErrors
        return None


def _begun(state: JudgeState | None) -> int:
    """Return the step of the judge's state."""
    return state.evidence.step.index if state is not None and state.evidence is not None else 0


def _told(verdict: Verdict, judge: judging.Judge, now_s: float) -> verdicts.Verdict:
    status = judge.status(now_s)
    gates = [
        verdicts.Gate(
            name=gate.gate,
            **_measured(gate.gate, gate.figure, gate.bound),
            p=gate.p,
            alpha=gate.alpha,
            result=_RESULTS[gate.state],
            reason=gate.reason,
            canary_samples=gate.canary_samples,
            comparison_samples=gate.comparison_samples,
        )
        for gate in verdict.gates
    ]
    gates += [
        verdicts.Gate(
            name=f"{need.gate} before 50 %",
            **_measured(need.gate, need.figure, need.bound),
            result="passes" if need.is_met else "needs more",
            reason=f"{need.measure}; {need.reason}",
        )
        for need in verdict.needs
    ]
    return verdicts.Verdict(
        kind=_KINDS[verdict.kind],
        reason=verdict.reason,
        gates=tuple(gates),
        samples=tuple(
            verdicts.TrackSamples(
                track=arm.track,
                sessions=arm.sessions,
                requests=arm.ok + arm.client + arm.failed,
                errors=arm.error_sessions,
                open=arm.open,
                client_errors=arm.client,
                output_tokens_mean=arm.output_tokens_mean,
                finish_reasons=dict(arm.finish_reasons),
            )
            for arm in status.arms
        ),
        looks=verdict.looks,
        next_look_samples=status.next_look_sessions,
        is_weak=verdict.is_weaker,
        comparison=verdict.comparison,
        needs=tuple(missing(need) for need in verdict.needs if not need.is_met),
    )


class _Measured(TypedDict):
    figure: float | None
    bound: float | None
    unit: str


def _measured(gate: str, figure: float | None, bound: float | None) -> _Measured:
    """Return figure and bound of a gate in the unit for people."""
    factor, unit = _UNITS.get(gate, (1.0, ""))
    return {
        "figure": None if figure is None else figure * factor,
        "bound": None if bound is None else bound * factor,
        "unit": unit,
    }


def missing(need: Need) -> str:
    """Return what a bound lacks, in plain words."""
    if need.figure is None:
        return f"{need.gate}: {need.reason}"
    return (
        f"{need.gate}: {need.reason}; {need.measure} is {need.figure:.4g}, and below {need.bound:g} is needed"
    )


def with_golden(verdict: verdicts.Verdict, golden: GoldenFacts) -> verdicts.Verdict:
    """Return `verdict` with a gate for the golden prompts. The judge knows nothing of them.

    The state machine decides by `golden` itself, so the kind of the verdict stays.
    """
    result, reason = _GOLDEN[golden.state]
    gate = verdicts.Gate(name=GOLDEN, result=result, reason=golden.reason or reason)
    return replace(verdict, gates=(*verdict.gates, gate))
