"""Settings of a rollout: defaults, ranges, and the conversion from and to messages. Pure."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Container, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

import msgspec
from google.protobuf.duration_pb2 import Duration

from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.snapshot.content import NAME_BYTES_MAX, TENANTS_MAX
from kvmesh.snapshot.shadow import PERMILLE, TOKEN_MAX

STEPS_PERCENT: Final = (1, 5, 25, 50, 100)
STEPS_MAX: Final = 16
BAKE_S: Final = 120.0
BAKE_MAX_S: Final = 30 * 60.0
"""At least; twice the bake time if that is more."""

BAKE_REST_S: Final = 10.0
"""The longest time of a step is longer than the bake time by so much: the weight rises, and frontends apply it."""

KEEP_OLD_S: Final = 3600.0
"""Defaults of production. Tests use steps of 10, 50 and 100 percent, 10 to 300 s, and keep the old pool for 10 s."""

BAKE_RANGE_S: Final = (10.0, 24 * 3600.0)
BAKE_MAX_RANGE_S: Final = (10.0, 7 * 24 * 3600.0)
KEEP_OLD_RANGE_S: Final = (10.0, 7 * 24 * 3600.0)
TTFT_P95_RANGE_S: Final = (0.0, 3600.0)
REQUIREMENTS_MAX: Final = 16
REQUIREMENT: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
"""Syntax of a requirement's name."""

TENANT: Final = re.compile(r"[A-Za-z0-9._:@/-]{1,128}")
"""Syntax of a tenant's name, wider than that of every tenants file."""


class SettingsError(ValueError):
    """A setting is outside its range. The text names the field, the value and the allowed range."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {value}; {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class Expectation(Enum):
    """Relation of the new version's golden tokens to those of the stable version."""

    EXACT = "exact"
    DIFFERENT = "different"


NO_POOLS: Final[Mapping[str, str]] = MappingProxyType({})
"""Model by pool where all pools serve one model."""

SHADOW_TOKEN_MAX: Final = 2_000_000
"""Default ceiling of the shadow before a rollout."""


class OnInconclusive(Enum):
    """Answer to a step that reached its longest time without a decision."""

    ROLLBACK = "rollback"
    PAUSE = "pause"


class RolloutSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one rollout, with the defaults filled in."""

    to_pool: str
    baseline_pool: str = ""
    """Empty: the comparison is with the stable pool, which is weaker."""
    steps_percent: tuple[int, ...] = STEPS_PERCENT
    bake_s: float = BAKE_S
    bake_max_s: float = BAKE_MAX_S
    keep_old_s: float = KEEP_OLD_S
    expectation: Expectation = Expectation.EXACT
    on_inconclusive: OnInconclusive = OnInconclusive.ROLLBACK
    only_tenants: tuple[str, ...] = ()
    never_tenants: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    ttft_p95_max_s: float = 0.0
    """Absolute bound at 100 %. 0: none."""
    error_share_max: float = 0.0
    """Absolute bound at 100 %. 0: none."""
    shadow_permille: int = 0
    """Share of sessions that a shadow copies before the first step, in thousandths. 0: no shadow."""
    shadow_token_max: int = SHADOW_TOKEN_MAX
    """Ceiling of the shadow's tokens."""

    def target_percent(self, step: int) -> int:
        """Return the weight of `step`, counted from 1; 0 before the first step."""
        return self.steps_percent[step - 1] if step else 0


def parse(
    message: pb.RolloutSettings,
    *,
    versions: Mapping[str, str],
    stable_pool: str,
    others: Mapping[str, str] = NO_POOLS,
    golden_versions: Container[str] | None = None,
) -> RolloutSettings:
    """Return the settings in `message`. Raises SettingsError.

    `versions`: model version by pool, for all known pools. `others`: model of each pool that serves another model than the
    stable pool. `golden_versions`: versions with a golden set of their own.
    None: unknown, and the set is looked for when the rollout prepares.
    """
    settings = RolloutSettings(
        to_pool=message.to_pool,
        baseline_pool=message.baseline_pool,
        steps_percent=tuple(message.steps_percent) or STEPS_PERCENT,
        bake_s=_seconds(message, "bake", BAKE_S),
        bake_max_s=_seconds(message, "bake_max", max(BAKE_MAX_S, 2 * _seconds(message, "bake", BAKE_S))),
        keep_old_s=_seconds(message, "keep_old", KEEP_OLD_S),
        expectation=_expectation(message.expectation),
        on_inconclusive=_on_inconclusive(message.on_inconclusive),
        only_tenants=tuple(dict.fromkeys(message.only_tenants)),
        never_tenants=tuple(dict.fromkeys(message.never_tenants)),
        requirements=tuple(message.requirements),
        ttft_p95_max_s=message.ttft_p95_max_s,
        error_share_max=message.error_share_max,
        shadow_permille=message.shadow_permille,
        shadow_token_max=message.shadow_token_max or SHADOW_TOKEN_MAX,
    )
    _check_model(settings, versions, others)
    _check_pools(settings, versions, stable_pool)
    check_ranges(settings)
    least_s = settings.bake_s + BAKE_REST_S
    if settings.bake_max_s < least_s:
        raise SettingsError(
            "bake_max",
            f"{settings.bake_max_s:g} s",
            f"at least bake and {BAKE_REST_S:g} s ({least_s:g} s) is needed",
        )
    version = versions[settings.to_pool]
    is_without_set = golden_versions is not None and version not in golden_versions
    if settings.expectation is Expectation.DIFFERENT and is_without_set:
        raise SettingsError(
            "expectation",
            "different",
            f'it needs a golden set of the version "{version}" (golden = FILE in [versions."{version}"])',
        )
    return settings


def check_ranges(settings: RolloutSettings) -> None:
    """Raise SettingsError if a setting is outside its range, whatever the pools are."""
    _check_steps(settings.steps_percent)
    _check_times(settings)
    _check_tenants(settings)
    _check_requirements(settings.requirements)
    _check_shadow(settings)


def to_message(settings: RolloutSettings) -> pb.RolloutSettings:
    """Return `settings` as a message."""
    is_exact = settings.expectation is Expectation.EXACT
    is_rollback = settings.on_inconclusive is OnInconclusive.ROLLBACK
    return pb.RolloutSettings(
        to_pool=settings.to_pool,
        baseline_pool=settings.baseline_pool,
        steps_percent=settings.steps_percent,
        bake=duration(settings.bake_s),
        bake_max=duration(settings.bake_max_s),
        expectation=pb.EXPECTATION_EXACT if is_exact else pb.EXPECTATION_DIFFERENT,
        on_inconclusive=pb.ON_INCONCLUSIVE_ROLLBACK if is_rollback else pb.ON_INCONCLUSIVE_PAUSE,
        only_tenants=settings.only_tenants,
        never_tenants=settings.never_tenants,
        requirements=settings.requirements,
        keep_old=duration(settings.keep_old_s),
        ttft_p95_max_s=settings.ttft_p95_max_s,
        error_share_max=settings.error_share_max,
        shadow_permille=settings.shadow_permille,
        shadow_token_max=settings.shadow_token_max if settings.shadow_permille else 0,
    )


def duration(seconds: float) -> Duration:
    """Return `seconds` as a message, to the nanosecond."""
    whole = math.floor(seconds)
    return Duration(seconds=whole, nanos=round((seconds - whole) * 1e9) % 1_000_000_000)


def _seconds(message: pb.RolloutSettings, field: str, default_s: float) -> float:
    if not message.HasField(field):  # type: ignore[arg-type]  # the stub lists literals
        return default_s
    value: Duration = getattr(message, field)
    return value.seconds + value.nanos / 1e9


def _expectation(value: int) -> Expectation:
    if value in (pb.EXPECTATION_UNSPECIFIED, pb.EXPECTATION_EXACT):
        return Expectation.EXACT
    if value == pb.EXPECTATION_DIFFERENT:
        return Expectation.DIFFERENT
    raise SettingsError("expectation", value, '"exact" or "different" is allowed')


def _on_inconclusive(value: int) -> OnInconclusive:
    if value in (pb.ON_INCONCLUSIVE_UNSPECIFIED, pb.ON_INCONCLUSIVE_ROLLBACK):
        return OnInconclusive.ROLLBACK
    if value == pb.ON_INCONCLUSIVE_PAUSE:
        return OnInconclusive.PAUSE
    raise SettingsError("on_inconclusive", value, '"rollback" or "pause" is allowed')


def _check_model(settings: RolloutSettings, versions: Mapping[str, str], others: Mapping[str, str]) -> None:
    for field, pool in (("to_pool", settings.to_pool), ("baseline_pool", settings.baseline_pool)):
        if pool in others:
            alike = ", ".join(sorted(versions.keys() - others.keys()))
            raise SettingsError(
                *(field, f'"{pool}", which serves the model "{others[pool]}"'),
                f"pools of the stable pool's model are allowed: {alike}",
            )


def _check_pools(settings: RolloutSettings, versions: Mapping[str, str], stable_pool: str) -> None:
    known = ", ".join(sorted(versions)) or "none"
    for field, pool in (("to_pool", settings.to_pool), ("baseline_pool", settings.baseline_pool)):
        if pool not in versions and (pool or field == "to_pool"):
            shown = pool.encode()[:NAME_BYTES_MAX].decode(errors="replace")
            raise SettingsError(field, f'"{shown}"', f"the known pools are: {known}")
    if settings.to_pool == stable_pool:
        others = ", ".join(sorted(set(versions) - {stable_pool})) or "none"
        raise SettingsError(
            "to_pool", f'"{stable_pool}"', f"a pool other than the stable pool is needed: {others}"
        )
    baseline = settings.baseline_pool
    if baseline and baseline in (settings.to_pool, stable_pool):
        which = "to_pool" if baseline == settings.to_pool else "the stable pool"
        raise SettingsError("baseline_pool", f'"{baseline}"', f"a pool other than {which} is needed")
    stable_version = versions.get(stable_pool, "")
    if baseline and versions[baseline] != stable_version:
        raise SettingsError(
            "baseline_pool",
            f'"{baseline}" of version "{versions[baseline]}"',
            f'a pool of the stable version "{stable_version}" is needed',
        )


def _check_steps(steps: tuple[int, ...]) -> None:
    shown = ",".join(map(str, steps[: STEPS_MAX + 1]))
    if not 1 <= len(steps) <= STEPS_MAX:
        raise SettingsError("steps_percent", f"{len(steps)} steps", f"1 to {STEPS_MAX} steps are allowed")
    if any(not 1 <= step <= 100 for step in steps):
        raise SettingsError("steps_percent", shown, "1 to 100 is allowed for each step")
    if any(after <= before for before, after in itertools.pairwise(steps)):
        raise SettingsError("steps_percent", shown, "each step must be above the step before it")
    if steps[-1] != 100:
        raise SettingsError("steps_percent", shown, "the last step must be 100")


def _check_times(settings: RolloutSettings) -> None:
    for field, value, (low, high) in (
        ("bake", settings.bake_s, BAKE_RANGE_S),
        ("bake_max", settings.bake_max_s, BAKE_MAX_RANGE_S),
        ("keep_old", settings.keep_old_s, KEEP_OLD_RANGE_S),
    ):
        if not low <= value <= high:
            raise SettingsError(field, f"{value:g} s", f"{low:g} to {high:g} s is allowed")
    low, high = TTFT_P95_RANGE_S
    if not low <= settings.ttft_p95_max_s <= high:  # false for NaN as well
        raise SettingsError(
            "ttft_p95_max_s", f"{settings.ttft_p95_max_s:g}", f"{low:g} (none) to {high:g} s is allowed"
        )
    if not 0 <= settings.error_share_max <= 1:
        raise SettingsError("error_share_max", f"{settings.error_share_max:g}", "0 (none) to 1 is allowed")


def _check_shadow(settings: RolloutSettings) -> None:
    if not 0 <= settings.shadow_permille <= PERMILLE:
        raise SettingsError(
            "shadow_permille", f"{settings.shadow_permille}", f"0 (none) to {PERMILLE} is allowed"
        )
    if not 1 <= settings.shadow_token_max <= TOKEN_MAX:
        raise SettingsError(
            "shadow_token_max", f"{settings.shadow_token_max}", f"1 to {TOKEN_MAX} is allowed"
        )
    if settings.shadow_permille and not settings.baseline_pool:
        raise SettingsError(
            "baseline_pool", "empty", "a shadow before the rollout needs a pool of the stable version"
        )


def _check_tenants(settings: RolloutSettings) -> None:
    for field, tenants in (
        ("only_tenants", settings.only_tenants),
        ("never_tenants", settings.never_tenants),
    ):
        if len(tenants) > TENANTS_MAX:
            raise SettingsError(field, f"{len(tenants)} tenants", f"up to {TENANTS_MAX} are allowed")
        for tenant in tenants:
            if not TENANT.fullmatch(tenant):
                raise SettingsError(
                    field, f'"{tenant[:128]}"', "1 to 128 letters, digits and . _ : @ / - are allowed"
                )
    both = sorted(set(settings.only_tenants) & set(settings.never_tenants))
    if both:
        raise SettingsError("never_tenants", f'"{both[0]}"', "a tenant may not be in only_tenants as well")


def _check_requirements(requirements: tuple[str, ...]) -> None:
    if len(requirements) > REQUIREMENTS_MAX:
        raise SettingsError(
            "requirements", f"{len(requirements)} names", f"up to {REQUIREMENTS_MAX} are allowed"
        )
    for at, name in enumerate(requirements):
        if not REQUIREMENT.fullmatch(name):
            raise SettingsError(
                "requirements",
                f'"{name[:64]}"',
                "1 to 64 of a-z, 0-9, _ . - are allowed, the first a letter or digit",
            )
        if name in requirements[:at]:
            raise SettingsError("requirements", f'"{name}"', "each name may occur once")
