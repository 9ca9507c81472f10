"""Reserves prefill replicas for other tenants (bulkhead): bounds the replicas that one tenant's prompts may hold.

Pure. The order of release does not interrupt a running prompt. If one tenant's long prompts run on every replica, a short
prompt of another tenant waits for the rest of one of them (head-of-line blocking). A tenant with much work at once
therefore leaves to the others the replicas that they need, within its own share. The others are the other recently
active tenants of its priority class or above.

    much:      B / R > BURST_PROMPTS * p
    reserved = min(k, R - ceil(R * w / W))     k: the smallest with E(k, d) <= BUSY_MAX

    R  replicas
    B  the tenant's backlog: prefill seconds of its waiting prompts, and the rest of its running ones
    p  mean prefill seconds of a prompt of the others, each tenant's mean counted by its weight
    w  the tenant's weight; W the sum of its weight and those of the others
    d  the others' use in replicas: their prefill seconds per second, over RECENT_S
    E  Erlang's loss formula: the share of the others' prompts that find all of k replicas busy

With all R replicas in the backlog, the others find no idle replica for B / R seconds. The mean p is by weight, so that
one tenant with many short prompts alone does not lower it. No earlier knowledge of the tenant is needed: the prompt
that makes its work a burst is held. Prompts one at a time are not held, nor bursts that hardly delay the others, nor a
tenant alone.

Only the router's own dispatches are known by tenant. With several routers, each reserves by its own view.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final

from services.router.queue.active_tenants import ActiveTenants
from services.router.queue.prompts import Prompt, Prompts, Tenant

BUSY_MAX: Final = 0.05
"""At most this share of the others' prompts shall find no idle replica. Their 95th percentile is then as if alone."""

BURST_PROMPTS: Final = 3.0
"""Prompts of their own length that the others would wait for a tenant's work before replicas are reserved. With a lower
value short bursts wait beside idle replicas. With a higher one the first prompts of a long burst delay the others."""

LATE_BINDING_S: Final = 0.05
"""Late binding: in a mesh with tenants a replica gets its next prompt when its remaining work takes no longer than this.
The tenant is chosen as late as possible without idling the engine."""


class ReplicaReservation:
    """The prefill replicas that each tenant may hold."""

    def __init__(self) -> None:
        self._tenants = ActiveTenants()
        self._prompts = Prompts()

    def __len__(self) -> int:
        """Return the number of active tenants."""
        return len(self._tenants)

    def touch(self, tenant: Tenant, weight: float, now_s: float) -> None:
        """Record that `tenant` has a request."""
        self._tenants.touch(tenant, weight, now_s)

    def dispatch(
        self, tenant: Tenant, weight: float, replica: str, seconds: float, tokens: int, now_s: float
    ) -> Prompt:
        """Record that a prompt of `tenant` goes to `replica`, for `seconds`. The caller reports its start and end."""
        prompt = Prompt(tenant, replica, seconds)
        self._tenants.use(prompt, weight, tokens, now_s)
        self._prompts.add(prompt)
        return prompt

    def start(self, prompt: Prompt, now_s: float) -> None:
        """Record that the engine has `prompt`."""
        self._prompts.start(prompt, now_s)

    def end(self, prompt: Prompt, now_s: float) -> float:
        """Record that `prompt` was computed or dropped. Return the most seconds that its engine can have spent
        (Prompts.end)."""
        self._tenants.end(prompt)
        return self._prompts.end(prompt, now_s)

    def allowance(self, tenant: Tenant, replicas: int, now_s: float, waiting_tokens: int = 0) -> int:
        """Return how many of `replicas` the tenant may hold now, at least 1. `waiting_tokens`: of its waiting prompts."""
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
        """Return the seconds until a prompt of `tenant` may go to `replica`; 0 means now."""
        if not (tenant[0] or self._tenants.has_others(tenant)):
            return 0.0
        return max(0.0, self._prompts.remaining_s(replica, now_s) - LATE_BINDING_S)

    def may_hold(
        self, tenant: Tenant, replicas: Sequence[str], now_s: float, waiting_tokens: int = 0
    ) -> Collection[str]:
        """Return the `replicas` that may get a prompt of `tenant`: all, or those it holds if it holds its allowance."""
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
        """Raise AssertionError if a tenant or a prompt is miscounted."""
        self._prompts.assert_consistent()
        self._tenants.assert_consistent(self._prompts)


def replicas_for(used: float, most: int) -> int:
    """Return how many replicas, up to `most`, keep BUSY_MAX for prompts that use `used` replicas on average."""
    busy, count = 1.0, 0
    while count < most and busy > BUSY_MAX and used > 0:
        count += 1
        busy = used * busy / (count + used * busy)  # Erlang's recursion
    return count
