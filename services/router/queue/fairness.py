"""What each tenant was served inside one band, and who is next: weighted token counters, the least served first.

Pure. Virtual Token Counters with lift (arXiv 2401.00588), with one counter for prefill and one for decode: a tenant's place
follows the larger of the two, its dominant share (DRF, arXiv 1104.4110 by way of DRFQ, SIGCOMM 2012), because a sum would
charge those who use what others leave. Neither counter lags behind the band's virtual time when it is charged, so that
nobody saves up a right to one pool while it uses the other.
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
"""Tenants of a band that are remembered though nothing of them waits, the last ones that did."""


@dataclass(slots=True, eq=False)
class TenantCounters:
    """A tenant in a band. Counters are charged tokens divided by the tenant's weight."""

    tenant: str
    weight: float = 1.0
    prefill: float = 0.0
    decode: float = 0.0
    waiting: int = 0
    """Requests that wait, resumed ones not counted."""
    waiting_tokens: int = 0
    """Their prompt tokens."""
    output_mean: float = OUTPUT_START
    """Smoothed output of its requests that ended, in tokens."""

    @property
    def served(self) -> float:
        """The dominant counter: the smallest is released next."""
        return max(self.prefill, self.decode)

    @property
    def finish_tag(self) -> float:
        """The counter after everything that waits was released, as far as prompts tell."""
        return self.served + self.waiting_tokens / self.weight

    def ended(self, output_tokens: int) -> None:
        """A request of it made `output_tokens`."""
        self.output_mean += OUTPUT_SMOOTHING * (output_tokens - self.output_mean)

    def lift(self, virtual_time: float) -> None:
        """Raise both counters to `virtual_time`."""
        if self.prefill < virtual_time:
            self.prefill = virtual_time
        if self.decode < virtual_time:
            self.decode = virtual_time


class Fairness:
    """The accounts of one band.

    `virtual_time` is the band's virtual time: the counter of the tenant released last, before it was charged. Who comes back from
    idleness starts there: ahead of those who were just served, with no right to what it did not use.
    """

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.waiting_weight = 0.0
        """Sum of the weights of the tenants with requests that wait."""
        self._accounts: dict[str, TenantCounters] = {}
        self._idle: OrderedDict[str, TenantCounters] = OrderedDict()

    def __len__(self) -> int:
        """Return how many tenants are remembered."""
        return len(self._accounts)

    def find(self, tenant: str) -> TenantCounters | None:
        """Return the account of `tenant` if it is remembered."""
        return self._accounts.get(tenant)

    def counters(self, tenant: str) -> TenantCounters:
        """Return the account of `tenant`; a new one if it is not remembered."""
        counters = self._accounts.get(tenant)
        if counters is None:
            counters = self._accounts[tenant] = TenantCounters(
                tenant, 1.0, self.virtual_time, self.virtual_time
            )
            self._idle[tenant] = counters
            self._forget()
        return counters

    def arrive(self, counters: TenantCounters, weight: float, tokens: int) -> None:
        """A request of `counters` waits from now on. The newest weight holds."""
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
        """A request of `counters` waits no more, whatever becomes of it."""
        counters.waiting -= 1
        counters.waiting_tokens -= tokens
        if counters.waiting:
            return
        self.waiting_weight -= counters.weight
        if len(self._idle) == len(self._accounts) - 1:
            self.waiting_weight = 0.0  # nobody waits: what rounding left is gone
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
        """A request of `counters` is released: charge it. Not `advances_virtual_time`: it went first whatever its tenant was served.

        Then it tells nothing of the band's virtual time: who comes back from idleness would start behind all that wait.
        """
        if advances_virtual_time:
            self.virtual_time = counters.served
        counters.lift(self.virtual_time)
        counters.prefill += PREFILL_WEIGHT * prefill_tokens / counters.weight
        counters.decode += DECODE_WEIGHT * output_tokens / counters.weight

    def correct(self, counters: TenantCounters, prefill_tokens: float, output_tokens: float) -> None:
        """Charge what turned out to be more, give back (below 0) what turned out to be less."""
        counters.prefill += PREFILL_WEIGHT * prefill_tokens / counters.weight
        counters.decode += DECODE_WEIGHT * output_tokens / counters.weight

    def _forget(self) -> None:
        """Drop the longest idle accounts beyond the bound."""
        while len(self._idle) > IDLE_ACCOUNTS_MAX:
            tenant, _ = self._idle.popitem(last=False)
            del self._accounts[tenant]

    def assert_consistent(self) -> None:
        """Raise AssertionError if a tenant is counted wrongly."""
        for tenant, counters in self._accounts.items():
            assert counters.tenant == tenant
            assert (counters.waiting == 0) == (tenant in self._idle), counters
            assert counters.waiting >= 0 and counters.waiting_tokens >= 0, counters
        assert set(self._idle) <= set(self._accounts)
        waiting = [one for one in self._accounts.values() if one.waiting]
        assert abs(self.waiting_weight - sum(one.weight for one in waiting)) < 1e-6 * (1 + len(waiting))
