"""Options of `kvmesh rollout start` as the settings of a rollout, checked before they are sent. Pure.

The control plane checks them again, and alone knows the pools. `controlplane.rollouts.settings` has the same ranges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeVar

from kvmesh.bad_option import BadOption
from kvmesh.cli.control import durations
from kvmesh.cli.control.shares import sample_permille, tokens
from kvmesh.control.v1 import control_pb2 as pb
from kvmesh.snapshot.content import NAME_BYTES_MAX

STEPS_MAX: Final = 16
DAY_S: Final = 24 * 3600.0
BAKE_RANGE_S: Final = (10.0, DAY_S)
BAKE_MAX_RANGE_S: Final = (10.0, 7 * DAY_S)
BAKE_REST_S: Final = 10.0
KEEP_OLD_RANGE_S: Final = (10.0, 7 * DAY_S)
REASON_CHARACTERS_MAX: Final = 200
TTFT_P95_S_MAX: Final = 3600.0

EXPECTATIONS: Final = {"exact": pb.EXPECTATION_EXACT, "different": pb.EXPECTATION_DIFFERENT}
INCONCLUSIVE: Final = {"rollback": pb.ON_INCONCLUSIVE_ROLLBACK, "pause": pb.ON_INCONCLUSIVE_PAUSE}


Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class StartOptions:
    """Options as they were given. An empty text or list: not given, so the control plane takes its default."""

    to: str
    baseline: str = ""
    steps: str = ""
    expect: str = "exact"
    bake: str = ""
    bake_max: str = ""
    require: Sequence[str] = ()
    only: str = ""
    never: str = ""
    on_inconclusive: str = "rollback"
    keep_old: str = ""
    ttft_p95_max_s: float = 0.0
    error_share_max: float = 0.0
    shadow: str = ""
    shadow_max_tokens: str = ""


def settings(given: StartOptions) -> pb.RolloutSettings:
    """Return the settings. Raises BadOption: one sentence with option, value and range."""
    _check_pools(given)
    if given.shadow and not given.baseline:
        raise BadOption("--shadow needs --baseline: allowed is a pool of the stable version, for A/A.")
    if given.shadow_max_tokens and not given.shadow:
        raise BadOption("--shadow-max-tokens needs --shadow: allowed is a share of sessions such as 5%.")
    made = pb.RolloutSettings(
        to_pool=given.to,
        baseline_pool=given.baseline,
        steps_percent=_steps(given.steps),
        expectation=chosen("--expect", given.expect, EXPECTATIONS),
        on_inconclusive=chosen("--on-inconclusive", given.on_inconclusive, INCONCLUSIVE),
        only_tenants=_tenants("--only", given.only),
        never_tenants=_tenants("--never", given.never),
        requirements=_requirements(given.require),
        ttft_p95_max_s=given.ttft_p95_max_s,
        error_share_max=given.error_share_max,
        shadow_permille=sample_permille("--shadow", given.shadow) if given.shadow else 0,
        shadow_token_max=tokens("--shadow-max-tokens", given.shadow_max_tokens, 1)
        if given.shadow_max_tokens
        else 0,
    )
    _refuse_outside("--ttft-p95-max", given.ttft_p95_max_s, TTFT_P95_S_MAX, "0 (none) to 3600 s")
    _refuse_outside("--error-share-max", given.error_share_max, 1.0, "0 (none) to 1")
    _set_times(made, given)
    _check_tenants(made)
    return made


def chosen(option: str, given: str, allowed: Mapping[str, Value]) -> Value:
    """Return the value of a word. Raises BadOption with the allowed words."""
    if given not in allowed:
        raise BadOption(f'{option} = "{given}" is unknown: allowed are {" and ".join(allowed)}.')
    return allowed[given]


def check_name(option: str, name: str) -> str:
    """Return `name`. Raises BadOption unless it may be the name of a pool, a process or a requirement."""
    size = len(name.encode(errors="replace"))
    if not 1 <= size <= NAME_BYTES_MAX or not name.isprintable():
        shown = name.encode(errors="replace")[:40].decode(errors="replace")
        raise BadOption(
            f"{option} = {shown!r} is no name: allowed are 1 to {NAME_BYTES_MAX} printable bytes."
        )
    return name


def check_reason(reason: str) -> str:
    """Return `reason`. Raises BadOption if it is too long."""
    if len(reason) > REASON_CHARACTERS_MAX:
        raise BadOption(f"--reason has {len(reason)} characters: allowed are up to {REASON_CHARACTERS_MAX}.")
    return reason


def _check_pools(given: StartOptions) -> None:
    check_name("--to", given.to)
    if given.baseline:
        check_name("--baseline", given.baseline)
    if given.baseline == given.to:
        raise BadOption(
            f'--baseline = "{given.baseline}" is the pool of --to: allowed is another pool, of the stable version.'
        )


def _steps(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    allowed = f"allowed are 1 to {STEPS_MAX} ascending percentages of 1 to 100 with commas, the last 100"
    words = [word.strip() for word in text.split(",")]
    bad = next((word for word in words if not (word.isascii() and word.isdecimal() and len(word) <= 3)), None)
    if bad is not None:
        raise BadOption(f'--steps = {text} has "{bad[:40]}": {allowed}.')
    steps = tuple(map(int, words))
    if len(steps) > STEPS_MAX:
        raise BadOption(f"--steps has {len(steps)} steps: {allowed}.")
    outside = next((step for step in steps if not 1 <= step <= 100), None)
    if outside is not None:
        raise BadOption(f"--steps = {text} has {outside}: {allowed}.")
    for before, after in pairwise(steps):
        if after <= before:
            raise BadOption(f"--steps = {text} has {after} after {before}: {allowed}.")
    if steps[-1] != 100:
        raise BadOption(f"--steps = {text} ends with {steps[-1]}: {allowed}.")
    return steps


def _tenants(option: str, text: str) -> tuple[str, ...]:
    if not text:
        return ()
    key, sign, names = text.partition("=")
    tenants = [name.strip() for name in names.split(",")]
    if key != "tenant" or not sign or not all(tenants):
        raise BadOption(f'{option} = "{text}" is unknown: allowed is tenant=NAME, with commas for several.')
    return tuple(dict.fromkeys(check_name(option, tenant) for tenant in tenants))


def _requirements(names: Sequence[str]) -> tuple[str, ...]:
    for at, name in enumerate(names):
        check_name("--require", name)
        if name in names[:at]:
            raise BadOption(f'--require = "{name}" is given twice: allowed is each name once.')
    return tuple(names)


def _refuse_outside(option: str, value: float, high: float, allowed: str) -> None:
    if not 0 <= value <= high:  # also refuses NaN
        raise BadOption(f"{option} = {value:g} is out of range: allowed are {allowed}.")


def _set_times(made: pb.RolloutSettings, given: StartOptions) -> None:
    times_s = {}
    for field, text, (low_s, high_s) in (
        ("bake", given.bake, BAKE_RANGE_S),
        ("bake_max", given.bake_max, BAKE_MAX_RANGE_S),
        ("keep_old", given.keep_old, KEEP_OLD_RANGE_S),
    ):
        if text:
            times_s[field] = durations.parse(f"--{field.replace('_', '-')}", text, low_s, high_s)
            getattr(made, field).CopyFrom(durations.message(times_s[field]))
    least_s = times_s.get("bake", 0.0) + BAKE_REST_S
    if times_s.get("bake_max", BAKE_MAX_RANGE_S[1]) < least_s:
        raise BadOption(
            f"--bake-max = {given.bake_max} is too short for --bake = {given.bake}: allowed are {least_s:g}s to "
            f"{durations.short(BAKE_MAX_RANGE_S[1])}."
        )


def _check_tenants(made: pb.RolloutSettings) -> None:
    both = sorted(set(made.only_tenants) & set(made.never_tenants))
    if both:
        raise BadOption(
            f"--only and --never both name {', '.join(both)}: allowed is each tenant in one of them."
        )
