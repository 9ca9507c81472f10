"""Cost policy (cache-aware routing, disaggregated prefill): chooses the cheapest pair of replicas, or decode alone.

Pure; randomness is injected. A prompt goes to the replica with its prefix cached, unless the queue there costs more
than the prefix cache saves (load balancing). A popular prefix therefore spreads over several replicas: no hot spot. A
pair is a prefill and a decode replica, with their costs in prefill_choice.py and decode_choice.py. This module has the
shared parts: the backlog, and the learnt costs of prompts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from kvmesh.queue_order import OrderKey, shortest
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.backlog import Backlog, Work
from services.router.placement.comparison import with_local_prefill, with_remote_prefill
from services.router.placement.cost_model import CostModel
from services.router.placement.decode_choice import DecodeChoice, Fitting, LocalPrefill
from services.router.placement.local_speeds import LocalSpeeds
from services.router.placement.policy import (
    NO_DECODE,
    NO_DECODE_ROOM,
    Dispatched,
    Event,
    Finished,
    Generated,
    Hit,
    LoadReported,
    Measured,
    Placement,
    PlacementRequest,
    PoolView,
    Removed,
    ReplicaLost,
    ReplicaState,
    RouterLost,
    Started,
    Stored,
    Wait,
)
from services.router.placement.prefill_choice import CAN_DISPATCH, SCORE, NominalSeconds, PrefillChoice
from services.router.placement.reconciliation import Reconciliation
from services.router.placement.shortlist import Match
from services.router.placement.slow_start import NO_MULTIPLIERS, SlowStarts, slowed_decodes, slowed_prefills
from services.router.placement.speeds import Speeds

RECHECK_S: Final = 0.05
"""A request that cannot be placed is tried again after this, even without a new event."""

TRANSFER_BLOCK_S: Final = 1e-4
"""Seconds to move a KV block: 4 MiB (32 tokens of a model of 8 billion weights) at 40 GB/s."""

OBSERVATIONS_MIN: Final = 8
"""Prompts measured before any request is refused because of an estimate."""

FRESH_S: Final = 10.0
"""A stale estimate may reject every request. Without a measurement for this long, one request per FRESH_S is admitted as a
probe."""

REFUTED_BELOW: Final = 0.5
"""A probe that took less than this share of its estimate refutes the estimates."""

_tuple: Final = tuple.__new__
"""Makes a named tuple of a tuple, in a third of the time of its constructor (measured once, by hand)."""


class CostPolicy:
    """Computes the cost of replicas, and chooses the cheapest pair.

    It owns the backlog and the cost model, and feeds the local prefix index. INVARIANT: after the index's maintenance, its
    in-flight blocks are exactly the blocks of the backlog.
    """

    def __init__(
        self,
        router: str,
        local_index: LocalPrefixIndex,
        rng: random.Random,
        *,
        block_tokens: int,
        dispatch_ahead_s: float,
        local_prefill_tokens_max: int,
        order_key: OrderKey = shortest,
        transfer_block_s: float = TRANSFER_BLOCK_S,
    ) -> None:
        """`order_key`: the order in which prefill replicas start waiting prompts.

        `transfer_block_s`: seconds in which a KV block moves from prefill to decode.
        """
        self.local_index = local_index
        self.backlog = Backlog(router, order_key)
        self.reconciliation = Reconciliation(self.backlog)
        self.costs = CostModel()
        self.speeds = Speeds()
        self.local_speeds = LocalSpeeds()
        self.slow_starts = SlowStarts()
        self.prefills = PrefillChoice(router, self.backlog, rng, dispatch_ahead_s, order_key)
        self._measured_at_s = float("-inf")
        self._probed_at_s = float("-inf")
        self.estimate_total_s = 0.0
        """Estimated prefill seconds of the own prompts that `measured_total_s` sums up."""
        self.measured_total_s = 0.0
        self.measured_tokens = 0
        """Computed tokens of the same prompts."""
        self._decodes = DecodeChoice(block_tokens, transfer_block_s, rng)
        self._block_tokens = block_tokens
        self._local_tokens_max = local_prefill_tokens_max

    def place(self, request: PlacementRequest, view: PoolView, now_s: float) -> Placement | Wait:
        """Choose the replicas of `request`."""
        if now_s >= self.backlog.next_expiry_s:
            self._expire(now_s)
        if not view.decode:
            return Wait(NO_DECODE, now_s + RECHECK_S)
        prefills, decodes = self.prefills, self._decodes
        match = Match(self.local_index, request.hashes)
        fitting = decodes.fitting(request, view, match)
        if not fitting:
            return Wait(NO_DECODE_ROOM, now_s + RECHECK_S)
        has_aggregated = any(one[0].is_aggregated for one in fitting)
        if has_aggregated and all(one[0].is_aggregated for one in fitting):
            view = PoolView((), view.decode, view.waiting_requests)  # no pair: as without any prefill replica

        tokens, block_tokens = request.token_count, self._block_tokens
        estimate_s = self.costs.estimate_s

        def nominal_s(depth: int) -> float:
            # The last token is always computed, to have logits.
            return estimate_s(tokens - depth * block_tokens, tokens)

        scored = prefills.score(request, view, match, nominal_s, self.speeds.factors, now_s)
        multipliers = NO_MULTIPLIERS
        if self.slow_starts.began_s:
            multipliers = self.slow_starts.multipliers(now_s)
            scored, fitting = slowed_prefills(scored, multipliers), slowed_decodes(fitting, multipliers)
        best = prefills.lowest(scored) if scored else None
        paired = fitting
        if has_aggregated and view.prefill:
            paired = [one for one in fitting if not one[0].is_aggregated]
        decode, handoff_s = decodes.for_handoff(paired)
        paired_s = best[SCORE] + handoff_s if best is not None else math.inf
        local: LocalPrefill | None = None
        is_short = tokens - match.deepest * block_tokens <= self._local_tokens_max
        if best is None or (is_short and not request.is_warm_up):
            local = self._local_prefill(request, fitting, nominal_s, paired_s, multipliers, now_s)
        prefill: str | None = None
        if local is not None:
            decode = local.decode
            matched_blocks, queue_s, seconds = local[1:4]
        else:
            assert best is not None, "no prefill replica, and decode does not run it"
            prefill, matched_blocks, queue_s, seconds = best[:4]
            if not best[CAN_DISPATCH]:
                if not request.is_warm_up:
                    prefills.hold(request, prefill, seconds, now_s)
                return Wait(f"{prefill} has work ahead", now_s + RECHECK_S, prefill)
            prefills.chose(request, best, scored)
        placement = _tuple(
            Placement, (prefill, decode.name, matched_blocks, seconds, queue_s + seconds, (), ())
        )
        if not request.explain:
            return placement
        terms = partial(prefills.terms, now_s=now_s)
        if local is not None:
            return with_local_prefill(placement, local, scored, handoff_s, terms, multipliers)
        return with_remote_prefill(placement, scored, fitting, terms, multipliers)

    def observe(self, event: Event) -> None:
        """Learn from an event. Dispatches of peer routers are observed in the same way as own ones."""
        match event:
            case Dispatched():
                self._dispatched(event)
            case Started():
                self.backlog.start((event.router, event.request_id), event.at_s)
            case Finished():
                self._finished(event)
            case Measured():
                self._measured(event.replica, event.hit, event.at_s)
            case LoadReported():
                self._follow_cache(event)
                self.reconciliation.on_load(event)
                self.slow_starts.take(event)
                if event.is_fresh:
                    self.speeds.forget(event.replica)
                    self.local_speeds.forget(event.replica)
                self._expire(event.at_s)
            case Stored():
                self.local_index.store(event.replica, event.hashes)
            case Removed():
                self.local_index.remove(event.replica, event.hashes)
            case Generated():
                self.local_index.use(event.replica, event.hashes, event.output_blocks, event.at_s)
            case ReplicaLost():
                self.local_index.doubt(event.replica)
                self._forget(self.backlog.of(event.replica))
                for each in (
                    self.backlog,
                    self.reconciliation,
                    self.speeds,
                    self.local_speeds,
                    self.slow_starts,
                    self.prefills,
                ):
                    each.forget(event.replica)
            case RouterLost():
                self.prefills.forget_router(event.router)
                self._forget(list(self.backlog.by(event.router).values()))

    def knows_costs(self) -> bool:
        """Return True once enough prompts were measured to refuse work by the estimates."""
        return self.costs.observation_total >= OBSERVATIONS_MIN

    def is_fresh(self, now_s: float) -> bool:
        """Return True if the costs are known, and a prompt was measured within FRESH_S."""
        return self.knows_costs() and now_s - self._measured_at_s <= FRESH_S

    def may_refuse(self, now_s: float) -> bool:
        """Return whether a request may be refused by the estimates. False: the request is admitted as a probe.

        A request that ends at its deadline is not measured. Without measurements, one such request per FRESH_S is a probe.
        """
        if not self.knows_costs():
            return False
        if self.is_fresh(now_s) or now_s - self._probed_at_s <= FRESH_S:
            return True
        self._probed_at_s = now_s
        return False

    def expected(
        self, hashes: Sequence[int], token_count: int, prefill: Sequence[ReplicaState]
    ) -> tuple[int, float]:
        """Return the tokens to compute of a prompt where most of it is in cache, and the seconds for them.

        The replica is one of `prefill`. It is any replica if `prefill` is empty or decode may compute the uncached part.
        A decode replica may also hold the last reply of the conversation.
        """
        match = Match(self.local_index, hashes)
        depth = match.deepest
        if prefill and max(1, token_count - depth * self._block_tokens) > self._local_tokens_max:
            depth = self.prefills.deepest(prefill, match)
        uncached = max(1, token_count - depth * self._block_tokens)
        return uncached, self.costs.estimate_s(uncached, token_count)

    def queue_s(self, replica: str, now_s: float) -> float:
        """Return the seconds of dispatched and unfinished work at `replica`."""
        return self.backlog.total_s(replica, now_s)

    # Choosing

    def _local_prefill(
        self,
        request: PlacementRequest,
        fitting: Sequence[Fitting],
        nominal_s: NominalSeconds,
        paired_s: float,
        multipliers: Mapping[str, float],
        now_s: float,
    ) -> LocalPrefill | None:
        """Return local prefill at a decode replica if it costs at most `paired_s`.

        `paired_s`: cost of the best pair of replicas; infinite: there is no pair. `multipliers`: see slow_start.py.
        """
        if paired_s < math.inf:
            # The last token is always computed, to have logits.
            tokens, tokens_max = request.token_count, self._local_tokens_max
            fitting = [one for one in fitting if max(1, tokens - one[1] * self._block_tokens) <= tokens_max]
            if not fitting:
                return None

        def prefill_s(name: str, depth: int) -> float:
            return nominal_s(depth) * self.local_speeds.factor(name, now_s)

        def queue_s(name: str, seconds: float) -> float:
            return self.backlog.queue_s(name, seconds, now_s)

        local = self._decodes.local_prefill(fitting, prefill_s, queue_s, multipliers)
        return local if local.cost_s <= paired_s else None

    # Learning

    def _follow_cache(self, seen: LoadReported) -> None:
        """Note by which means the index learns of the cache of a replica, and whether the cache may be empty."""
        if not seen.believed_blocks_max:
            self.local_index.trust_events(seen.replica)
            return
        self.local_index.believe(seen.replica, seen.believed_blocks_max, seen.engine_boot_id)
        if not seen.is_engine_ready:
            self.local_index.doubt(seen.replica)

    def _dispatched(self, event: Dispatched) -> None:
        work = Work(
            (event.router, event.request_id),
            event.replica,
            event.hashes,
            event.prefill_s,
            event.at_s,
            event.expires_s,
            precedence=event.precedence,
            tokens=event.token_count,
        )
        old = self.backlog.add(work)
        if old is not None:
            self.local_index.remove_in_flight(old.replica, old.hashes)
        self.local_index.add_in_flight(work.replica, work.hashes)
        self.prefills.dispatched(event, is_own=work.is_own)

    def _finished(self, event: Finished) -> None:
        work = self.backlog.remove((event.router, event.request_id), event.at_s)
        if work is None:
            return
        self.local_index.remove_in_flight(work.replica, work.hashes)
        hit = event.hit
        if hit is None:
            return
        self.local_index.repair(
            work.replica,
            work.hashes,
            min(hit.cached_blocks, len(work.hashes)),
            len(work.hashes),
            at_s=event.at_s,
            dispatched_s=work.at_s,
        )
        if hit.prefill_s > 0:
            if work.is_own:
                self.estimate_total_s += work.prefill_s
                self.measured_total_s += hit.prefill_s
                self.measured_tokens += hit.computed_tokens
            self._measured(work.replica, hit, event.at_s)
        elif hit.local_s > 0:
            nominal_s = self.costs.estimate_s(hit.computed_tokens, hit.cached_tokens + hit.computed_tokens)
            self._forget_if_refuted(
                nominal_s, hit.local_s, event.at_s
            )  # refusals do not use the factor of decode
            self.local_speeds.observe(work.replica, nominal_s, hit.local_s, event.at_s)

    def _measured(self, replica: str, hit: Hit, at_s: float) -> None:
        total = hit.cached_tokens + hit.computed_tokens
        estimate_s = self.costs.estimate_s(hit.computed_tokens, total)
        self._forget_if_refuted(estimate_s * self.speeds.factor(replica), hit.prefill_s, at_s)
        self.speeds.observe(replica, estimate_s, hit.prefill_s)
        self.costs.observe(hit.computed_tokens, total, hit.prefill_s / self.speeds.factor(replica))
        if self.costs.observation_total == OBSERVATIONS_MIN:
            self.local_speeds.clear()  # these were relative to a guess
        self._measured_at_s = max(self._measured_at_s, at_s)  # peer routers report old ones, too

    def _forget_if_refuted(self, estimate_s: float, seconds: float, at_s: float) -> None:
        """Forget the cost model if a probe was far quicker than its estimate, after FRESH_S without a measurement."""
        if at_s - self._measured_at_s > FRESH_S and seconds < REFUTED_BELOW * estimate_s:
            self.costs.forget()

    def _expire(self, now_s: float) -> None:
        for work in self.backlog.expired(now_s):
            self.backlog.remove(work.key)
            self.local_index.remove_in_flight(work.replica, work.hashes)

    def _forget(self, works: Sequence[Work]) -> None:
        """Forget `works`, which may be thousands. Their blocks are removed in the maintenance of the index."""
        for work in works:
            self.backlog.remove(work.key)
            self.local_index.remove_in_flight_later(work.replica, work.hashes)

    def assert_consistent(self) -> None:
        """Raise AssertionError if the in-flight blocks and the backlog disagree."""
        self.backlog.assert_consistent()
        self.local_index.assert_consistent()
