"""News between the control planes of two regions: messages to checked data and back. Pure.

News of another region are data of another process: a field out of range refuses the whole message, and names the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from controlplane.regions.declared import Declared, DeclaredState
from controlplane.regions.signals import Replicas, Signals
from kvmesh.control.v1 import region_pb2 as pb
from kvmesh.region_sections import REGIONS_MAX
from kvmesh.regions.quantity import NOTHING, Quantity
from kvmesh.snapshot.content import REVISION_MAX
from kvmesh.snapshot.regions import PROCESSES_MAX, TEXT_BYTES_MAX, RegionProcess, process_message, process_of

SECRETS_MAX: Final = 2
"""Secrets of resume tokens: the present one and the former one."""

SECRET_BYTES: Final = 32
"""Size of a secret of resume tokens (`services.frontend.requests.resume_token`)."""

ROLES_MAX: Final = 8
REASON_CHARACTERS_MAX: Final = 200
AGE_MS_MAX: Final = 10**12


class NewsError(ValueError):
    """News are refused. The text names the field, its value and the allowed range."""


@dataclass(frozen=True, slots=True)
class DeclaredNews:
    """A declaration, and the time since it was made."""

    region: str
    declared: Declared
    age_s: float


@dataclass(frozen=True, slots=True)
class RolloutNews:
    """The running rollout of a region, else its last one."""

    state: str
    to_version: str
    is_final: bool
    age_s: float
    """Time in that state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """News of a region about itself. See region.proto."""

    region: str
    term: int
    sequence: int
    signals: Signals | None = None
    """None: its leader knows nothing of its region yet, and the news change nothing."""
    routers: tuple[RegionProcess, ...] = ()
    frontends: tuple[RegionProcess, ...] = ()
    secrets: tuple[bytes, ...] = ()
    declared: tuple[DeclaredNews, ...] = ()
    grants: Mapping[str, Quantity] = field(default_factory=dict)
    stable_pool: str = ""
    stable_version: str = ""
    tenants_sha256: bytes = b""
    rollout: RolloutNews | None = None
    """None: it had none."""
    seed_wishes: tuple[str, ...] = ()
    """Regions that should replay its hot prompts."""
    seeded_from: tuple[str, ...] = ()
    """Regions of which hot prompts were replayed there a moment ago."""
    overrides: tuple[pb.TenantOverride, ...] = ()
    """Operators' overrides of tenants (`overrides`)."""

    @property
    def order(self) -> tuple[int, int]:
        """Order of the messages of one region."""
        return (self.term, self.sequence)


def to_message(news: News) -> pb.RegionNews:
    """Return `news` as a message."""
    return pb.RegionNews(
        region=news.region,
        term=news.term,
        sequence=news.sequence,
        signals=None if news.signals is None else signals_message(news.signals),
        routers=map(process_message, news.routers),
        frontends=map(process_message, news.frontends),
        resume_secrets=news.secrets,
        declared=[declared_message(each.region, each.declared, each.age_s) for each in news.declared],
        grants=[pb.Grant(region=name, quantity=quantity_message(each)) for name, each in news.grants.items()],
        stable_pool=news.stable_pool,
        stable_version=news.stable_version,
        tenants_sha256=news.tenants_sha256,
        rollout=None if news.rollout is None else _rollout_message(news.rollout),
        seed_wishes=news.seed_wishes,
        seeded_from=news.seeded_from,
        overrides=news.overrides,
    )


def of_message(message: pb.RegionNews) -> News:
    """Return the news in `message`. Raises NewsError."""
    _bounded("region", message.region)
    for name, texts in (("stable_pool", message.stable_pool), ("stable_version", message.stable_version)):
        _bounded(name, texts, least=0)
    for name, count, most in (
        ("routers", len(message.routers), PROCESSES_MAX),
        ("frontends", len(message.frontends), PROCESSES_MAX),
        ("declared", len(message.declared), REGIONS_MAX),
        ("grants", len(message.grants), REGIONS_MAX),
        ("seed_wishes", len(message.seed_wishes), REGIONS_MAX),
        ("seeded_from", len(message.seeded_from), REGIONS_MAX),
        ("resume_secrets", len(message.resume_secrets), SECRETS_MAX),
        ("tenants_sha256", len(message.tenants_sha256), TEXT_BYTES_MAX),
    ):
        if count > most:
            raise NewsError(f"{name} has {count} entries; up to {most} are allowed")
    for secret in message.resume_secrets:
        if len(secret) != SECRET_BYTES:
            raise NewsError(f"resume_secrets has one of {len(secret)} bytes; {SECRET_BYTES} are needed")
    for number, name in ((message.term, "term"), (message.sequence, "sequence")):
        if number > REVISION_MAX:
            raise NewsError(f"{name} is {number}; 0 to {REVISION_MAX} are allowed")
    return News(
        region=message.region,
        term=message.term,
        sequence=message.sequence,
        signals=signals_of(message.signals) if message.HasField("signals") else None,
        routers=_processes("routers", message.routers),
        frontends=_processes("frontends", message.frontends),
        secrets=tuple(message.resume_secrets),
        declared=tuple(map(declared_of, message.declared)),
        grants={each.region: quantity_of("grants", each.quantity) for each in message.grants},
        stable_pool=message.stable_pool,
        stable_version=message.stable_version,
        tenants_sha256=message.tenants_sha256,
        rollout=_rollout_of(message.rollout) if message.HasField("rollout") else None,
        seed_wishes=tuple(message.seed_wishes),
        seeded_from=tuple(message.seeded_from),
        overrides=tuple(message.overrides),
    )


def signals_message(signals: Signals) -> pb.RegionSignals:
    """Return `signals` as a message."""
    is_known = math.isfinite(signals.engine_age_s)
    return pb.RegionSignals(
        replicas=[
            pb.ReplicaCount(role=role, serving=each.serving, leased=each.leased)
            for role, each in signals.replicas.items()
        ],
        attempt_count=signals.attempts,
        failure_count=signals.failures,
        load=quantity_message(signals.load),
        cold_factor=signals.cold_factor,
        guests=[
            pb.GuestLoad(region=name, load=quantity_message(each)) for name, each in signals.guests.items()
        ],
        capacity=quantity_message(signals.capacity),
        leased_capacity=quantity_message(signals.leased_capacity),
        wanted=quantity_message(signals.wanted),
        is_spilling=signals.is_spilling,
        engine_age_ms=round(signals.engine_age_s * 1000) if is_known else None,
    )


def signals_of(message: pb.RegionSignals) -> Signals:
    """Return the signals in `message`. Raises NewsError."""
    if len(message.replicas) > ROLES_MAX or len(message.guests) > REGIONS_MAX:
        raise NewsError(
            f"signals has {len(message.replicas)} roles and {len(message.guests)} regions of guests; "
            f"up to {ROLES_MAX} and {REGIONS_MAX} are allowed"
        )
    signals = Signals(
        replicas={each.role: Replicas(each.serving, each.leased) for each in message.replicas},
        attempts=message.attempt_count,
        failures=message.failure_count,
        load=quantity_of("signals.load", message.load),
        cold_factor=message.cold_factor or 1.0,
        guests={each.region: quantity_of("signals.guests", each.load) for each in message.guests},
        capacity=quantity_of("signals.capacity", message.capacity),
        leased_capacity=quantity_of("signals.leased_capacity", message.leased_capacity),
        wanted=quantity_of("signals.wanted", message.wanted),
        is_spilling=message.is_spilling,
        engine_age_s=message.engine_age_ms / 1000 if message.HasField("engine_age_ms") else math.inf,
    )
    if fault := signals.fault():
        raise NewsError(f"signals.{fault}")
    return signals


def _rollout_message(rollout: RolloutNews) -> pb.RegionRollout:
    return pb.RegionRollout(
        state=rollout.state,
        to_version=rollout.to_version,
        is_final=rollout.is_final,
        age_ms=min(AGE_MS_MAX, _milliseconds(rollout.age_s)),
    )


def _rollout_of(message: pb.RegionRollout) -> RolloutNews:
    for name, text in (("rollout.state", message.state), ("rollout.to_version", message.to_version)):
        _bounded(name, text)
    age_s = min(message.age_ms, AGE_MS_MAX) / 1000
    return RolloutNews(printable(message.state), printable(message.to_version), message.is_final, age_s)


def quantity_message(quantity: Quantity) -> pb.Quantity:
    """Return `quantity` as a message."""
    return pb.Quantity(tokens_per_s=quantity.tokens_per_s, blocks=quantity.blocks)


def quantity_of(name: str, message: pb.Quantity) -> Quantity:
    """Return the quantity in `message`. Raises NewsError unless it is finite and at least 0."""
    found = Quantity(message.tokens_per_s, message.blocks) if message.ByteSize() else NOTHING
    if not found.is_valid:
        raise NewsError(
            f"{name} is {message.tokens_per_s} tokens/s and {message.blocks} blocks; finite numbers from 0 are allowed"
        )
    return found


def declared_message(region: str, declared: Declared, age_s: float) -> pb.Declared:
    """Return a declaration as a message."""
    return pb.Declared(
        region=region,
        revision=declared.revision,
        state=pb.DeclaredState.Value(f"DECLARED_STATE_{declared.state.value}"),
        reason=declared.reason,
        author=declared.author,
        declared_ms=_milliseconds(declared.at_s),
        until_ms=_milliseconds(declared.until_s),
        age_ms=min(AGE_MS_MAX, _milliseconds(age_s)),
        final_weight_percent=declared.weight_percent,
    )


def declared_of(message: pb.Declared) -> DeclaredNews:
    """Return the declaration in `message`. Raises NewsError. A state of a later release counts as SERVING."""
    _bounded("declared.region", message.region)
    if message.revision > REVISION_MAX:
        raise NewsError(f"declared.revision is {message.revision}; 0 to {REVISION_MAX} are allowed")
    if not 0 <= message.final_weight_percent <= 100:  # also refuses NaN
        raise NewsError(
            f"declared.final_weight_percent is {message.final_weight_percent}; 0 to 100 is allowed"
        )
    declared = Declared(
        state=_STATES.get(message.state, DeclaredState.SERVING),
        revision=message.revision,
        weight_percent=message.final_weight_percent,
        reason=printable(message.reason),
        until_s=message.until_ms / 1000,
        author=printable(message.author),
        at_s=message.declared_ms / 1000,
    )
    return DeclaredNews(message.region, declared, min(message.age_ms, AGE_MS_MAX) / 1000)


_STATES: Final[Mapping[int, DeclaredState]] = {
    pb.DECLARED_STATE_SERVING: DeclaredState.SERVING,
    pb.DECLARED_STATE_DRAINING: DeclaredState.DRAINING,
    pb.DECLARED_STATE_DRAINED: DeclaredState.DRAINED,
}


def printable(text: str) -> str:
    """Return a text of another region as logs and terminals of operators may show it."""
    return "".join(each if each.isprintable() else "?" for each in text[:REASON_CHARACTERS_MAX])


def _milliseconds(time_s: float) -> int:
    return max(0, round(time_s * 1000)) if math.isfinite(time_s) else 0


def _processes(name: str, messages: object) -> tuple[RegionProcess, ...]:
    found = tuple(map(process_of, messages))  # type: ignore[call-overload]  # a repeated field of RegionProcess
    for each in found:
        for text in (each.process_id, each.address, each.boot_id):
            _bounded(name, text)
    if len({each.process_id for each in found}) < len(found):
        raise NewsError(f"{name} names a process twice; each once is allowed")
    return found


def _bounded(name: str, text: str, least: int = 1) -> None:
    if not least <= len(text.encode()) <= TEXT_BYTES_MAX:
        raise NewsError(
            f"{name} has a text of {len(text.encode())} bytes; {least} to {TEXT_BYTES_MAX} are allowed"
        )
