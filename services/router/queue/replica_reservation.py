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
from collections.abc import Collection, Sequence
from typing import Final

from services.router.queue.active_tenants import ActiveTenants
from services.router.queue.prompts import Prompt, Prompts, Tenant

BUSY_MAX: Final = 0.05
"""Of the others' prompts at most this part shall find no replica at leisure: their 95th percentile is as if alone."""

BURST_PROMPTS: Final = 3.0
"""Prompts of their own that others would wait for a tenant's work before something is kept free for them. Less, and short
bursts wait beside idle replicas; more, and the first prompts of a burst of long ones are felt."""

LATE_BINDING_S: Final = 0.05
"""In a mesh with tenants a replica gets its next prompt when what it has takes no longer than this: so late is decided
whose it is, and early enough that the engine never waits for it."""


class ReplicaReservation:
    """Who may hold which replica."""

    def __init__(self) -> None:
        self._tenants = ActiveTenants()
        self._prompts = Prompts()

    def __len__(self) -> int:
        """Return how many tenants are about."""
        return len(self._tenants)

    def touch(self, tenant: Tenant, weight: float, now_s: float) -> None:
        """`tenant` has a request."""
        self._tenants.touch(tenant, weight, now_s)

    def dispatch(
        self, tenant: Tenant, weight: float, replica: str, seconds: float, tokens: int, now_s: float
    ) -> Prompt:
        """A prompt of `tenant` goes to `replica`, where it will take `seconds`. Tell of the result's start and end."""
        prompt = Prompt(tenant, replica, seconds)
        self._tenants.use(prompt, weight, tokens, now_s)
        self._prompts.add(prompt)
        return prompt

    def start(self, prompt: Prompt, now_s: float) -> None:
        """The engine has it."""
        self._prompts.start(prompt, now_s)

    def end(self, prompt: Prompt, now_s: float) -> float:
        """It is computed, or never will be. Return the most seconds that its engine can have spent on it (Prompts.end)."""
        self._tenants.end(prompt)
        return self._prompts.end(prompt, now_s)

    def allowance(self, tenant: Tenant, replicas: int, now_s: float, waiting_tokens: int = 0) -> int:
        """Return how many of `replicas` the tenant, of which `waiting_tokens` wait, may hold now; at least 1."""
        tenants = self._tenants
        tenants.expire(now_s)
        own = tenants.get(tenant)
        if replicas <= 1 or own is None or not tenants.has_others(tenant):
            return max(1, replicas)
        backlog_s = own.left_s(now_s) + tenants.seconds_of(waiting_tokens, now_s)
        if backlog_s / replicas <= BURST_PROMPTS * tenants.others_prompt_s(tenant, own):
            return replicas
        weights = tenants.weight_from(tenant[1])
        share = math.ceil(replicas * own.weight / max(own.weight, weights) - 1e-9)
        return replicas - replicas_for(tenants.others_use(tenant, own, now_s), replicas - share)

    def wait_s(self, tenant: Tenant, replica: str, now_s: float) -> float:
        """Return how long a prompt of `tenant` has to wait until it may go to `replica`. 0: it may go now."""
        if not (tenant[0] or self._tenants.has_others(tenant)):
            return 0.0
        return max(0.0, self._prompts.remaining_s(replica, now_s) - LATE_BINDING_S)

    def may_hold(
        self, tenant: Tenant, replicas: Sequence[str], now_s: float, waiting_tokens: int = 0
    ) -> Collection[str]:
        """Return those of `replicas` that may get a prompt of `tenant`: all, or those it holds, if it holds its part."""
        active = self._tenants.get(tenant)
        if active is None or not active.held or not self._tenants.has_others(tenant):
            return replicas
        own = [name for name in replicas if name in active.held]
        return (
            own
            if own and len(own) >= self.allowance(tenant, len(replicas), now_s, waiting_tokens)
            else replicas
        )

    def assert_consistent(self) -> None:
        """Raise AssertionError if a tenant or a prompt is counted wrongly."""
        self._prompts.assert_consistent()
        self._tenants.assert_consistent(self._prompts)


def replicas_for(used: float, most: int) -> int:
    """Return how many replicas, up to `most`, keep BUSY_MAX for prompts that use `used` replicas on average."""
    busy, count = 1.0, 0
    while count < most and busy > BUSY_MAX and used > 0:
        count += 1
        busy = used * busy / (count + used * busy)  # Erlang's recursion
    return count
