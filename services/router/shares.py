"""How many prefill replicas a tenant may hold with its prompts while others are about.

Pure. The order of release decides who is next, but a prompt that runs is not interrupted: with every replica in one
tenant's long prompts, whoever comes next waits for the rest of one of them, however short its own. So a tenant with
much work at once leaves as many replicas alone as the others need, within its own share:

    much:      B / R > PATIENCE * p
    reserved = min(k, R - ceil(R * w / W))     k: the smallest with E(k, d) <= BUSY_MAX

R replicas. B the tenant's backlog: the prefill seconds of what waits of it, and what is left of what runs. With all R
replicas in it, others would find none at leisure for B / R; p is what a prompt of the others takes, each tenant's mean
counted by its weight: one that sends many short ones makes nobody else's work look much. w is the tenant's weight of the
sum W of those who were about lately in its band or above; d the others' use in replicas (their prefill seconds per
second, over RECENT_S). E is Erlang's loss formula: so many of the others' prompts would find all of k replicas busy.
Nothing has to be known of the tenant before: a burst is held at the prompt that makes it one. Prompts that come one by
one, bursts that others hardly feel, and a tenant alone are held by nothing.

Only own dispatches are known by tenant: with several routers each reserves by what it sees.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.router.fairness import WEIGHT_MIN

RECENT_S: Final = 10.0
"""Time in which the memory of work fades to 1/e."""

ABOUT_S: Final = 60.0
"""A tenant that did nothing for so long is not about any more: nothing is kept free for it."""

BUSY_MAX: Final = 0.05
"""Of the others' prompts at most this part shall find no replica at leisure: their 95th percentile is as if alone."""

PATIENCE: Final = 3.0
"""Prompts of their own that others would wait for a tenant's work before something is kept free for them. Less, and short
bursts wait beside idle replicas; more, and the first prompts of a burst of long ones are felt."""

PROMPT_SMOOTHING: Final = 0.1

AHEAD_S: Final = 0.05
"""In a mesh with tenants a replica gets its next prompt when what it has takes no longer than this: so late is decided
whose it is, and early enough that the engine never waits for it."""

Tenant = tuple[str, int]
"""Name and band."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt at a replica that is not computed yet."""

    tenant: Tenant
    replica: str
    seconds: float
    is_started: bool = False
    """An engine has it."""
    first_s: float | None = None
    """Since when it is the first of those that its engine has: engines run prompts in order."""

    def remaining_s(self, now_s: float) -> float:
        """Return how much of it is left, as expected."""
        return self.seconds if self.first_s is None else max(0.0, self.first_s + self.seconds - now_s)


class _Use:
    """Prompts, their prefill seconds and their tokens, fading over RECENT_S."""

    __slots__ = ("_at_s", "prompts", "seconds", "tokens")

    def __init__(self) -> None:
        self.prompts = self.seconds = self.tokens = 0.0
        self._at_s = 0.0

    def add(self, seconds: float, tokens: int, now_s: float) -> None:
        """A prompt was dispatched."""
        self.fade(now_s)
        self.prompts += 1.0
        self.seconds += seconds
        self.tokens += tokens

    def fade(self, now_s: float) -> None:
        """Bring the sums to `now_s`."""
        if now_s > self._at_s:
            left = math.exp((self._at_s - now_s) / RECENT_S)
            self.prompts *= left
            self.seconds *= left
            self.tokens *= left
            self._at_s = now_s


@dataclass(slots=True, eq=False)
class _Typical:
    """What a prompt of a band's tenants takes: their means by weight."""

    weight: float = 0.0
    weighted_s: float = 0.0

    def add(self, weight: float, prompt_s: float) -> None:
        self.weight += weight
        self.weighted_s += weight * prompt_s


@dataclass(slots=True, eq=False)
class _Active:
    """A tenant that did something lately."""

    weight: float
    active_s: float
    used: _Use = field(default_factory=_Use)
    prompt_s: float = 0.0
    """Smoothed seconds of its prompts. 0: it had none yet."""
    counted_weight: float = 0.0
    """With which its prompts count among its band's."""
    held: dict[str, list[Prompt]] = field(default_factory=dict)
    """Its prompts by replica."""

    def left_s(self, now_s: float) -> float:
        """Return the seconds of its prompts that are left, as expected."""
        return sum(prompt.remaining_s(now_s) for prompts in self.held.values() for prompt in prompts)


class Shares:
    """Who holds which replica, and who used how much lately."""

    def __init__(self) -> None:
        self._active: OrderedDict[Tenant, _Active] = OrderedDict()
        """The least recently active first."""
        self._weights: dict[int, float] = {}
        """By band: the sum of the weights of the active."""
        self._counts: dict[int, int] = {}
        """By band: the number of the active."""
        self._used: dict[int, _Use] = {}
        """By band."""
        self._typical: dict[int, _Typical] = {}
        """By band."""
        self._prompts: dict[str, dict[Prompt, None]] = {}
        """By replica: those that are not computed."""

    def __len__(self) -> int:
        """Return how many tenants are about."""
        return len(self._active)

    def touch(self, tenant: Tenant, weight: float, now_s: float) -> None:
        """`tenant` has a request."""
        self._expire(now_s)
        active = self._active.get(tenant)
        weight = weight or 1.0
        if active is None:
            active = self._active[tenant] = _Active(weight, now_s)
            self._weights[tenant[1]] = self._weights.get(tenant[1], 0.0) + weight
            self._counts[tenant[1]] = self._counts.get(tenant[1], 0) + 1
        else:
            self._weights[tenant[1]] += weight - active.weight
            active.weight, active.active_s = weight, now_s
            self._active.move_to_end(tenant)

    def dispatch(
        self, tenant: Tenant, weight: float, replica: str, seconds: float, tokens: int, now_s: float
    ) -> Prompt:
        """A prompt of `tenant` goes to `replica`, where it will take `seconds`. Tell of the result's start and end."""
        self.touch(tenant, weight, now_s)
        prompt = Prompt(tenant, replica, seconds)
        active = self._active[tenant]
        active.held.setdefault(replica, []).append(prompt)
        active.used.add(seconds, tokens, now_s)
        self._learn(active, tenant[1], seconds)
        self._used.setdefault(tenant[1], _Use()).add(seconds, tokens, now_s)
        self._prompts.setdefault(replica, {})[prompt] = None
        return prompt

    def start(self, prompt: Prompt, now_s: float) -> None:
        """The engine has it."""
        if prompt.is_started:
            return
        prompt.is_started = True
        prompts = self._prompts[prompt.replica]
        if all(one is prompt or not one.is_started for one in prompts):
            prompt.first_s = now_s

    def end(self, prompt: Prompt, now_s: float) -> float:
        """It is computed, or never will be. Return the seconds its engine had it as the first; 0 if it never was."""
        prompts = self._prompts[prompt.replica]
        del prompts[prompt]
        if not prompts:
            del self._prompts[prompt.replica]
        elif prompt.first_s is not None:
            heir = next((one for one in prompts if one.is_started), None)
            if heir is not None:
                heir.first_s = now_s
        active = self._active[prompt.tenant]  # kept as long as it holds something
        held = active.held[prompt.replica]
        held.remove(prompt)
        if not held:
            del active.held[prompt.replica]
        return now_s - prompt.first_s if prompt.first_s is not None else 0.0

    def is_shared(self, tenant: Tenant) -> bool:
        """True if others of its band or above are about."""
        if len(self._active) < 2:
            return bool(self._active) and tenant not in self._active
        return sum(count for band, count in self._counts.items() if band >= tenant[1]) > (
            tenant in self._active
        )

    def allowance(self, tenant: Tenant, replicas: int, now_s: float, waiting_tokens: int = 0) -> int:
        """Return how many of `replicas` the tenant, of which `waiting_tokens` wait, may hold now; at least 1."""
        self._expire(now_s)
        own = self._active.get(tenant)
        if replicas <= 1 or own is None or not self.is_shared(tenant):
            return max(1, replicas)
        backlog_s = own.left_s(now_s) + self._waiting_s(waiting_tokens, now_s)
        if backlog_s / replicas <= PATIENCE * self._patient_s(tenant, own):
            return replicas
        own.used.fade(now_s)
        others_s = -own.used.seconds
        for band, used in self._used.items():
            if band >= tenant[1]:
                used.fade(now_s)
                others_s += used.seconds
        weights = sum(one for band, one in self._weights.items() if band >= tenant[1])
        share = math.ceil(replicas * own.weight / max(own.weight, weights) - 1e-9)
        return replicas - replicas_for(max(0.0, others_s) / RECENT_S, replicas - share)

    def held(self, tenant: Tenant) -> Collection[str]:
        """Return the replicas that have prompts of the tenant."""
        active = self._active.get(tenant)
        return active.held.keys() if active is not None else ()

    def wait_s(self, tenant: Tenant, replica: str, now_s: float) -> float:
        """Return how long a prompt of `tenant` has to wait until it may go to `replica`. 0: it may go now."""
        prompts = self._prompts.get(replica)
        if not prompts or not (tenant[0] or self.is_shared(tenant)):
            return 0.0
        return max(0.0, sum(one.remaining_s(now_s) for one in prompts) - AHEAD_S)

    def may_hold(
        self, tenant: Tenant, replicas: Sequence[str], now_s: float, waiting_tokens: int = 0
    ) -> Collection[str]:
        """Return those of `replicas` that may get a prompt of `tenant`: all, or those it holds, if it holds its part."""
        held = self.held(tenant)
        if not held or not self.is_shared(tenant):
            return replicas
        own = [name for name in replicas if name in held]
        return (
            own
            if own and len(own) >= self.allowance(tenant, len(replicas), now_s, waiting_tokens)
            else replicas
        )

    def _learn(self, active: _Active, band: int, seconds: float) -> None:
        typical = self._typical.setdefault(band, _Typical())
        typical.add(-active.counted_weight, active.prompt_s)
        share = PROMPT_SMOOTHING if active.prompt_s else 1.0
        active.prompt_s += share * (seconds - active.prompt_s)
        active.counted_weight = active.weight
        typical.add(active.counted_weight, active.prompt_s)

    def _patient_s(self, tenant: Tenant, own: _Active) -> float:
        """Return what a prompt of the others takes, infinite if none of theirs was seen."""
        weight, weighted_s = -own.counted_weight, -own.counted_weight * own.prompt_s
        for band, typical in self._typical.items():
            if band >= tenant[1]:
                weight += typical.weight
                weighted_s += typical.weighted_s
        return weighted_s / weight if weight > WEIGHT_MIN / 2 else math.inf

    def _waiting_s(self, tokens: int, now_s: float) -> float:
        """Return what `tokens` of prompts take, by what all prompts took lately."""
        if not tokens:
            return 0.0
        seen_s = seen = 0.0
        for used in self._used.values():
            used.fade(now_s)
            seen_s += used.seconds
            seen += used.tokens
        return tokens * seen_s / seen if seen > 0 else 0.0

    def _expire(self, now_s: float) -> None:
        while self._active:
            tenant, active = next(iter(self._active.items()))
            if now_s - active.active_s < ABOUT_S:
                return
            if active.held:
                active.active_s = now_s
                self._active.move_to_end(tenant)
                continue
            del self._active[tenant]
            self._counts[tenant[1]] -= 1
            self._weights[tenant[1]] -= active.weight
            if tenant[1] in self._typical:
                self._typical[tenant[1]].add(-active.counted_weight, active.prompt_s)
            if not self._counts[tenant[1]]:
                del self._counts[tenant[1]], self._weights[tenant[1]]
                self._typical.pop(tenant[1], None)  # and what rounding left

    def assert_consistent(self) -> None:
        """Raise AssertionError if a tenant or a prompt is counted wrongly."""
        bands: dict[int, float] = {}
        prompts = []
        for (_, band), active in self._active.items():
            bands[band] = bands.get(band, 0.0) + active.weight
            assert all(active.held.values()), "an empty replica is held"
            prompts += [prompt for held in active.held.values() for prompt in held]
        assert bands.keys() == self._weights.keys() == self._counts.keys()
        assert sum(self._counts.values()) == len(self._active)
        assert all(abs(bands[band] - self._weights[band]) < 1e-6 * (1 + bands[band]) for band in bands)
        for band in bands:
            typical, counted = self._typical.get(band, _Typical()), _Typical()
            for active in (one for (_, number), one in self._active.items() if number == band):
                counted.add(active.counted_weight, active.prompt_s)
            assert abs(typical.weight - counted.weight) < 1e-6 * (1 + counted.weight), band
            assert abs(typical.weighted_s - counted.weighted_s) < 1e-6 * (1 + counted.weighted_s), band
        assert set(prompts) == {prompt for one in self._prompts.values() for prompt in one}
        for replica, one in self._prompts.items():
            assert one and all(prompt.replica == replica for prompt in one)
            first = [prompt for prompt in one if prompt.first_s is not None]
            assert len(first) == any(prompt.is_started for prompt in one), replica


def replicas_for(used: float, most: int) -> int:
    """Return how many replicas, up to `most`, keep BUSY_MAX for prompts that use `used` replicas on average."""
    busy, count = 1.0, 0
    while count < most and busy > BUSY_MAX and used > 0:
        count += 1
        busy = used * busy / (count + used * busy)  # Erlang's recursion
    return count
