"""Which tenants are about, how much prefill each used lately, and what a prompt of theirs takes. Pure."""

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
"""A tenant that did nothing for so long is not about any more: nothing is kept free for it."""

PROMPT_SMOOTHING: Final = 0.1


class _RecentUse:
    """Prefill seconds of prompts, and their tokens, fading over RECENT_S."""

    __slots__ = ("_at_s", "seconds", "tokens")

    def __init__(self) -> None:
        self.seconds = self.tokens = 0.0
        self._at_s = 0.0

    def add(self, seconds: float, tokens: int, now_s: float) -> None:
        """A prompt was dispatched."""
        self.fade(now_s)
        self.seconds += seconds
        self.tokens += tokens

    def fade(self, now_s: float) -> None:
        """Bring the sums to `now_s`."""
        if now_s > self._at_s:
            left = math.exp((self._at_s - now_s) / RECENT_S)
            self.seconds *= left
            self.tokens *= left
            self._at_s = now_s


@dataclass(slots=True, eq=False)
class _MeanPrompt:
    """What a prompt of a band's tenants takes: their means by weight."""

    weight: float = 0.0
    weighted_s: float = 0.0

    def add(self, weight: float, prompt_s: float) -> None:
        self.weight += weight
        self.weighted_s += weight * prompt_s


@dataclass(slots=True, eq=False)
class ActiveTenant:
    """A tenant that did something lately."""

    weight: float
    active_s: float
    used: _RecentUse = field(default_factory=_RecentUse)
    prompt_s: float = 0.0
    """Smoothed seconds of its prompts. 0: it had none yet."""
    counted_weight: float = 0.0
    """With which its prompts count among its band's."""
    held: dict[str, list[Prompt]] = field(default_factory=dict)
    """Its prompts by replica."""

    def left_s(self, now_s: float) -> float:
        """Return the seconds of its prompts that are left, as expected."""
        return sum(prompt.remaining_s(now_s) for prompts in self.held.values() for prompt in prompts)


@dataclass(slots=True, eq=False)
class _PriorityClass:
    """The active tenants of a band together; what they used is remembered beyond them."""

    count: int = 0
    weight: float = 0.0
    used: _RecentUse = field(default_factory=_RecentUse)
    mean_prompt: _MeanPrompt = field(default_factory=_MeanPrompt)


class ActiveTenants:
    """Those that had a request within ABOUT_S, or hold a prompt."""

    def __init__(self) -> None:
        self._active: OrderedDict[Tenant, ActiveTenant] = OrderedDict()
        """The least recently active first."""
        self._priority_classes: dict[int, _PriorityClass] = {}

    def __len__(self) -> int:
        return len(self._active)

    def get(self, tenant: Tenant) -> ActiveTenant | None:
        """Return what is known of `tenant`; None if it is not about."""
        return self._active.get(tenant)

    def touch(self, tenant: Tenant, weight: float, now_s: float) -> ActiveTenant:
        """`tenant` has a request."""
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
        """`prompt` was dispatched: its tenant holds it until `end`."""
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
        """Its tenant holds `prompt` no more."""
        held = self._active[prompt.tenant].held  # kept as long as it holds something
        prompts = held[prompt.replica]
        prompts.remove(prompt)
        if not prompts:
            del held[prompt.replica]

    def expire(self, now_s: float) -> None:
        """Forget who is not about any more."""
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
                )  # and what rounding left

    # The others: those of a tenant's band or above.

    def has_others(self, tenant: Tenant) -> bool:
        """True if others of its band or above are about."""
        if len(self._active) < 2:
            return bool(self._active) and tenant not in self._active
        count = sum(
            priority_class.count
            for number, priority_class in self._priority_classes.items()
            if number >= tenant[1]
        )
        return count > (tenant in self._active)

    def weight_from(self, number: int) -> float:
        """Return the sum of the weights of those in band `number` or above."""
        return sum(
            priority_class.weight for at, priority_class in self._priority_classes.items() if at >= number
        )

    def others_prompt_s(self, tenant: Tenant, own: ActiveTenant) -> float:
        """Return what a prompt of the others takes, infinite if none of theirs was seen."""
        weight, weighted_s = -own.counted_weight, -own.counted_weight * own.prompt_s
        for number, priority_class in self._priority_classes.items():
            if number >= tenant[1]:
                weight += priority_class.mean_prompt.weight
                weighted_s += priority_class.mean_prompt.weighted_s
        return weighted_s / weight if weight > WEIGHT_MIN / 2 else math.inf

    def others_use(self, tenant: Tenant, own: ActiveTenant, now_s: float) -> float:
        """Return the prefill seconds per second, that is the replicas, which the others used lately."""
        own.used.fade(now_s)
        others_s = -own.used.seconds
        for number, priority_class in self._priority_classes.items():
            if number >= tenant[1]:
                priority_class.used.fade(now_s)
                others_s += priority_class.used.seconds
        return max(0.0, others_s) / RECENT_S

    def seconds_of(self, tokens: int, now_s: float) -> float:
        """Return what `tokens` of prompts take, by what all prompts took lately."""
        if not tokens:
            return 0.0
        seen_s = seen = 0.0
        for priority_class in self._priority_classes.values():
            priority_class.used.fade(now_s)
            seen_s += priority_class.used.seconds
            seen += priority_class.used.tokens
        return tokens * seen_s / seen if seen > 0 else 0.0

    def assert_consistent(self, prompts: Iterable[Prompt]) -> None:
        """Raise AssertionError if a tenant is counted wrongly, or `prompts` are not those that are held."""
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
