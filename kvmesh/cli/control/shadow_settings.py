"""Options of `kvmesh shadow start` as the settings of a shadow, checked before they are sent. Pure.

The control plane checks them again, and alone knows the pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvmesh.bad_option import BadOption
from kvmesh.cli.control import durations
from kvmesh.cli.control.settings import check_name
from kvmesh.cli.control.shares import sample_permille, tokens
from kvmesh.control.v1 import shadow_pb2 as pb
from kvmesh.snapshot.shadow import FIRST_TOKENS_MAX

TTL_RANGE_S: Final = (10.0, 24 * 3600.0)
"""Range of --ttl, that of `controlplane.shadow.settings`."""

FULL: Final = "full"
TTFT_ONLY: Final = "ttft-only"
FIRST: Final = "first:"


@dataclass(frozen=True, slots=True)
class ShadowOptions:
    """Options as they were given. Empty texts: not given."""

    to: str
    sample: str
    mode: str = FULL
    max_tokens: str = ""
    max_tokens_per_minute: str = ""
    ttl: str = ""
    baseline: str = ""
    keeps_tokens: bool = False


def request_of(given: ShadowOptions, *, reason: str, dry_run: bool) -> pb.StartShadowRequest:
    """Return the request. Raises BadOption: one sentence with option, value and range."""
    check_name("--to", given.to)
    if given.baseline:
        check_name("--baseline", given.baseline)
    if given.baseline == given.to:
        raise BadOption(
            f'--baseline = "{given.baseline}" is the pool of --to: allowed is another pool, of the stable version.'
        )
    mode, first_tokens = _mode(given.mode)
    made = pb.StartShadowRequest(
        settings=pb.Shadow(
            to_pool=given.to,
            baseline_pool=given.baseline,
            sample_permille=sample_permille("--sample", given.sample),
            mode=mode,
            first_tokens=first_tokens,
            token_max=tokens("--max-tokens", given.max_tokens, 1),
            keep_tokens=given.keeps_tokens,
        ),
        reason=reason,
        validate_only=dry_run,
    )
    if given.max_tokens_per_minute:
        made.settings.tokens_per_minute_max = tokens(
            "--max-tokens-per-minute", given.max_tokens_per_minute, 1
        )
    if given.ttl:
        made.ttl.CopyFrom(durations.message(durations.parse("--ttl", given.ttl, *TTL_RANGE_S)))
    return made


def _mode(text: str) -> tuple[pb.Shadow.Mode.ValueType, int]:
    if text == FULL:
        return pb.Shadow.MODE_FULL, 0
    if text == TTFT_ONLY:
        return pb.Shadow.MODE_TTFT_ONLY, 0
    number = text.removeprefix(FIRST)
    if number != text and number.isascii() and number.isdecimal() and len(number) <= 6:
        tokens = int(number)
        if 1 <= tokens <= FIRST_TOKENS_MAX:
            return pb.Shadow.MODE_FIRST, tokens
    raise BadOption(
        f'--mode = "{text}" is unknown: allowed are {FULL}, {TTFT_ONLY} and {FIRST}1 to {FIRST}{FIRST_TOKENS_MAX}.'
    )
