"""Chooses the prefill replica that adds the least total delay, to the request and to others. Pure; randomness is injected.

For each replica w, in seconds (docs/decisions/0019-placement-cost.md):

    score_w = Q_w + P_w (1 + behind_w + kappa) + R_w(Q_w, P_w) + risk_w S        the smallest wins

    Q       time until its engine would begin with the prompt
    P       prefill seconds of the prompt there, given its cached prefix
    behind  waiting prompts there that are served after it; each is delayed by P
    kappa   congestion weight: waiting work per replica, in typical prompts, and requests waiting at this router
    R       displaced demand: loss of the requests that will come to w for its cache (displaced_demand.py)
    risk S  collision risk: the chance that another router was faster (collision_risk.py), times a typical prompt

While requests wait at this router, a replica that has too much waiting work to get the prompt now costs more: the time
until it may get the prompt, times these requests, over LOOK_AHEAD.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Final

from kvmesh.queue_order import AGING, OrderKey, fifo
from services.router.placement.backlog import UTILISATION_S, Backlog, Key, Work
from services.router.placement.collision_risk import CollisionRisk
from services.router.placement.displaced_demand import DisplacedDemand
from services.router.placement.policy import Dispatched, PlacementRequest, PoolView, ReplicaState
from services.router.placement.shortlist import Match, Shortlist, random_below, window
from services.router.queue.release_queue import LOOK_AHEAD

CONGESTION_WEIGHT_MAX: Final = 8.0
"""Upper bound of the congestion weight. In a longer queue no placement is good, and recomputing costs no more."""

TYPICAL_START_S: Final = 0.3
TYPICAL_START: Final = 8
"""Prompts for which the start value counts."""

TYPICAL_SMOOTHING: Final = 0.01
TYPICAL_FLOOR_S: Final = 0.001

HELD_LIFE_S: Final = 0.15
"""A held request that is not tried again for this long is not counted any more: it has left, or is behind others."""

NominalSeconds = Callable[[int], float]
"""Returns the prefill seconds of the prompt at an average replica, from its matched blocks."""


ScoredReplica = tuple[str, int, float, float, float, bool, float]
"""A prefill replica with its score. The first five values are those of a Candidate.

The sixth is True if the replica may get more work now. The last is the time until the prompt would be done there, after
all present work; `chose` computes the loss at the next best replica from it. A plain tuple, because most are only
compared.
"""

DEPTH: Final = 1
SCORE: Final = 4
CAN_DISPATCH: Final = 5
ENDS_S: Final = 6

_score: Final = itemgetter(SCORE)
_ends_s: Final = itemgetter(ENDS_S)


class PrefillChoice:
    """Scores prefill replicas. Tracks held requests, cache-affine requests, and the dispatches of other routers."""

    def __init__(
        self,
        router: str,
        backlog: Backlog,
        rng: random.Random,
        dispatch_ahead_s: float,
        order_key: OrderKey,
    ) -> None:
        self.typical_s = TYPICAL_START_S
        """Smoothed prefill seconds of a prompt."""
        self._backlog = backlog
        self._rng = rng
        self._shortlist = Shortlist(rng)
        self._dispatch_ahead_s = dispatch_ahead_s
        self._is_in_order = order_key is fifo
        """True if all work at a replica is served before later work."""
        self._displaced_demand = DisplacedDemand()
        self._collision_risk = CollisionRisk(router)
        self._held = Backlog(router, order_key)
        """Requests held here, at the replicas they wait for. Their next try may find a better replica."""
        self._dispatch_total = 0
        self._scored_since = "", 0.0
        """The request of the last call of `score`, and since when it is held."""
        self._chosen = "", 0.0
        """The last placed request, and the seconds it would have lost at the next best replica. With shortest first the
        loss is 0 if as much of the prompt is cached there."""

    # Choosing

    def score(
        self,
        request: PlacementRequest,
        view: PoolView,
        match: Match,
        nominal_s: NominalSeconds,
        factors: Mapping[str, float],
        now_s: float,
    ) -> list[ScoredReplica]:
        """Return the short-listed replicas with their scores; none without prefill replicas. `factors`: see speeds.py."""
        if not view.prefill:
            return []
        allowed: Sequence[ReplicaState] = view.prefill
        if request.excluded:
            allowed = [one for one in allowed if one.name not in request.excluded] or allowed
        backlog, held, typical_s = self._backlog, self._held, self.typical_s
        if typical_s < TYPICAL_FLOOR_S:
            typical_s = TYPICAL_FLOOR_S
        if now_s >= held.next_expiry_s:
            for entry in held.expired(now_s):
                held.remove(entry.key)
        since_s = self._since_s(request, now_s) if held.ends_s else now_s
        self._scored_since = request.request_id, since_s
        is_alone = self._collision_risk.routers == 1
        if not is_alone:
            self._look(allowed, now_s)
        has_held = len(held.ends_s) > 0
        waiting_here, dispatch_ahead_s = view.waiting_requests, self._dispatch_ahead_s
        excused_ahead_s = dispatch_ahead_s + AGING * request.waited_s
        congestion_weight = (backlog.waiting_s / typical_s + waiting_here) / len(view.prefill)
        if congestion_weight > CONGESTION_WEIGHT_MAX:
            congestion_weight = CONGESTION_WEIGHT_MAX
        precedence, queue_state, recent_s = request.precedence, backlog.queue_state, backlog.recent_s
        displaced, delay_s, is_in_order = (
            self._displaced_demand.demands,
            self._displaced_demand.delay_s,
            self._is_in_order,
        )
        known_depth, nominal, found = -1, 0.0, []
        for replica, depth in self._shortlist.of(allowed, match, backlog.ends_s):
            name = replica.name
            if depth != known_depth:
                known_depth, nominal = depth, nominal_s(depth)
            seconds = nominal * factors.get(name, 1.0)
            queue_s, behind, ends_s, waiting, waiting_s = queue_state(name, seconds, now_s, precedence)
            if has_held:
                held_s, held_behind, held_total_s, _, _ = held.queue_state(name, seconds, since_s, precedence)
                queue_s += held_s
                behind += held_behind
                ends_s += held_total_s
            if replica.queued_requests > waiting:  # dispatches of routers that are not heard here
                unknown_s = (replica.queued_requests - waiting) * typical_s
                queue_s += unknown_s
                ends_s += unknown_s
            score = queue_s + seconds * (1 + behind + congestion_weight)
            if name in displaced:
                busy = recent_s(name, now_s) / UTILISATION_S if is_in_order else None
                score += delay_s(name, queue_s, seconds, busy, now_s)
            if not is_alone:
                score += self._collision_risk.risk(name) * typical_s
            can_dispatch = not waiting or (
                waiting_s <= dispatch_ahead_s and waiting_s + seconds <= excused_ahead_s
            )
            if not can_dispatch and waiting_here:  # it would hold up later requests at this router
                held_s = min(waiting_s, waiting_s + seconds - dispatch_ahead_s)
                score += held_s * waiting_here / LOOK_AHEAD
            found.append((name, depth, queue_s, seconds, score, can_dispatch, ends_s + seconds))
        return found

    def deepest(self, prefill: Sequence[ReplicaState], match: Match) -> int:
        """Return how many leading blocks the replica with most of the prompt holds."""
        return self._shortlist.deepest(prefill, match)

    def lowest(self, scored: Sequence[ScoredReplica]) -> ScoredReplica:
        """Return the best of `scored`, a random one among equals."""
        if len(scored) == 1:
            return scored[0]
        ranked = sorted(scored, key=_score)
        lowest = ranked[0][SCORE] * (1 + 1e-9)
        if ranked[1][SCORE] > lowest:
            return ranked[0]
        ties = [one for one in scored if one[SCORE] <= lowest]
        return ties[random_below(len(ties), self._rng)]

    def terms(self, scored: ScoredReplica, now_s: float) -> tuple[float, float]:
        """Return the displaced demand and the collision risk in the score of `scored`, made at `now_s` by the last
        decision."""
        name, _, queue_s, seconds, *_ = scored
        busy = self._backlog.recent_s(name, now_s) / UTILISATION_S if self._is_in_order else None
        risk_s = self._collision_risk.risk(name) * max(self.typical_s, TYPICAL_FLOOR_S)
        return self._displaced_demand.delay_s(name, queue_s, seconds, busy, now_s), risk_s

    def chose(self, request: PlacementRequest, best: ScoredReplica, scored: Sequence[ScoredReplica]) -> None:
        """Remember the answer `best`. The loss elsewhere counts once the request is dispatched."""
        lost_s = 0.0
        if len(scored) > 1:
            other = min((one for one in scored if one is not best), key=_ends_s)
            # With shortest first it overtakes longer prompts elsewhere too, so a short queue alone saves it little.
            if self._is_in_order or other[DEPTH] < best[DEPTH]:
                lost_s = max(0.0, other[ENDS_S] - best[3])
        self._chosen = request.request_id, lost_s

    def hold(self, request: PlacementRequest, replica: str, prefill_s: float, now_s: float) -> None:
        """Hold the request here for the busy `replica`. Other held requests count it as work of that replica."""
        until_s = now_s + HELD_LIFE_S
        known, since_s = self._scored_since
        assert known == request.request_id, "held without being scored"
        self._held.add(
            Work(
                _key(request),
                replica,
                (),
                prefill_s,
                since_s,
                until_s,
                precedence=request.precedence,
            )
        )

    def _since_s(self, request: PlacementRequest, now_s: float) -> float:
        """Return since when the request is held, and stop counting it."""
        entry = self._held.remove(_key(request))
        return entry.at_s if entry is not None else now_s

    def _look(self, allowed: Sequence[ReplicaState], now_s: float) -> None:
        """Update the collision risk with the estimated number of idle replicas."""
        seen, ends_s = window(allowed, self._rng), self._backlog.ends_s
        idle = sum(ends_s.get(one.name, now_s) <= now_s for one in seen)
        self._collision_risk.update(allowed, round(idle * len(allowed) / len(seen)), now_s)

    # Learning

    def dispatched(self, event: Dispatched, *, is_own: bool) -> None:
        """Record a dispatch of this router or of a peer router."""
        if not is_own:
            self._collision_risk.record_dispatch(event.router, event.at_s, event.received_s)
            return
        self._dispatch_total += 1
        smoothing = max(TYPICAL_SMOOTHING, 1 / (TYPICAL_START + self._dispatch_total))
        self.typical_s += smoothing * (event.prefill_s - self.typical_s)
        request_id, lost_s = self._chosen
        if request_id == event.request_id:  # the losses of peer routers' requests are unknown: taken as equal
            routers = self._collision_risk.routers
            self._displaced_demand.record(event.replica, lost_s, event.prefill_s, event.at_s, routers)
            self._chosen = "", 0.0

    def forget(self, replica: str) -> None:
        """Forget a lost replica."""
        self._held.forget(replica)
        self._displaced_demand.forget(replica)
        self._collision_risk.forget_replica(replica)

    def forget_router(self, router: str) -> None:
        """Forget a lost router."""
        self._collision_risk.forget_router(router)


def _key(request: PlacementRequest) -> Key:
    return "", request.request_id
