"""The document of a rollout: all that its state machine knows, in JSON of bounded size. Pure.

A leader that takes over continues from the document alone. A document is replaced, never changed. Each replacement has
the next revision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, Literal, TypeAlias

import msgspec
from google.protobuf.timestamp_pb2 import Timestamp

from controlplane.rollouts import settings as rollout_settings
from controlplane.rollouts import verdict as verdicts
from controlplane.rollouts.settings import RolloutSettings, SettingsError
from controlplane.rollouts.verdict import NO_VERDICT, Verdict
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.snapshot.content import REVISION_MAX, RolloutState

DOCUMENT_BYTES_MAX: Final = 768 << 10
"""Largest document of the control plane. In a rollout, the details of the oldest verdicts are left out first."""

ROLLOUTS_MAX: Final = 50
"""Rollouts that are kept, the latest."""

CHANGES_MAX: Final = 64
"""Changes of state in a document. The oldest after the first is left out first."""

REASON_CHARACTERS_MAX: Final = 600
WAITS_FOR_MAX: Final = 24
SILENT_MAX: Final = 64

TIMESTAMP_MAX_S: Final = 253_402_300_799.0
"""Last second of a Timestamp, in the year 9999."""

StateName = Literal[
    "PENDING",
    "PREPARING",
    "BAKING",
    "PAUSED",
    "PROMOTING",
    "COMPLETED",
    "ROLLING_BACK",
    "ROLLED_BACK",
    "ABORTED",
]

UNWEIGHTED: Final = frozenset({RolloutState.PENDING, RolloutState.PREPARING, RolloutState.ABORTED})
"""States before any weight."""

WEIGHTED: Final = frozenset({RolloutState.BAKING, RolloutState.PAUSED})
"""States in which the canary may have a weight."""

OBSERVED: Final = frozenset({RolloutState.PREPARING, *WEIGHTED})
"""States in which the judge takes observations. In PREPARING they are of stable, which a first step of 100 % replaces."""

Position: TypeAlias = tuple[str, int, int, int, bool]
"""State, step, weights of canary and baseline, whether a canary that was taken back is open."""

TAKEN_BACK: Final = frozenset({RolloutState.ROLLING_BACK, RolloutState.ROLLED_BACK, RolloutState.ABORTED})
"""States in which snapshots name the rollout in `ended_rollouts`."""


class DocumentError(ValueError):
    """A stored document cannot be read, or cannot be made small enough. The text names the rollout."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The start of a rollout."""

    from_pool: str
    from_version: str
    to_version: str
    started_s: float
    """Wall clock, Unix seconds. For people. Never compared."""
    started_by: str = ""
    is_forced: bool = False
    """True: capacity is not checked."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a rollout. Each is a sum of bounded differences, so that a step of the wall clock changes little."""

    at_s: float
    """Wall clock of the last revision. Only the difference to the next one is used, and it is bounded."""
    state_s: float = 0.0
    """Seconds in the present state."""
    step_s: float = 0.0
    """Seconds in the present step, without pauses, freezes and rises of the weight."""
    baked_s: float = 0.0
    """Seconds of the present step at its full weight, in force at every frontend that is heard."""
    since_rise_s: float = 0.0
    """Seconds since the weight rose."""
    arm_missing_s: float = 0.0
    """Seconds in a row in which the canary had no process of a role."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One change of state or step."""

    state_name: StateName = msgspec.field(name="state")
    step: int
    at_s: float
    """Wall clock, Unix seconds. For people. Never compared."""
    reason: str
    weight_percent: int = 0
    by: str = ""
    """Operator that asked for it. Empty: the control plane itself."""
    verdict: Verdict | None = None
    """The verdict that decided, with its numbers."""


class Attestation(msgspec.Struct, frozen=True, kw_only=True):
    """An attested requirement."""

    requirement: str
    passed: bool
    by: str
    at_s: float


class RolloutDocument(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. `assert_consistent` states what holds between the fields."""

    id: str
    settings: RolloutSettings
    origin: Origin
    timing: Timing
    state_name: StateName = msgspec.field(name="state", default="PENDING")
    step: int = 0
    """Step, from 1. 0: before the first step."""
    weight_percent: int = 0
    """Present weight of the canary. Below the step's while it rises."""
    baseline_percent: int = 0
    has_wrong_tokens: bool = False
    """A golden prompt of the canary had other tokens than expected."""
    is_canary_open: bool = False
    """After the rollout was taken back: the canary takes requests that no other pool can place."""
    changed_s: float = 0.0
    """Wall clock of the last change of state, Unix seconds. For people. Never compared."""
    reason: str = ""
    waits_for: tuple[str, ...] = ()
    verdict: Verdict = NO_VERDICT
    """Last verdict of the present step."""
    changes: tuple[Change, ...] = ()
    attestations: tuple[Attestation, ...] = ()
    silent_frontends: tuple[str, ...] = ()
    judge: str = ""
    """State of the judge, opaque JSON. It is stored with the step that it judges."""
    revision: int = 1

    @property
    def state(self) -> RolloutState:
        """State of the rollout."""
        return RolloutState[self.state_name]

    @property
    def is_final(self) -> bool:
        """True if the rollout is over."""
        return self.state.is_final

    @property
    def is_taken_back(self) -> bool:
        """True if snapshots name the rollout in `ended_rollouts`: none of its weights may be applied again."""
        return self.state in TAKEN_BACK

    @property
    def versions(self) -> dict[str, str]:
        """Model version that each pool of the rollout had at its start."""
        pools = {self.from_pool: self.from_version, self.to_pool: self.to_version}
        baseline = self.settings.baseline_pool
        return pools | ({baseline: self.from_version} if baseline else {})

    @property
    def to_pool(self) -> str:
        """Pool of the new version."""
        return self.settings.to_pool

    @property
    def from_pool(self) -> str:
        """Pool that was stable at the start. An undo makes it stable again."""
        return self.origin.from_pool

    @property
    def from_version(self) -> str:
        """Model version of `from_pool`."""
        return self.origin.from_version

    @property
    def to_version(self) -> str:
        """Model version of `to_pool`."""
        return self.origin.to_version

    @property
    def baked_s(self) -> float:
        """Seconds baked in the present step."""
        return self.timing.baked_s

    @property
    def target_percent(self) -> int:
        """Weight of the present step; 0 before the first step."""
        return self.settings.target_percent(self.step)

    @property
    def stable_pool(self) -> str:
        """Pool that is stable under this document."""
        is_promoted = self.state.is_promoted
        return self.settings.to_pool if is_promoted else self.origin.from_pool

    @property
    def position(self) -> Position:
        """The part of the document that a snapshot shows."""
        return (
            self.state_name,
            self.step,
            self.weight_percent,
            self.baseline_percent,
            self.is_canary_open,
        )

    def attested(self, requirement: str) -> Attestation | None:
        """Return the attestation of a requirement."""
        return next((each for each in self.attestations if each.requirement == requirement), None)

    def assert_consistent(self) -> None:
        """Raise AssertionError if an invariant of documents is broken."""
        state, settings = self.state, self.settings
        assert 1 <= self.revision <= REVISION_MAX, self
        assert 0 <= self.step <= len(settings.steps_percent), self
        assert 0 <= self.baseline_percent <= 100 - self.weight_percent, self
        if state in UNWEIGHTED or state in TAKEN_BACK:
            assert self.weight_percent == self.baseline_percent == 0, self
        elif state in WEIGHTED:
            assert self.step >= 1 and self.weight_percent <= self.target_percent, self
        else:
            assert self.weight_percent == 100 and self.baseline_percent == 0, self
        assert not self.is_canary_open or state in TAKEN_BACK, self
        assert (self.step == 0) == (state in UNWEIGHTED), self
        assert not self.baseline_percent or settings.baseline_pool, self
        assert self.timing.baked_s >= 0 and self.timing.step_s >= 0 and self.timing.state_s >= 0, self
        assert len(self.changes) <= CHANGES_MAX and len(self.waits_for) <= WAITS_FOR_MAX, self
        assert self.changes and self.changes[-1].state_name == self.state_name, self


def encode(document: RolloutDocument) -> bytes:
    """Return the JSON of `document`. Raises DocumentError if it stays too large without the details of verdicts."""
    data = _encoder.encode(document)
    changes = list(document.changes)
    for at, change in enumerate(changes):
        if len(data) <= DOCUMENT_BYTES_MAX:
            break
        if change.verdict is None or not (change.verdict.gates or change.verdict.samples):
            continue
        short = msgspec.structs.replace(change.verdict, gates=(), samples=())
        changes[at] = msgspec.structs.replace(change, verdict=short)
        data = _encoder.encode(msgspec.structs.replace(document, changes=tuple(changes)))
    if len(data) > DOCUMENT_BYTES_MAX:
        raise DocumentError(
            f'the document of rollout "{document.id}" has {len(data)} bytes; up to {DOCUMENT_BYTES_MAX} are allowed'
        )
    return data


def decode(rollout: str, data: bytes) -> RolloutDocument:
    """Return the document of `rollout` in `data`. Fields of a later release are ignored. Raises DocumentError."""
    if len(data) > DOCUMENT_BYTES_MAX:
        raise DocumentError(
            f'the document of rollout "{rollout}" has {len(data)} bytes; up to {DOCUMENT_BYTES_MAX} are allowed'
        )
    try:
        document = _decoder.decode(data)
        rollout_settings.check_ranges(document.settings)
        document.assert_consistent()
    except (SettingsError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DocumentError(f'the document of rollout "{rollout}" cannot be read: {error}') from error
    except AssertionError as error:
        raise DocumentError(f'the document of rollout "{rollout}" contradicts itself') from error
    if document.id != rollout:
        raise DocumentError(f'the document of rollout "{rollout}" has the id "{document.id[:64]}"')
    return document


def to_message(document: RolloutDocument) -> pb.Rollout:
    """Return `document` as a message, for `rollout status` and `rollout history`."""
    origin = document.origin
    return pb.Rollout(
        rollout=document.id,
        settings=rollout_settings.to_message(document.settings),
        state=document.state.value,
        step=document.step,
        weight_percent=document.weight_percent,
        from_pool=origin.from_pool,
        from_version=origin.from_version,
        to_version=origin.to_version,
        started_at=timestamp(origin.started_s),
        changed_at=timestamp(document.changed_s),
        baked_s=document.baked_s,
        reason=document.reason,
        waits_for=document.waits_for,
        verdict=verdicts.to_message(document.verdict),
        changes=[_change_message(change) for change in document.changes],
        attestations=[
            pb.Attestation(
                requirement=each.requirement, passed=each.passed, by=each.by, at=timestamp(each.at_s)
            )
            for each in document.attestations
        ],
        started_by=origin.started_by,
        silent_frontends=document.silent_frontends,
        revision=document.revision,
    )


def timestamp(unix_s: float) -> Timestamp:
    """Return Unix seconds as a message, to the nanosecond."""
    unix_s = min(max(unix_s, 0.0), TIMESTAMP_MAX_S)
    whole = math.floor(unix_s)
    return Timestamp(seconds=whole, nanos=min(999_999_999, round((unix_s - whole) * 1e9)))


def clip(text: str) -> str:
    """Return `text` with at most REASON_CHARACTERS_MAX characters."""
    return text if len(text) <= REASON_CHARACTERS_MAX else f"{text[: REASON_CHARACTERS_MAX - 3]}..."


def bounded(changes: Iterable[Change]) -> tuple[Change, ...]:
    """Return the first and the last of `changes`, CHANGES_MAX at most."""
    kept = tuple(changes)
    return kept if len(kept) <= CHANGES_MAX else (kept[0], *kept[len(kept) - CHANGES_MAX + 1 :])


def _change_message(change: Change) -> pb.RolloutChange:
    return pb.RolloutChange(
        state=RolloutState[change.state_name].value,
        step=change.step,
        at=timestamp(change.at_s),
        reason=change.reason,
        verdict=None if change.verdict is None else verdicts.to_message(change.verdict),
        by=change.by,
        weight_percent=change.weight_percent,
    )


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(RolloutDocument)
