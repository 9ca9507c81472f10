"""Where requests go: the cheapest pair of a prefill and a decode replica, or decode alone.

Pure; randomness is injected. What the sides cost: prefill_choice.py, decode_choice.py. Here is what they share: the backlog
and what prompts cost, learnt from events.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
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
    Dispatched,
    Event,
    Finished,
    Hit,
    LoadReported,
    Measured,
    Placement,
    PlacementRequest,
    PoolView,
    Removed,
    ReplicaGone,
    ReplicaState,
    RouterGone,
    Started,
    Stored,
    Wait,
)
from services.router.placement.prefill_choice import CAN_DISPATCH, SCORE, NominalSeconds, PrefillChoice
from services.router.placement.reconciliation import Reconciliation
from services.router.placement.shortlist import Match
from services.router.placement.speeds import Speeds

RECHECK_S: Final = 0.05
"""A request that cannot be placed is looked at again after this, even if nothing was heard."""

TRANSFER_BLOCK_S: Final = 1e-4
"""4 MiB (32 tokens of a model of 8 billion weights) at 40 GB/s."""

OBSERVATIONS_MIN: Final = 8
"""Prompts measured before anything is refused because of an estimate."""

FRESH_S: Final = 10.0
"""Estimates of prompts measured longer ago may be what keeps everybody away: once in this time one of those that they would
refuse is let through."""

REFUTED_BELOW: Final = 0.5
"""A prompt that is measured after such a time, and took less than this share of its estimate, refutes the estimates."""

_tuple: Final = tuple.__new__
"""Makes a named tuple of a tuple, in a third of the time."""


class CostPolicy:
    """Prices replicas and chooses the cheapest pair.

    Owns the backlog and the cost model, and feeds the mirror.
    Invariant: once the mirror's upkeep is done, the overlay holds exactly the blocks of the backlog.
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
        """`order_key`: the order in which prefill replicas start what waits there.

        `transfer_block_s`: seconds in which a KV block moves from prefill to decode.
        """
        self.local_index = local_index
        self.backlog = Backlog(router, order_key)
        self.reconciliation = Reconciliation(self.backlog)
        self.costs = CostModel()
        self.speeds = Speeds()
        self.local_speeds = LocalSpeeds()
        self.prefills = PrefillChoice(router, self.backlog, rng, dispatch_ahead_s, order_key)
        self._measured_at_s = float("-inf")
        self._probed_at_s = float("-inf")
        self.estimate_total_s = 0.0
        """Prefill seconds expected, of prompts whose real ones are in `measured_total_s`."""
        self.measured_total_s = 0.0
        self._decodes = DecodeChoice(block_tokens, transfer_block_s, rng)
        self._block_tokens = block_tokens
        self._local_tokens_max = local_prefill_tokens_max

    def place(self, request: PlacementRequest, view: PoolView, now_s: float) -> Placement | Wait:
        """Choose for `request`."""
        if now_s >= self.backlog.next_expiry_s:
            self._expire(now_s)
        if not view.decode:
            return Wait("no decode replica", now_s + RECHECK_S)
        prefills, decodes = self.prefills, self._decodes
        match = Match(self.local_index, request.hashes)
        fitting = decodes.fitting(request, view, match)
        if not fitting:
            return Wait("no decode replica has room", now_s + RECHECK_S)

        tokens, block_tokens = request.token_count, self._block_tokens
        estimate_s = self.costs.estimate_s

        def nominal_s(depth: int) -> float:
            # The last token is always computed, to have logits.
            return estimate_s(tokens - depth * block_tokens, tokens)

        scored = prefills.score(request, view, match, nominal_s, self.speeds.factors, now_s)
        best = prefills.lowest(scored) if scored else None
        decode, handoff_s = decodes.for_handoff(fitting)
        paired_s = best[SCORE] + handoff_s if best is not None else math.inf
        local: LocalPrefill | None = None
        if best is None or tokens - match.deepest * block_tokens <= self._local_tokens_max:
            local = self._local_prefill(request, fitting, nominal_s, paired_s, now_s)
        prefill: str | None = None
        if local is not None:
            decode = local.decode
            matched_blocks, queue_s, seconds = local[1:4]
        else:
            assert best is not None, "no prefill replica, and decode does not run it"
            prefill, matched_blocks, queue_s, seconds = best[:4]
            if not best[CAN_DISPATCH]:
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
            return with_local_prefill(placement, local, scored, handoff_s, terms)
        return with_remote_prefill(placement, scored, fitting, terms)

    def observe(self, event: Event) -> None:
        """Learn what happened. Dispatches of other routers are told the same way as own ones."""
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
                self.reconciliation.on_load(event)
                self._expire(event.at_s)
            case Stored():
                self.local_index.store(event.replica, event.hashes)
            case Removed():
                self.local_index.remove(event.replica, event.hashes)
            case ReplicaGone():
                self._forget(self.backlog.of(event.replica))
                for each in (
                    self.backlog,
                    self.reconciliation,
                    self.speeds,
                    self.local_speeds,
                    self.prefills,
                ):
                    each.forget(event.replica)
            case RouterGone():
                self.prefills.forget_router(event.router)
                self._forget(list(self.backlog.by(event.router).values()))

    def knows_costs(self) -> bool:
        """True once enough prompts were measured to refuse work by the estimates."""
        return self.costs.observation_total >= OBSERVATIONS_MIN

    def may_refuse(self, now_s: float) -> bool:
        """Return whether a request may be refused by the estimates; False: it is to try them.

        Who is cut off by its deadline is not measured: without measurements one of them tries in FRESH_S, and no more.
        """
        if not self.knows_costs():
            return False
        if now_s - max(self._measured_at_s, self._probed_at_s) <= FRESH_S:
            return True
        self._probed_at_s = now_s
        return False

    def expected(
        self, hashes: Sequence[int], token_count: int, prefill: Sequence[ReplicaState]
    ) -> tuple[int, float]:
        """Return how many tokens of a prompt would be computed where most of it is in cache, and in how many seconds.

        That is one of `prefill`, or decode, which may hold the last reply too, if it ran what is left itself.
        """
        match = Match(self.local_index, hashes)
        depth = match.deepest
        if prefill and max(1, token_count - depth * self._block_tokens) > self._local_tokens_max:
            depth = self.prefills.deepest(prefill, match)
        uncached = max(1, token_count - depth * self._block_tokens)
        return uncached, self.costs.estimate_s(uncached, token_count)

    def queue_s(self, replica: str, now_s: float) -> float:
        """Return the seconds of work dispatched to `replica`."""
        return self.backlog.total_s(replica, now_s)

    # Choosing

    def _local_prefill(
        self,
        request: PlacementRequest,
        fitting: Sequence[Fitting],
        nominal_s: NominalSeconds,
        paired_s: float,
        now_s: float,
    ) -> LocalPrefill | None:
        """Return decode that runs the prompt itself, if that costs less than `paired_s`, or must be."""
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

        local = self._decodes.local_prefill(fitting, prefill_s, queue_s)
        return local if local.cost_s <= paired_s else None

    # Learning

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
            work.replica, work.hashes, min(hit.cached_blocks, len(work.hashes)), len(work.hashes)
        )
        if hit.prefill_s > 0:
            if work.is_own:
                self.estimate_total_s += work.prefill_s
                self.measured_total_s += hit.prefill_s
            self._measured(work.replica, hit, event.at_s)
        elif hit.local_s > 0:
            nominal_s = self.costs.estimate_s(hit.computed_tokens, hit.cached_tokens + hit.computed_tokens)
            self._forget_if_refuted(
                nominal_s, hit.local_s, event.at_s
            )  # refusals know no factor of decode's own
            self.local_speeds.observe(work.replica, nominal_s, hit.local_s, event.at_s)

    def _measured(self, replica: str, hit: Hit, at_s: float) -> None:
        total = hit.cached_tokens + hit.computed_tokens
        estimate_s = self.costs.estimate_s(hit.computed_tokens, total)
        self._forget_if_refuted(estimate_s * self.speeds.factor(replica), hit.prefill_s, at_s)
        self.speeds.observe(replica, estimate_s, hit.prefill_s)
        self.costs.observe(hit.computed_tokens, total, hit.prefill_s / self.speeds.factor(replica))
        if self.costs.observation_total == OBSERVATIONS_MIN:
            self.local_speeds.clear()  # they stood on a guess
        self._measured_at_s = max(self._measured_at_s, at_s)  # other routers tell of old ones, too

    def _forget_if_refuted(self, estimate_s: float, seconds: float, at_s: float) -> None:
        """Learn anew if nothing was measured for long, and this prompt was far quicker than it was foreseen there."""
        if at_s - self._measured_at_s > FRESH_S and seconds < REFUTED_BELOW * estimate_s:
            self.costs.forget()

    def _expire(self, now_s: float) -> None:
        for work in self.backlog.expired(now_s):
            self.backlog.remove(work.key)
            self.local_index.remove_in_flight(work.replica, work.hashes)

    def _forget(self, works: Sequence[Work]) -> None:
        """They may be thousands: their blocks are left to the mirror's upkeep."""
        for work in works:
            self.backlog.remove(work.key)
            self.local_index.remove_in_flight_later(work.replica, work.hashes)

    def assert_consistent(self) -> None:
        """Raise AssertionError if the overlay and the backlog disagree."""
        self.backlog.assert_consistent()
        self.local_index.assert_consistent()
