"""Active tenants, the prefill time that each used lately, and the mean time of its prompts. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from services.router.queue.fairness import WEIGHT_MIN
from services.router.queue.prompts import Prompt, Tenant

RECENT_S: Final = 10.0
"""Time in which the memory of work fades to 1/e."""

ACTIVE_S: Final = 60.0
"""A tenant without a request for this long is not active any more. No replica is reserved for it."""

PROMPT_SMOOTHING: Final = 0.1


class _RecentUse:
    """Sums of prefill seconds and tokens of prompts, fading over RECENT_S."""

    __slots__ = ("_at_s", "seconds", "tokens")

    def __init__(self) -> None:
        self.seconds = self.tokens = 0.0
        self._at_s = 0.0

    def add(self, seconds: float, tokens: int, now_s: float) -> None:
        """Add a dispatched prompt."""
        self.fade(now_s)
        self.seconds += seconds
        self.tokens += tokens

    def fade(self, now_s: float) -> None:
        """Fade the sums to the time `now_s`."""
        if now_s > self._at_s:
            left = math.exp((self._at_s - now_s) / RECENT_S)
            self.seconds *= left
            self.tokens *= left
            self._at_s = now_s


@dataclass(slots=True, eq=False)
class _MeanPrompt:
    """Mean prefill seconds of the prompts of a priority class: the mean of its tenants, by weight."""

    weight: float = 0.0
    weighted_s: float = 0.0

    def add(self, weight: float, prompt_s: float) -> None:
        self.weight += weight
        self.weighted_s += weight * prompt_s


@dataclass(slots=True, eq=False)
class ActiveTenant:
    """A tenant with a recent request."""

    weight: float
    active_s: float
    used: _RecentUse = field(default_factory=_RecentUse)
    prompt_s: float = 0.0
    """Smoothed seconds of its prompts. 0 before its first prompt."""
    counted_weight: float = 0.0
    """Weight with which its prompts count in the mean of its priority class."""
    held: dict[str, list[Prompt]] = field(default_factory=dict)
    """Its prompts by replica."""

    def left_s(self, now_s: float) -> float:
        """Return the expected remaining seconds of its prompts."""
        return sum(prompt.remaining_s(now_s) for prompts in self.held.values() for prompt in prompts)


@dataclass(slots=True, eq=False)
class _PriorityClass:
    """The active tenants of a priority class together. `used` also remembers tenants that are not active any more."""

    count: int = 0
    weight: float = 0.0
    used: _RecentUse = field(default_factory=_RecentUse)
    mean_prompt: _MeanPrompt = field(default_factory=_MeanPrompt)


class ActiveTenants:
    """Tenants that had a request within ACTIVE_S, or hold a prompt."""

    def __init__(self) -> None:
        self._active: OrderedDict[Tenant, ActiveTenant] = OrderedDict()
        """The least recently active first."""
        self._priority_classes: dict[int, _PriorityClass] = {}

    def __len__(self) -> int:
        return len(self._active)

    def get(self, tenant: Tenant) -> ActiveTenant | None:
        """Return what is known of `tenant`; None if it is not active."""
        return self._active.get(tenant)

    def touch(self, tenant: Tenant, weight: float, now_s: float) -> ActiveTenant:
        """Record that `tenant` has a request."""
        self.expire(now_s)
        weight = weight or 1.0
        priority_class = self._priority_classes.setdefault(tenant[1], _PriorityClass())
        active = self._active.get(tenant)
        if active is None:
            active = self._active[tenant] = ActiveTenant(weight, now_s)
            priority_class.weight += weight
            priority_class.count += 1
        else:
            priority_class.weight += weight - active.weight
            active.weight, active.active_s = weight, now_s
            self._active.move_to_end(tenant)
        return active

    def use(self, prompt: Prompt, weight: float, tokens: int, now_s: float) -> None:
        """Record that `prompt` was dispatched. Its tenant holds it until `end`."""
        active, priority_class = (
            self.touch(prompt.tenant, weight, now_s),
            self._priority_classes[prompt.tenant[1]],
        )
        active.held.setdefault(prompt.replica, []).append(prompt)
        active.used.add(prompt.seconds, tokens, now_s)
        priority_class.used.add(prompt.seconds, tokens, now_s)
        priority_class.mean_prompt.add(-active.counted_weight, active.prompt_s)
        share = PROMPT_SMOOTHING if active.prompt_s else 1.0
        active.prompt_s += share * (prompt.seconds - active.prompt_s)
        active.counted_weight = active.weight
        priority_class.mean_prompt.add(active.counted_weight, active.prompt_s)

    def end(self, prompt: Prompt) -> None:
        """Record that the tenant of `prompt` does not hold it any more."""
        held = self._active[prompt.tenant].held  # an active tenant is kept as long as it holds a prompt
        prompts = held[prompt.replica]
        prompts.remove(prompt)
        if not prompts:
            del held[prompt.replica]

    def expire(self, now_s: float) -> None:
        """Forget the tenants that are not active any more."""
        while self._active:
            tenant, active = next(iter(self._active.items()))
            if now_s - active.active_s < ACTIVE_S:
                return
            if active.held:
                active.active_s = now_s
                self._active.move_to_end(tenant)
                continue
            del self._active[tenant]
            priority_class = self._priority_classes[tenant[1]]
            priority_class.count -= 1
            priority_class.weight -= active.weight
            priority_class.mean_prompt.add(-active.counted_weight, active.prompt_s)
            if not priority_class.count:
                priority_class.weight, priority_class.mean_prompt = (
                    0.0,
                    _MeanPrompt(),
                )  # clears the rounding error

    # "Others" of a tenant are the other active tenants of its priority class or a higher one.

    def has_others(self, tenant: Tenant) -> bool:
        """Return True if other tenants of its priority class or a higher one are active."""
        if len(self._active) < 2:
            return bool(self._active) and tenant not in self._active
        count = sum(
            priority_class.count
            for number, priority_class in self._priority_classes.items()
            if number >= tenant[1]
        )
        return count > (tenant in self._active)

    def weight_from(self, number: int) -> float:
        """Return the sum of the weights of the active tenants in priority class `number` or above."""
        return sum(
            priority_class.weight for at, priority_class in self._priority_classes.items() if at >= number
        )

    def others_prompt_s(self, tenant: Tenant, own: ActiveTenant) -> float:
        """Return the mean prefill seconds of a prompt of the others; infinite before their first prompt."""
        weight, weighted_s = -own.counted_weight, -own.counted_weight * own.prompt_s
        for number, priority_class in self._priority_classes.items():
            if number >= tenant[1]:
                weight += priority_class.mean_prompt.weight
                weighted_s += priority_class.mean_prompt.weighted_s
        return weighted_s / weight if weight > WEIGHT_MIN / 2 else math.inf

    def others_use(self, tenant: Tenant, own: ActiveTenant, now_s: float) -> float:
        """Return the prefill seconds per second that the others used lately. This is their mean number of busy replicas."""
        own.used.fade(now_s)
        others_s = -own.used.seconds
        for number, priority_class in self._priority_classes.items():
            if number >= tenant[1]:
                priority_class.used.fade(now_s)
                others_s += priority_class.used.seconds
        return max(0.0, others_s) / RECENT_S

    def seconds_of(self, tokens: int, now_s: float) -> float:
        """Return the prefill seconds of `tokens` prompt tokens, by the recent prompts of all tenants."""
        if not tokens:
            return 0.0
        seen_s = seen = 0.0
        for priority_class in self._priority_classes.values():
            priority_class.used.fade(now_s)
            seen_s += priority_class.used.seconds
            seen += priority_class.used.tokens
        return tokens * seen_s / seen if seen > 0 else 0.0

    def assert_consistent(self, prompts: Iterable[Prompt]) -> None:
        """Raise AssertionError if a tenant is miscounted, or if `prompts` are not exactly the prompts that tenants hold."""
        held = [one for active in self._active.values() for at in active.held.values() for one in at]
        assert len(held) == len(set(held)) and set(held) == set(prompts)
        for number, priority_class in self._priority_classes.items():
            mine = [one for (_, at), one in self._active.items() if at == number]
            counted = _MeanPrompt()
            for active in mine:
                assert all(active.held.values()), "an empty replica is held"
                counted.add(active.counted_weight, active.prompt_s)
            assert priority_class.count == len(mine), number
            weight = sum(active.weight for active in mine)
            assert abs(priority_class.weight - weight) < 1e-6 * (1 + weight), number
            assert abs(priority_class.mean_prompt.weight - counted.weight) < 1e-6 * (1 + counted.weight), (
                number
            )
            assert abs(priority_class.mean_prompt.weighted_s - counted.weighted_s) < 1e-6 * (
                1 + counted.weighted_s
            ), number
        assert sum(priority_class.count for priority_class in self._priority_classes.values()) == len(
            self._active
        )
