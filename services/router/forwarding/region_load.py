"""Load and capacity of a router's pool in units that do not depend on caches, for the other regions. Pure.

Load is what callers offer: uncached prompt tokens/s, requests that were refused for capacity included, and KV blocks in
use. A request that waits for room in decode counts with its blocks. Warm-up, probes and shadow traffic are no load.

Capacity in tokens/s is what one prefill replica computes in a second of work, times the replicas that serve. It holds for
the present mix of prompts only, because a prompt takes c0 + u (a + b (T - u / 2)) seconds for u uncached of T tokens. Load
over capacity is thus the share of time in which prefill is busy, within 2 percent up to saturation in the test with mixed
prompts. At 1.6 times the capacity it was 12 to 14 percent too high: shorter prompts go first, and c0 weighs more on them.
Guests are another mix: none of their tokens is cached. Where the mix has many hits, c0 and the attention to cached tokens
weigh on few computed tokens, and capacity is too low for guests. Where guests' prompts are longer than those of the mix, it
is too high, by up to b T / 2 over a.

Prompts that decode replicas run beside their streams count in both sums with the same tokens, as long as there are prefill
replicas. Each router knows its own of these, and takes the other routers to run as many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final

from kvmesh.attach.names import name_of
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.control.v1 import region_pb2
from kvmesh.regions.quantity import Quantity
from services.router.forwarding.attempt import Attempt, Stage
from services.router.forwarding.core import ForwardingCore
from services.router.forwarding.replicas import Replica
from services.router.placement.cost_policy import CostPolicy
from services.router.placement.policy import NO_ROOM
from services.router.regions.callers import Callers
from services.router.regions.home import Home
from services.router.regions.smoothed_ratio import SmoothedRatio
from services.router.regions.windows import Windows

NOMINAL_TOKENS: Final = 1024
"""Prompt by which the cost model gives a rate before the own prompts do."""

MEASURED_MIN: Final = 8 * NOMINAL_TOKENS
"""Measured tokens below which the own prompts give no rate: the first ones of a cold engine take many times as long."""

FAILED: Final = frozenset(
    name_of(pb.Failure.Code, code)
    for code in (
        pb.Failure.CODE_REPLICA_LOST,
        pb.Failure.CODE_ENGINE_LOST,
        pb.Failure.CODE_ENGINE_ERROR,
        pb.Failure.CODE_HANDOFF_LOST,
        pb.Failure.CODE_STALLED,
        pb.Failure.CODE_GAP,
        pb.Failure.CODE_INTERNAL,
    )
)
"""Outcomes of attempts that the region failed."""

ENDED: Final = FAILED | {
    name_of(pb.Finish.Reason, pb.Finish.REASON_END_TOKEN),
    name_of(pb.Finish.Reason, pb.Finish.REASON_LENGTH),
    name_of(pb.Failure.Code, pb.Failure.CODE_INVALID),
    name_of(pb.Failure.Code, pb.Failure.CODE_INVALID_TOKEN),
}
"""Outcomes that count. Left out: refusals, deadlines, slow readers, cancels, and attempts that go on on another stream."""


class RegionLoad:
    """See the module. `sample` is called about once a second, before `report`."""

    def __init__(
        self,
        core: ForwardingCore,
        callers: Callers,
        policy: CostPolicy,
        slots_max: int,
        ended: Callable[[str], int],
    ) -> None:
        """`slots_max`: slots of a decode replica. `ended`: attempts that ended so far with an outcome."""
        self.router_count = 1
        """Routers of the pool, this one included. Set by the owner."""
        self._core = core
        self._callers = callers
        self._policy = policy
        self._slots_max = slots_max
        self._ended = ended
        self._windows = Windows()
        self._prefill_rate = SmoothedRatio()
        self._local_rate = SmoothedRatio()
        self._sequence_blocks = SmoothedRatio()
        """KV blocks of a sequence in decode."""
        self._totals: defaultdict[str, float] = defaultdict(float)
        """Running totals by name."""
        self._sampled_s: float | None = None

    def sample(self, now_s: float) -> None:
        """Take the present state. A call too soon after the last one is ignored."""
        if not self._windows.is_due(now_s):
            return
        elapsed_s = 0.0 if self._sampled_s is None else now_s - self._sampled_s
        self._sampled_s = now_s
        policy, local, totals = self._policy, self._core.work.local, self._totals
        self._prefill_rate.take(policy.measured_tokens, policy.measured_total_s, now_s)
        self._local_rate.take(local.measured_tokens, local.seconds, now_s)
        for replica in self._serving("decode", now_s):
            if (report := replica.load.report) is not None:
                running = report.running_request_count + report.queued_request_count
                totals["reserved"] += report.block_reserved_count * elapsed_s
                totals["running"] += running * elapsed_s
        self._sequence_blocks.take(totals["reserved"], totals["running"], now_s)
        for name, blocks in self._blocks().items():
            totals[_blocks_of(name)] += blocks * elapsed_s
        for home in self._homes():
            totals[_tokens_of(home.name)] = home.uncached_tokens
        totals["prompts"], totals["local"] = self._callers.own.prompt_tokens, local.tokens
        self._windows.add(dict(totals), now_s)

    def load(self, home: Home) -> Quantity:
        """Return the load of the callers of a region, over the window."""
        return Quantity(
            self._windows.per_s(_tokens_of(home.name)), self._windows.per_s(_blocks_of(home.name))
        )

    def capacity(self, now_s: float) -> Quantity:
        """Return what the serving replicas of the pool can do. A part that is unknown is 0."""
        prefill, decode = self._serving("prefill", now_s), self._serving("decode", now_s)
        rate = self._prefill_tokens_per_s() if prefill else self._local_tokens_per_s()
        blocks = self._decode_blocks(decode)
        if not rate:
            return Quantity(0.0, blocks)
        if not prefill:
            return Quantity(rate * len(decode), blocks)
        local_per_s = self._windows.per_s("local") * self.router_count
        return Quantity(rate * len(prefill) + local_per_s, blocks)

    def report(self, now_s: float) -> region_pb2.RouterLoad:
        """Return the report for the control plane."""
        return region_pb2.RouterLoad(
            own=_message(self.load(self._callers.own)),
            capacity=_message(self.capacity(now_s)),
            guests=[
                region_pb2.GuestLoad(
                    region=name, load=_message(self.load(guest.home)), refused_total=guest.refused_total
                )
                for name, guest in self._callers.guests.items()
            ],
            attempt_total=sum(map(self._ended, ENDED)),
            failure_total=sum(map(self._ended, FAILED)),
            placeable_decode_count=self._core.eligible.placeable_decode_count(now_s),
            own_prompt_tokens_per_s=self._windows.per_s("prompts"),
        )

    def _homes(self) -> Iterable[Home]:
        yield self._callers.own
        for guest in self._callers.guests.values():
            yield guest.home

    def _serving(self, role: str, now_s: float) -> list[Replica[Attempt]]:
        """Return the replicas that get new requests. Of ejected ones these are no more than placement uses."""
        prefill, decode = self._core.eligible.current(now_s)
        return [self._core.replicas[state.name] for state in (prefill if role == "prefill" else decode)]

    def _prefill_tokens_per_s(self) -> float:
        """Return the tokens that a prefill replica computes in a second of work; 0: unknown."""
        rate = self._prefill_rate.value
        if rate is not None and self._policy.measured_tokens >= MEASURED_MIN:
            return rate
        if not self._policy.knows_costs():
            return 0.0
        return NOMINAL_TOKENS / self._policy.costs.estimate_s(NOMINAL_TOKENS, NOMINAL_TOKENS)

    def _local_tokens_per_s(self) -> float:
        """Return the tokens that a decode replica computes in a second of work on prompts; 0: unknown."""
        rate = self._local_rate.value
        return rate if rate is not None and self._core.work.local.measured_tokens >= MEASURED_MIN else 0.0

    def _decode_blocks(self, decode: list[Replica[Attempt]]) -> float:
        """Return the KV blocks of the `decode` replicas that sequences of the present length can fill."""
        blocks = sum(each.load.state.block_total for each in decode)
        each_blocks = self._sequence_blocks.value
        return min(blocks, self._slots_max * len(decode) * each_blocks) if each_blocks else blocks

    def _blocks(self) -> dict[str, float]:
        """Return the KV blocks in use, by home region. A taken-over attempt counts as a sequence of mean length."""
        blocks: dict[str, float] = {}
        is_decode_full = any(each.routing.waited_for in NO_ROOM for each in self._core.queue)
        mean_blocks = self._sequence_blocks.value or 0.0
        for attempt in self._core.attempts.open:
            home = attempt.home
            if home is not None and (
                attempt.decode.replica is not None or (is_decode_full and attempt.stage is Stage.QUEUED)
            ):
                used = mean_blocks if attempt.submitted.is_takeover else attempt.decode.blocks
                blocks[home.name] = blocks.get(home.name, 0.0) + used
        return blocks


def _tokens_of(region: str) -> str:
    return f"tokens:{region}"


def _blocks_of(region: str) -> str:
    return f"blocks:{region}"


def _message(quantity: Quantity) -> region_pb2.Quantity:
    return region_pb2.Quantity(tokens_per_s=quantity.tokens_per_s, blocks=quantity.blocks)
