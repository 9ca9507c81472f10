"""Verdict of the judge at one look, as documents keep it, and its conversion from and to messages. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final

import msgspec

from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.snapshot.content import Track


class VerdictKind(Enum):
    """Kind of a verdict."""

    NONE = "none"
    PASS = "pass"
    """No gate fails, and the data that the next step needs is there."""
    NEEDS_MORE = "needs more"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


_KINDS: Final = {
    VerdictKind.NONE: pb.Verdict.KIND_UNSPECIFIED,
    VerdictKind.PASS: pb.Verdict.KIND_PASS,
    VerdictKind.NEEDS_MORE: pb.Verdict.KIND_NEEDS_MORE,
    VerdictKind.FAIL: pb.Verdict.KIND_FAIL,
    VerdictKind.INCONCLUSIVE: pb.Verdict.KIND_INCONCLUSIVE,
}
_KIND_OF: Final = {value: kind for kind, value in _KINDS.items()}
_TRACKS: Final = {track.name.lower(): track for track in Track}


class Gate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One gate with its figure and its bound. None: unknown, or not part of the gate."""

    name: str
    figure: float | None = None
    bound: float | None = None
    unit: str = ""
    p: float | None = None
    alpha: float | None = None
    result: str = ""
    reason: str = ""
    canary_samples: int = 0
    comparison_samples: int = 0


class TrackSamples(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Samples of one track: "stable", "canary" or "baseline"."""

    track: str
    sessions: int = 0
    requests: int = 0
    errors: int = 0
    open: int = 0
    client_errors: int = 0
    """Errors that clients caused. Reported, not judged."""
    output_tokens_mean: float | None = None
    """Reported, not judged."""
    finish_reasons: dict[str, int] = {}
    """Reported, not judged."""
    seconds: int = 0
    """Seconds in which a request ended. Of stable before the first step alone."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of one look."""

    kind: VerdictKind
    reason: str = ""
    gates: tuple[Gate, ...] = ()
    samples: tuple[TrackSamples, ...] = ()
    looks: int = 0
    next_look_samples: int = 0
    is_weak: bool = False
    comparison: str = ""
    """Arm that the canary is compared with, in words."""
    needs: tuple[str, ...] = ()
    """Bounds that are not met and must be before 50 %, one sentence each. A step below 50 % may follow without them."""


NO_VERDICT: Final = Verdict(kind=VerdictKind.NONE)
"""Before the first look."""


def to_message(verdict: Verdict) -> pb.Verdict:
    """Return `verdict` as a message."""
    return pb.Verdict(
        kind=_KINDS[verdict.kind],
        reason=verdict.reason,
        gates=_gates(verdict.gates),
        samples=[
            pb.TrackSamples(
                track=_TRACKS.get(each.track, Track.IDLE).value,
                sessions=each.sessions,
                requests=each.requests,
                errors=each.errors,
                open=each.open,
                client_errors=each.client_errors,
                output_tokens_mean=each.output_tokens_mean,
                finish_reasons=each.finish_reasons,
                observed_seconds=each.seconds,
            )
            for each in verdict.samples
        ],
        looks=verdict.looks,
        next_look_samples=verdict.next_look_samples,
        is_weak=verdict.is_weak,
        comparison=verdict.comparison,
    )


def of_message(message: pb.Verdict) -> Verdict:
    """Return the verdict in `message`. A kind of a later release counts as inconclusive."""
    return Verdict(
        kind=_KIND_OF.get(message.kind, VerdictKind.INCONCLUSIVE),
        reason=message.reason,
        gates=tuple(
            Gate(
                name=gate.name,
                figure=gate.figure if gate.HasField("figure") else None,
                bound=gate.bound if gate.HasField("bound") else None,
                unit=gate.unit,
                p=gate.p if gate.HasField("p") else None,
                alpha=gate.alpha if gate.HasField("alpha") else None,
                result=gate.result,
                reason=gate.reason,
                canary_samples=gate.canary_samples,
                comparison_samples=gate.comparison_samples,
            )
            for gate in message.gates
        ),
        samples=tuple(
            TrackSamples(
                track=_track_name(each.track),
                sessions=each.sessions,
                requests=each.requests,
                errors=each.errors,
                open=each.open,
                client_errors=each.client_errors,
                output_tokens_mean=each.output_tokens_mean if each.HasField("output_tokens_mean") else None,
                finish_reasons=dict(each.finish_reasons),
                seconds=each.observed_seconds,
            )
            for each in message.samples
        ),
        looks=message.looks,
        next_look_samples=message.next_look_samples,
        is_weak=message.is_weak,
        comparison=message.comparison,
    )


def _gates(gates: Iterable[Gate]) -> list[pb.Gate]:
    return [
        pb.Gate(
            name=gate.name,
            figure=gate.figure,
            bound=gate.bound,
            unit=gate.unit,
            p=gate.p,
            alpha=gate.alpha,
            result=gate.result,
            reason=gate.reason,
            canary_samples=gate.canary_samples,
            comparison_samples=gate.comparison_samples,
        )
        for gate in gates
    ]


def _track_name(value: int) -> str:
    return next((name for name, track in _TRACKS.items() if track.value == value), "idle")
