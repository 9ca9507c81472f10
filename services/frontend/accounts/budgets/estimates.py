"""Estimates the tokens that a request will be charged, learnt from ended requests, and computes its charge at the end.

Pure. Each pair of tenant and class has two histograms of fixed size. One counts output tokens, in buckets with edges 9 %
apart. The other counts the cached share of the prompt, in buckets of 5 percentage points. All counts are halved every few
hundred requests. A reservation takes the upper edge of a high quantile of the output and the lower edge of a low quantile
of the share. Rounding therefore reserves more, never less (overcommit is bounded by tokens_overrun, decision 0025).

    estimate = prompt x (1 - discount x low share) + min(max output, high output);  strict: prompt + max output
    charge   = prompt - discount x cached + output
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from typing import Final

from kvmesh.tenants.caller import Caller, Tenant

COLD_OUTPUT: Final = 512
"""Tokens of output reserved until LEARNT_MIN requests have ended."""

LEARNT_MIN: Final = 16

QUANTILES: Final = (0.90, 0.93, 0.95, 0.97, 0.98, 0.99)
"""Quantiles of output to choose from. If more than OVERRUN_MAX of the last JUDGED_MIN settled requests overran their
reservation, the next higher quantile is used; if fewer than OVERRUN_LOW did, the next lower one."""

OVERRUN_MAX: Final = 0.05
OVERRUN_LOW: Final = 0.01
JUDGED_MIN: Final = 64
"""Settled requests between two changes of the quantile."""

SHARE_QUANTILE: Final = 0.10
FORGET_AT: Final = 512
"""Requests after which all counts are halved, so that the last few hundred requests dominate."""

LEARNERS_MAX: Final = 4096
"""Remembered pairs of tenant and class, some 1.2 KB each (measured once, by hand). The least recently used pair is
forgotten first (LRU)."""

_PER_OCTAVE: Final = 8
_OUTPUT_BUCKETS: Final = 20 * _PER_OCTAVE
_SHARE_BUCKETS: Final = 20


class Learner:
    """Learns the token use of one tenant's requests of one class."""

    __slots__ = ("_judged", "_outputs", "_overran", "_seen", "_shares", "_step", "output", "share")

    def __init__(self) -> None:
        self.output = COLD_OUTPUT
        """Tokens of output to reserve, unless the request's own limit is lower."""
        self.share = 0.0
        """Share of the prompt that at least 90 % of the requests find cached."""
        self._outputs = array("f", bytes(4 * _OUTPUT_BUCKETS))
        self._shares = array("f", bytes(4 * _SHARE_BUCKETS))
        self._seen = 0
        self._judged = 0
        self._overran = 0
        self._step = 0

    def __repr__(self) -> str:
        return f"Learner(output {self.output} at {self.quantile}, share {self.share:.2f})"

    @property
    def quantile(self) -> float:
        """Quantile of output that is reserved."""
        return QUANTILES[self._step]

    def learn(self, output_tokens: int, cached_share: float, *, has_overrun: bool) -> None:
        """Take one request that ended: 0 <= `cached_share` <= 1. `has_overrun`: its charge exceeded its reservation."""
        self._outputs[_output_bucket(output_tokens)] += 1
        self._shares[min(_SHARE_BUCKETS - 1, int(cached_share * _SHARE_BUCKETS))] += 1
        self._seen += 1
        self._judged += 1
        self._overran += has_overrun
        if self._judged >= JUDGED_MIN:
            self._judge()
        if self._seen >= LEARNT_MIN and not self._seen & 7:
            self._refresh()
        if self._seen >= FORGET_AT:
            self._seen //= 2
            for counts in (self._outputs, self._shares):
                for at, count in enumerate(counts):
                    counts[at] = count / 2

    def _judge(self) -> None:
        overran = self._overran / self._judged
        if overran > OVERRUN_MAX:
            self._step = min(self._step + 1, len(QUANTILES) - 1)
        elif overran < OVERRUN_LOW:
            self._step = max(self._step - 1, 0)
        self._judged = self._overran = 0

    def _refresh(self) -> None:
        # Rounded up to the next whole count: the maximum of few requests.
        self.output = math.ceil(2 ** ((_rank(self._outputs, self.quantile) + 1) / _PER_OCTAVE))
        self.share = _rank(self._shares, SHARE_QUANTILE) / _SHARE_BUCKETS


def _output_bucket(tokens: int) -> int:
    """Return the bucket of [2^(n/8), 2^((n+1)/8)) tokens."""
    return min(_OUTPUT_BUCKETS - 1, int(math.log2(tokens) * _PER_OCTAVE)) if tokens > 1 else 0


def _rank(counts: array[float], quantile: float) -> int:
    """Return the first bucket with at least `quantile` of all counts up to it."""
    wanted, seen = quantile * sum(counts), 0.0
    for at, count in enumerate(counts):
        seen += count
        if seen >= wanted and count:
            return at
    return len(counts) - 1


class Estimates:
    """The learners of all tenants and classes, LEARNERS_MAX of them."""

    def __init__(self) -> None:
        self._learners: OrderedDict[tuple[str, str], Learner] = OrderedDict()

    def __len__(self) -> int:
        return len(self._learners)

    def learner(self, tenant: str, service_class: str) -> Learner:
        """Return the learner of a tenant's requests of a class."""
        key = tenant, service_class
        found = self._learners.get(key)
        if found is None:
            found = self._learners[key] = Learner()
            if len(self._learners) > LEARNERS_MAX:
                self._learners.popitem(last=False)
        return found

    def learn(
        self, caller: Caller, prompt_tokens: int, cached_tokens: int, output_tokens: int, *, has_overrun: bool
    ) -> None:
        """Take the token use of an ended request of `caller`."""
        key = caller.tenant.name, caller.service_class.name
        learner = self.learner(*key)
        self._learners.move_to_end(key)
        share = min(1.0, max(0.0, cached_tokens / prompt_tokens)) if prompt_tokens > 0 else 0.0
        learner.learn(output_tokens, share, has_overrun=has_overrun)


def estimate(tenant: Tenant, learner: Learner, prompt_tokens: int, max_output_tokens: int) -> tuple[int, int]:
    """Return the tokens of the prompt and of the output to reserve."""
    if tenant.is_strict:
        return prompt_tokens, max_output_tokens
    free = tenant.cached_discount * learner.share
    prompt = prompt_tokens - int(free * prompt_tokens) if free else prompt_tokens
    return prompt, min(max_output_tokens, learner.output)


def charge(tenant: Tenant, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
    """Return the charge of a request in tokens. Cached tokens beyond those of the prompt are ignored."""
    cached = min(cached_tokens, prompt_tokens)
    return prompt_tokens - int(tenant.cached_discount * cached) + output_tokens
