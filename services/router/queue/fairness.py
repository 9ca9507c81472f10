"""Weighted fair queuing (fair queueing) of the tenants in one priority class: the tenant with the least service goes next.

Pure. The counters are Virtual Token Counters with lift (arXiv 2401.00588), one for prefill and one for decode. A tenant's
order follows the larger of the two, its dominant share (DRF, arXiv 1104.4110, by way of DRFQ, SIGCOMM 2012). A sum would
charge tenants for resources that other tenants leave idle. When a tenant is charged, its smaller counter is raised to the
virtual time of its class. A tenant therefore saves up no right to one pool while it uses the other.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

PREFILL_WEIGHT: Final = 1.0
"""Charge of an uncached prompt token."""

DECODE_WEIGHT: Final = 2.0
"""Charge of an output token (arXiv 2401.00588, section 4: an output token costs about two input tokens)."""

OUTPUT_START: Final = 128.0
"""Output tokens expected of a tenant's request before any of its requests ended."""

OUTPUT_SMOOTHING: Final = 0.1

WEIGHT_MIN: Final = 1e-3
WEIGHT_MAX: Final = 1000.0

IDLE_ACCOUNTS_MAX: Final = 4096
"""Tenants of a priority class that are remembered without a waiting request: the most recent ones."""


@dataclass(slots=True, eq=False)
class TenantCounters:
    """The counters of one tenant in a priority class: charged tokens divided by the tenant's weight."""

    tenant: str
    weight: float = 1.0
    prefill: float = 0.0
    decode: float = 0.0
    waiting: int = 0
    """Its waiting requests, resumed requests not counted."""
    waiting_tokens: int = 0
    """Prompt tokens of these requests."""
    output_mean: float = OUTPUT_START
    """Smoothed output of its ended requests, in tokens."""

    @property
    def served(self) -> float:
        """The dominant counter. The tenant with the smallest one is released next."""
        return max(self.prefill, self.decode)

    @property
    def finish_tag(self) -> float:
        """Its dominant counter after the release of all its waiting requests, with prompt tokens only: a virtual finish
        time."""
        return self.served + self.waiting_tokens / self.weight

    def ended(self, output_tokens: int) -> None:
        """Record that one of its requests generated `output_tokens`."""
        self.output_mean += OUTPUT_SMOOTHING * (output_tokens - self.output_mean)

    def lift(self, virtual_time: float) -> None:
        """Raise both counters to `virtual_time`."""
        if self.prefill < virtual_time:
            self.prefill = virtual_time
        if self.decode < virtual_time:
            self.decode = virtual_time


class Fairness:
    """The counters of the tenants in one priority class.

    `virtual_time` is the counter of the tenant released last, before its charge (start-time fair queuing). A tenant that
    returns from idleness starts there. It goes before the tenants just served, and has no claim to unused capacity.
    """

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.waiting_weight = 0.0
        """Sum of the weights of the tenants with waiting requests."""
        self._accounts: dict[str, TenantCounters] = {}
        self._idle: OrderedDict[str, TenantCounters] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of remembered tenants."""
        return len(self._accounts)

    def find(self, tenant: str) -> TenantCounters | None:
        """Return the counters of `tenant` if it is remembered."""
        return self._accounts.get(tenant)

    def counters(self, tenant: str) -> TenantCounters:
        """Return the counters of `tenant`, new ones if it is not remembered."""
        counters = self._accounts.get(tenant)
        if counters is None:
            counters = self._accounts[tenant] = TenantCounters(
                tenant, 1.0, self.virtual_time, self.virtual_time
            )
            self._idle[tenant] = counters
            self._forget()
        return counters

    def arrive(self, counters: TenantCounters, weight: float, tokens: int) -> None:
        """Record that a request of `counters` waits. The newest weight applies."""
        weight = min(WEIGHT_MAX, max(WEIGHT_MIN, weight or 1.0))
        if not counters.waiting:
            self._idle.pop(counters.tenant, None)
            counters.lift(self.virtual_time)
            counters.weight = weight
            self.waiting_weight += weight
        elif counters.weight != weight:
            self.waiting_weight += weight - counters.weight
            counters.weight = weight
        counters.waiting += 1
        counters.waiting_tokens += tokens

    def leave(self, counters: TenantCounters, tokens: int) -> None:
        """Record that a request of `counters` left the queue, for any reason."""
        counters.waiting -= 1
        counters.waiting_tokens -= tokens
        if counters.waiting:
            return
        self.waiting_weight -= counters.weight
        if len(self._idle) == len(self._accounts) - 1:
            self.waiting_weight = 0.0  # no tenant waits: clears the rounding error
        self._idle[counters.tenant] = counters
        self._forget()

    def release(
        self,
        counters: TenantCounters,
        prefill_tokens: float,
        output_tokens: float,
        *,
        advances_virtual_time: bool = True,
    ) -> None:
        """Charge `counters` for a request that is released.

        `advances_virtual_time`: False for a request that went first whatever service its tenant had. Such a request says
        nothing about virtual time. Otherwise a tenant that returns from idleness would start behind all waiting tenants.
        """
        if advances_virtual_time:
            self.virtual_time = counters.served
        counters.lift(self.virtual_time)
        counters.prefill += PREFILL_WEIGHT * prefill_tokens / counters.weight
        counters.decode += DECODE_WEIGHT * output_tokens / counters.weight

    def correct(self, counters: TenantCounters, prefill_tokens: float, output_tokens: float) -> None:
        """Charge the difference between the actual and the charged tokens. Values below 0 are given back."""
        counters.prefill += PREFILL_WEIGHT * prefill_tokens / counters.weight
        counters.decode += DECODE_WEIGHT * output_tokens / counters.weight

    def _forget(self) -> None:
        """Drop the counters that are idle longest, beyond the bound."""
        while len(self._idle) > IDLE_ACCOUNTS_MAX:
            tenant, _ = self._idle.popitem(last=False)
            del self._accounts[tenant]

    def assert_consistent(self) -> None:
        """Raise AssertionError if a tenant is miscounted."""
        for tenant, counters in self._accounts.items():
            assert counters.tenant == tenant
            assert (counters.waiting == 0) == (tenant in self._idle), counters
            assert counters.waiting >= 0 and counters.waiting_tokens >= 0, counters
        assert set(self._idle) <= set(self._accounts)
        waiting = [one for one in self._accounts.values() if one.waiting]
        assert abs(self.waiting_weight - sum(one.weight for one in waiting)) < 1e-6 * (1 + len(waiting))
