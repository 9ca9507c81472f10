"""Where prompts run: where the prompt and all whom it delays lose least.

Pure; randomness is injected. For each prefill replica w, in seconds (docs/decisions: "Placement by what it costs all"):

    score_w = Q_w + P_w (1 + behind_w + kappa) + R_w(Q_w, P_w) + risk_w S        the smallest wins

Q: until its engine would begin; P: the prompt there, given what is cached; behind: those that wait there and are served
after it; kappa: those that wait per replica, in requests; R: what those lose who will come to w because of its cache
(regulars.py); risk S: the chance that another router was faster (blind_spot.py), times a typical prompt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvmesh.queue_order import OrderKey, shortest
from services.router.backlog import UTILISATION_S, Backlog, Key, Work
from services.router.blind_spot import BlindSpot
from services.router.costs import CostModel
from services.router.decode_choice import DecodeChoice, Own
from services.router.mirror import PrefixMirror
from services.router.policy import (
    Candidate,
    Dispatched,
    Event,
    Finished,
    Hit,
    LoadSeen,
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
from services.router.queue import LOOK_AHEAD
from services.router.reconciliation import Reconciliation
from services.router.regulars import Regulars
from services.router.shortlist import shortlist, window
from services.router.speeds import Speeds

KAPPA_MAX: Final = 8.0
PREFILL_SMOOTHING: Final = 0.01
PREFILL_START_S: Final = 0.3
PREFILL_FLOOR_S: Final = 0.001
RECHECK_S: Final = 0.05
"""A request that cannot be placed is looked at again after this, even if nothing was heard."""

PREFILL_START: Final = 8
"""Prompts for which the start value counts."""

TRANSFER_BLOCK_S: Final = 1e-4
"""4 MiB (32 tokens of a model of 8 billion weights) at 40 GB/s."""

WISH_LIFE_S: Final = 3 * RECHECK_S
"""A held request that is not looked at for this long has gone, or others are before it."""

OBSERVATIONS_MIN: Final = 8
"""Prompts measured before anything is refused because of an estimate."""

FRESH_S: Final = 10.0
"""Estimates by which something is refused are of prompts measured within this: older ones may be what keeps everybody away,
and then nothing would ever correct them."""

CANDIDATES_MAX: Final = 16


class _Offer(NamedTuple):
    """A prefill replica, priced."""

    candidate: Candidate
    may_go: bool
    """True if it may be sent more work now."""
    ends_s: float
    """Seconds until the prompt were done there behind all that is there: what one who goes there loses."""


class KappaPolicy:
    """Prices replicas and chooses the cheapest pair.

    Owns the backlog and the cost model, and feeds the mirror.
    Invariant: the overlay holds exactly the blocks of the backlog.
    """

    def __init__(
        self,
        router: str,
        mirror: PrefixMirror,
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
        self.mirror = mirror
        self.backlog = Backlog(router, order_key)
        self.reconciliation = Reconciliation(self.backlog)
        self._wishes = Backlog(router, order_key)
        """Requests held here, at the replicas they wait for: their next look may show a better one."""
        self.costs = CostModel()
        self.speeds = Speeds()
        self.regulars = Regulars()
        self.blind_spot = BlindSpot(router)
        self._measured_at_s = float("-inf")
        self.estimate_total_s = 0.0
        """Prefill seconds expected, of prompts whose real ones are in `measured_total_s`."""
        self.measured_total_s = 0.0
        self._rng = rng
        self._block_tokens = block_tokens
        self._dispatch_ahead_s = dispatch_ahead_s
        self._local_tokens_max = local_prefill_tokens_max
        self._transfer_block_s = transfer_block_s
        self._typical_prefill_s = PREFILL_START_S
        self._dispatch_total = 0
        self._chosen = "", 0.0
        """Whom the last answer was for, and the seconds it would have lost at the next best replica."""

    def place(self, request: PlacementRequest, view: PoolView, now_s: float) -> Placement | Wait:
        """Choose for `request`."""
        self._expire(now_s)
        if not view.decode:
            return Wait("no decode replica", now_s + RECHECK_S)
        choice = DecodeChoice(request, self._block_tokens, self._transfer_block_s, self._rng)
        if not choice.look(view, self.mirror):
            return Wait("no decode replica has room", now_s + RECHECK_S)
        wish = self._wishes.remove(_wish_key(request.request_id))
        since_s = wish.at_s if wish is not None else now_s
        offers = self._offers(request, view, since_s, now_s)
        best = self._lowest(offers) if offers else None
        decode, handoff_s = choice.beside_prefill()
        own = self._alone(request, choice, best.candidate.score + handoff_s if best else math.inf, now_s)
        prefill: str | None = None
        if own is not None:
            chosen = Candidate(own.decode.name, own.matched_blocks, own.queue_s, own.prefill_s, own.cost_s)
            decode = own.decode
        else:
            assert best is not None, "no prefill replica, and decode does not run it"
            chosen = best.candidate
            if not best.may_go:
                self._wish(request, chosen, since_s, now_s)
                return Wait(f"{chosen.replica} has work ahead", now_s + RECHECK_S, chosen.replica)
            prefill = chosen.replica
            elsewhere_s = min((one.ends_s for one in offers if one is not best), default=0.0)
            self._chosen = request.request_id, max(0.0, elsewhere_s - chosen.prefill_s)
        return Placement(
            prefill=prefill,
            decode=decode.name,
            matched_blocks=chosen.matched_blocks,
            prefill_s=chosen.prefill_s,
            estimate_s=chosen.queue_s + chosen.prefill_s,
            candidates=self._explained(request, chosen, offers),
        )

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
            case LoadSeen():
                self.reconciliation.on_load(event)
                self._expire(event.at_s)
            case Stored():
                self.mirror.store(event.replica, event.hashes)
            case Removed():
                self.mirror.remove(event.replica, event.hashes)
            case ReplicaGone():
                for work in self.backlog.of(event.replica):
                    self._remove(work)
                for each in (self.backlog, self.reconciliation, self.speeds, self.regulars, self.blind_spot):
                    each.forget(event.replica)
            case RouterGone():
                self.blind_spot.gone(event.router)
                for work in self.backlog.by(event.router):
                    self._remove(work)

    def cold_prefill_s(self, token_count: int) -> float:
        """Return the seconds a prompt would take without any cache."""
        return self.costs.estimate_s(token_count, token_count)

    def knows_costs(self) -> bool:
        """True once enough prompts were measured to refuse work by the estimates."""
        return self.costs.observation_total >= OBSERVATIONS_MIN

    def doubt_costs(self, now_s: float) -> None:
        """Something would be refused by the estimates: learn them anew if nothing was measured for FRESH_S."""
        if now_s - self._measured_at_s > FRESH_S:
            self.costs.forget()

    def prefill_s(self, hashes: Sequence[int], token_count: int) -> float:
        """Return the seconds a prompt would take where most of it is in cache."""
        depth = max(self.mirror.matched(hashes).values(), default=0)
        usable = min(depth * self._block_tokens, token_count - 1)
        return self.costs.estimate_s(token_count - usable, token_count)

    def queue_s(self, replica: str, now_s: float) -> float:
        """Return the seconds of work dispatched to `replica`."""
        return self.backlog.total_s(replica, now_s)

    # Choosing

    def _kappa(self, view: PoolView) -> float:
        """Requests per prefill replica that wait: each of them, or who comes after it, is delayed by more work."""
        typical_s = max(PREFILL_FLOOR_S, self._typical_prefill_s)
        waiting = self.backlog.waiting_s / typical_s + view.waiting_requests
        return min(KAPPA_MAX, waiting / len(view.prefill))

    def _offers(
        self, request: PlacementRequest, view: PoolView, since_s: float, now_s: float
    ) -> list[_Offer]:
        """Return the prefill replicas worth comparing, with what each would cost. `since_s`: when it came here."""
        if not view.prefill:
            return []
        allowed: Sequence[ReplicaState] = view.prefill
        if request.excluded:
            allowed = [one for one in allowed if one.name not in request.excluded] or allowed
        ends_s = self.backlog.ends_s
        self._look(allowed, now_s)
        kappa = self._kappa(view)
        offers = []
        for replica, depth in shortlist(allowed, self.mirror, request.hashes, ends_s, self._rng):
            name = replica.name
            prefill_s = self._prefill_s(request, replica, depth)
            line = self.backlog.line(name, prefill_s, now_s, request.precedence)
            held = self._wishes.line(name, prefill_s, since_s, request.precedence)
            queue_s, unseen = line.ahead_s + held.ahead_s, replica.queued_requests - line.waiting
            if unseen > 0 and not replica.is_stale:  # of other routers whose dispatches we do not hear
                queue_s += unseen * self._typical_prefill_s
            busy = self.backlog.recent_s(name, now_s) / UTILISATION_S
            score = (
                queue_s
                + prefill_s * (1 + line.behind + held.behind + kappa)
                + self.regulars.delay_s(name, queue_s, prefill_s, busy, now_s)
                + self.blind_spot.risk(name) * self._typical_prefill_s
            )
            may_go = not line.waiting or line.waiting_s + prefill_s <= self._dispatch_ahead_s
            if not may_go and view.waiting_requests:
                held_s = min(line.waiting_s, line.waiting_s + prefill_s - self._dispatch_ahead_s)
                score += held_s * view.waiting_requests / LOOK_AHEAD
            candidate = Candidate(name, depth, queue_s, prefill_s, score)
            later_s = line.total_s - line.ahead_s + held.total_s - held.ahead_s
            offers.append(_Offer(candidate, may_go, queue_s + later_s + prefill_s))
        return offers

    def _wish(self, request: PlacementRequest, chosen: Candidate, since_s: float, now_s: float) -> None:
        """It is held here for a replica that has enough to do: others that are held are to count it there."""
        key, until_s = _wish_key(request.request_id), now_s + WISH_LIFE_S
        wish = Work(
            key, chosen.replica, (), chosen.prefill_s, since_s, until_s, precedence=request.precedence
        )
        self._wishes.add(wish)

    def _look(self, allowed: Sequence[ReplicaState], now_s: float) -> None:
        """Let the blind spot know how many have nothing to do."""
        seen = window(allowed, self._rng)
        ends_s = self.backlog.ends_s
        idle = sum(ends_s.get(one.name, now_s) <= now_s for one in seen)
        self.blind_spot.look((one.name for one in allowed), round(idle * len(allowed) / len(seen)), now_s)

    def _lowest(self, offers: list[_Offer]) -> _Offer:
        lowest = min(one.candidate.score for one in offers)
        ties = [one for one in offers if one.candidate.score <= lowest * (1 + 1e-9)]
        return ties[0] if len(ties) == 1 else self._rng.choice(ties)

    def _alone(
        self, request: PlacementRequest, choice: DecodeChoice, paired_s: float, now_s: float
    ) -> Own | None:
        """Return decode that runs the prompt itself, if that costs less than `paired_s`."""

        def prefill_s(one: ReplicaState, depth: int) -> float:
            return self._prefill_s(request, one, depth)

        def queue_s(name: str, seconds: float) -> float:
            return self.backlog.queue_s(name, seconds, now_s)

        own = choice.alone(prefill_s, queue_s)
        uncached = request.token_count - self._usable_tokens(request, own.matched_blocks)
        is_short = uncached <= self._local_tokens_max
        return own if paired_s == math.inf or (is_short and own.cost_s <= paired_s) else None

    @staticmethod
    def _explained(
        request: PlacementRequest, chosen: Candidate, offers: list[_Offer]
    ) -> tuple[Candidate, ...]:
        if not request.explain:
            return ()
        others = [one.candidate for one in offers if one.candidate is not chosen]
        return (chosen, *sorted(others, key=lambda one: one.score)[: CANDIDATES_MAX - 1])

    def _prefill_s(self, request: PlacementRequest, replica: ReplicaState, depth: int) -> float:
        usable = self._usable_tokens(request, depth)
        seconds = self.costs.estimate_s(request.token_count - usable, request.token_count)
        return seconds * self.speeds.factor(replica.name)

    def _usable_tokens(self, request: PlacementRequest, depth: int) -> int:
        """Tokens that need not be computed: the last one always is, to have logits."""
        return min(depth * self._block_tokens, request.token_count - 1)

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
            self.mirror.unexpect(old.replica, old.hashes)
        self.mirror.expect(work.replica, work.hashes)
        if not work.is_own:
            self.blind_spot.heard(event.router, event.at_s)
            return
        self._dispatch_total += 1
        smoothing = max(PREFILL_SMOOTHING, 1 / (PREFILL_START + self._dispatch_total))
        self._typical_prefill_s += smoothing * (event.prefill_s - self._typical_prefill_s)
        chosen, lost_s = self._chosen
        if chosen == event.request_id:  # what the others chose for is not known: likely much the same
            self.regulars.came(event.replica, lost_s, event.at_s, self.blind_spot.routers)
            self._chosen = "", 0.0

    def _finished(self, event: Finished) -> None:
        work = self.backlog.remove((event.router, event.request_id), event.at_s)
        if work is None:
            return
        self.mirror.unexpect(work.replica, work.hashes)
        hit = event.hit
        if hit is None:
            return
        self.mirror.heal(
            work.replica, work.hashes, min(hit.cached_blocks, len(work.hashes)), len(work.hashes)
        )
        if hit.prefill_s > 0:
            if work.is_own:
                self.estimate_total_s += work.prefill_s
                self.measured_total_s += hit.prefill_s
            self._measured(work.replica, hit, event.at_s)

    def _measured(self, replica: str, hit: Hit, at_s: float) -> None:
        total = hit.cached_tokens + hit.computed_tokens
        self.speeds.observe(replica, self.costs.estimate_s(hit.computed_tokens, total), hit.prefill_s)
        self.costs.observe(hit.computed_tokens, total, hit.prefill_s / self.speeds.factor(replica))
        self._measured_at_s = at_s

    def _remove(self, work: Work) -> None:
        self.backlog.remove(work.key)
        self.mirror.unexpect(work.replica, work.hashes)

    def _expire(self, now_s: float) -> None:
        for wish in self._wishes.expired(now_s):
            self._wishes.remove(wish.key)
        for work in self.backlog.expired(now_s):
            self._remove(work)

    def assert_consistent(self) -> None:
        """Raise AssertionError if the overlay and the backlog disagree."""
        self.backlog.assert_consistent()
        self.mirror.assert_consistent()


def _wish_key(request_id: str) -> Key:
    return "", request_id
