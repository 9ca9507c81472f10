"""Parses the options of a replay. Each mistake is reported in one sentence. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from kvmesh.bad_option import BadOption
from simulator.catalogue import POLICIES
from simulator.cost import COSTS, GIB, Cost
from simulator.runs import BOUND

REPLICAS_MAX: Final = 1024
LOAD_MAX: Final = 10.0
CACHE_MAX: Final = 100.0
GIB_MAX: Final = 1e6
SECONDS_MAX: Final = 100.0
AHEAD_MAX_S: Final = 60.0
OFF: Final = "off"
KV_BYTES_MAX: Final = 1 << 30

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Cache:
    """The amount of cache: a share of the trace's unique blocks over all replicas, or GiB per replica."""

    share: float = 0.0
    gib: float = 0.0

    def __str__(self) -> str:
        return f"{self.gib:g}GiB" if self.gib else f"{self.share:g}"

    def blocks(self, cost: Cost, block_tokens: int) -> int:
        """Return the blocks per replica; 0 for a share. Raises BadOption if not even one block fits."""
        blocks = int(self.gib * GIB / (cost.kv_bytes * block_tokens))
        if self.gib and not blocks:
            raise BadOption(
                f"--cache = {self} holds no block: one takes {cost.gib(1, block_tokens):.2g} GiB."
            )
        return blocks


def listed(option: str, text: str, read: Callable[[str, str], Value]) -> list[Value]:
    """Read values separated by commas. A repeated value counts once."""
    parts = [part.strip() for part in text.split(",")]
    if not any(parts):
        raise BadOption(f'{option} = "{text}" is empty: values separated by commas are needed.')
    if not all(parts):
        raise BadOption(f'{option} = "{text}" has an empty value beside a comma: a value is needed there.')
    return list(dict.fromkeys(read(option, part) for part in parts))


def number(option: str, text: str, low: float, high: float, unit: str = "") -> float:
    """Read one number from `low` to `high`."""
    allowed = f"allowed are {low:.10g} to {high:.10g}{unit}"
    try:
        value = float(text)
    except ValueError:
        raise BadOption(f'{option} = "{text}" is not a number: {allowed}.') from None
    if not low <= value <= high:  # also refuses NaN
        raise BadOption(f"{option} = {text} is out of range: {allowed}.")
    return value


def replicas(option: str, text: str) -> int:
    """Read a number of replicas."""
    value = number(option, text, 1, REPLICAS_MAX)
    if value != int(value):
        raise BadOption(f"{option} = {text} is not a whole number: allowed are 1 to {REPLICAS_MAX}.")
    return int(value)


def load(option: str, text: str) -> float:
    """Read a load."""
    return number(option, text, 0.01, LOAD_MAX)


def cache(option: str, text: str) -> Cache:
    """Read a share, or GiB per replica."""
    lowered = text.lower()
    if lowered.endswith("gib"):
        return Cache(gib=number(option, lowered.removesuffix("gib"), 0.01, GIB_MAX, " GiB"))
    return Cache(share=number(option, text, 0.0, CACHE_MAX, ", a share, or GiB per replica (80GiB)"))


def policy(option: str, text: str) -> str:
    """Read the name of a policy."""
    if text not in POLICIES and text != BOUND:
        raise BadOption(f'{option} = "{text}" is not a policy: allowed are {", ".join((*POLICIES, BOUND))}.')
    return text


def policies(text: str) -> Sequence[str]:
    """Read names of policies; "all" is all of them."""
    return [*POLICIES, BOUND] if text == "all" else listed("--policies", text, policy)


def ahead_s(option: str, text: str) -> float:
    """Read the seconds of unstarted work that may be sent ahead; infinite for "off"."""
    return math.inf if text == OFF else number(option, text, 0.01, AHEAD_MAX_S, f" s, or {OFF}")


def cost(text: str, slo_s: float | None, kv_bytes: int | None = None) -> Cost:
    """Read the name of a model, or c0,a,b and optionally the bytes of KV cache per token. `kv_bytes` overrides them."""
    found = COSTS.get(text.lower())
    if found is None:
        parts = text.split(",")
        if len(parts) not in (3, 4):
            names = ", ".join(COSTS)
            raise BadOption(
                f'--cost = "{text}" is neither one of {names} nor c0,a,b in seconds[,KV bytes per token].'
            )
        c0_s, a_s, b_s = (number("--cost", part, 0, SECONDS_MAX, " s") for part in parts[:3])
        if c0_s + a_s + b_s <= 0:
            raise BadOption(f"--cost = {text} makes prompts free: one of c0, a, b must be above 0.")
        found = Cost(text, c0_s, a_s, b_s)
        if len(parts) == 4:
            found = replace(found, kv_bytes=math.ceil(number("--cost", parts[3], 1, KV_BYTES_MAX, " bytes")))
    if kv_bytes is not None:
        found = replace(found, kv_bytes=kv_bytes)
    return found if slo_s is None else replace(found, slo_floor_s=slo_s)
