"""Where prompts run: queue seconds plus prefill seconds, the latter counted again for those it will delay.

Pure; randomness is injected. score_w = Q_w(P_w) + P_w (1 + kappa + rho_w), the smallest wins (reference: routing.md,
sections 6 and 7): on an idle cluster kappa is 0 and the fastest start wins; in a backlog caches are kept to.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from kvmesh.queue_order import OrderKey, shortest
from services.router.backlog import UTILISATION_S, Backlog, Work
from services.router.costs import CostModel
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
from services.router.reconciliation import Reconciliation

KAPPA_MAX: Final = 8.0
PREFILL_SMOOTHING: Final = 0.01
PREFILL_START_S: Final = 0.3
PREFILL_FLOOR_S: Final = 0.001
RECHECK_S: Final = 0.05
"""A request that cannot be placed is looked at again after this, even if nothing was heard."""

HANDOFF_S: Final = 0.01
"""What a prefill elsewhere costs besides: one more hop and the move of the blocks."""

OBSERVATIONS_MIN: Final = 8
"""Prompts measured before anything is refused because of an estimate."""

FRESH_S: Final = 10.0
"""Estimates by which something is refused are of prompts measured within this: older ones may be what keeps everybody away,
and then nothing would ever correct them."""

CANDIDATES_MAX: Final = 16
HEAD_ROOM_BLOCKS: Final = 1
"""Blocks a request may need beyond prompt and output: the last, partial one."""


class KappaPolicy:
    """The policy of routing.md, section 6, for queues that serve shortest first.

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
    ) -> None:
        """`order_key`: the order in which prefill replicas start what waits there."""
        self.mirror = mirror
        self.backlog = Backlog(router, order_key)
        self.reconciliation = Reconciliation(self.backlog)
        self.costs = CostModel()
        self._measured_at_s = float("-inf")
        self.estimate_total_s = 0.0
        """Prefill seconds expected, of prompts whose real ones are in `measured_total_s`."""
        self.measured_total_s = 0.0
        self._rng = rng
        self._block_tokens = block_tokens
        self._dispatch_ahead_s = dispatch_ahead_s
        self._local_tokens_max = local_prefill_tokens_max
        self._typical_prefill_s = PREFILL_START_S

    def place(self, request: PlacementRequest, view: PoolView, now_s: float) -> Placement | Wait:
        """Choose for `request`."""
        self._expire(now_s)
        if not view.decode:
            return Wait("no decode replica", now_s + RECHECK_S)
        depths = self.mirror.matched(request.hashes)
        decode = self._choose_decode(request, view, depths)
        if decode is None:
            return Wait("no decode replica has room", now_s + RECHECK_S)
        candidates = self._candidates(request, view, depths, now_s)
        local = self._local(request, view, depths, [one for one, _ in candidates])
        if local is not None:
            return local
        best = self._lowest([one for one, _ in candidates])
        released = [one for one, may_go in candidates if may_go]
        if best not in released:
            return Wait(f"{best.replica} has work ahead", now_s + RECHECK_S, best.replica)
        return Placement(
            prefill=best.replica,
            decode=decode.name,
            matched_blocks=best.matched_blocks,
            prefill_s=best.prefill_s,
            estimate_s=best.queue_s + best.prefill_s,
            candidates=self._explained(request, best, [one for one, _ in candidates]),
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
                self._measured(event.hit, event.at_s)
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
                self.backlog.forget(event.replica)
                self.reconciliation.forget(event.replica)
            case RouterGone():
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

    def _kappa(self, view: PoolView, now_s: float) -> float:
        """Backlog per prefill replica, in requests: what the replicas have and what waits for them here."""
        count = len(view.prefill)
        backlog_s = sum(self.backlog.total_s(one.name, now_s) for one in view.prefill)
        typical_s = max(PREFILL_FLOOR_S, self._typical_prefill_s)
        return min(KAPPA_MAX, (backlog_s / typical_s + view.waiting_requests) / count)

    def _candidates(
        self, request: PlacementRequest, view: PoolView, depths: dict[str, int], now_s: float
    ) -> list[tuple[Candidate, bool]]:
        """Return every prefill replica with its score, and whether it may be sent more work now."""
        if not view.prefill:
            return []
        kappa = self._kappa(view, now_s)
        candidates = []
        allowed = [one for one in view.prefill if one.name not in request.excluded] or view.prefill
        for replica in allowed:
            depth = depths.get(replica.name, 0)
            prefill_s = self._prefill_s(request, depth)
            queue_s = self.backlog.queue_s(replica.name, prefill_s, now_s, request.precedence)
            unstarted, unstarted_s = self.backlog.unstarted(replica.name)
            unseen = 0 if replica.is_stale else replica.queued_requests - unstarted
            if unseen > 0:  # of other routers whose dispatches we do not hear
                queue_s += unseen * self._typical_prefill_s
            rho = self.backlog.recent_s(replica.name, now_s) / UTILISATION_S
            score = queue_s + prefill_s * (1 + kappa + rho)
            may_go = not unstarted or unstarted_s + prefill_s <= self._dispatch_ahead_s
            candidates.append((Candidate(replica.name, depth, queue_s, prefill_s, score), may_go))
        return candidates

    def _choose_decode(
        self, request: PlacementRequest, view: PoolView, depths: dict[str, int]
    ) -> ReplicaState | None:
        """Return the decode replica that is least full with the request, the blocks it holds already not counted."""
        needed = (
            -(-(request.token_count + request.output_tokens_max) // self._block_tokens) + HEAD_ROOM_BLOCKS
        )
        allowed = [one for one in view.decode if one.name not in request.excluded] or list(view.decode)
        head_room = request.kv_head_room_permille
        fitting = [one for one in allowed if one.has_room(needed - HEAD_ROOM_BLOCKS, head_room)]
        if not fitting:
            return None

        def fullness(one: ReplicaState) -> float:
            total = max(1, one.block_total)
            return (one.reserved() + needed - depths.get(one.name, 0)) / total

        scores = [fullness(one) for one in fitting]
        lowest = min(scores)
        return self._rng.choice([one for one, score in zip(fitting, scores, strict=True) if score <= lowest])

    def _local(
        self,
        request: PlacementRequest,
        view: PoolView,
        depths: dict[str, int],
        candidates: list[Candidate],
    ) -> Placement | None:
        """Return a placement on decode alone, if the uncached part is short and that starts sooner, or must be."""
        needed = -(-(request.token_count + request.output_tokens_max) // self._block_tokens)
        allowed = [one for one in view.decode if one.name not in request.excluded] or list(view.decode)
        fitting = [one for one in allowed if one.has_room(needed, request.kv_head_room_permille)]
        deepest = max(depths.get(one.name, 0) for one in fitting)
        best = [one for one in fitting if depths.get(one.name, 0) == deepest]
        roomiest = max(one.room() for one in best)
        decode = self._rng.choice([one for one in best if one.room() == roomiest])
        prefill_s = self._prefill_s(request, deepest)
        if candidates:
            uncached = request.token_count - self._usable_tokens(request, deepest)
            soonest_s = min(one.queue_s + one.prefill_s for one in candidates)
            if uncached > self._local_tokens_max or prefill_s > soonest_s + HANDOFF_S:
                return None
        own = Candidate(decode.name, deepest, 0.0, prefill_s, prefill_s)
        return Placement(
            prefill=None,
            decode=decode.name,
            matched_blocks=deepest,
            prefill_s=prefill_s,
            estimate_s=prefill_s,
            candidates=self._explained(request, own, candidates),
        )

    def _lowest(self, candidates: list[Candidate]) -> Candidate:
        lowest = min(one.score for one in candidates)
        return self._rng.choice([one for one in candidates if one.score <= lowest * (1 + 1e-9)])

    @staticmethod
    def _explained(
        request: PlacementRequest, chosen: Candidate, candidates: list[Candidate]
    ) -> tuple[Candidate, ...]:
        if not request.explain:
            return ()
        others = sorted((one for one in candidates if one is not chosen), key=lambda one: one.score)
        return (chosen, *others[: CANDIDATES_MAX - 1])

    def _prefill_s(self, request: PlacementRequest, depth: int) -> float:
        usable = self._usable_tokens(request, depth)
        return self.costs.estimate_s(request.token_count - usable, request.token_count)

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
        if work.is_own:
            self._typical_prefill_s += PREFILL_SMOOTHING * (event.prefill_s - self._typical_prefill_s)

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
            self._measured(hit, event.at_s)

    def _measured(self, hit: Hit, at_s: float) -> None:
        total = hit.cached_tokens + hit.computed_tokens
        self.costs.observe(hit.computed_tokens, total, hit.prefill_s)
        self._measured_at_s = at_s

    def _remove(self, work: Work) -> None:
        self.backlog.remove(work.key)
        self.mirror.unexpect(work.replica, work.hashes)

    def _expire(self, now_s: float) -> None:
        for work in self.backlog.expired(now_s):
            self._remove(work)

    def assert_consistent(self) -> None:
        """Raise AssertionError if the overlay and the backlog disagree."""
        self.backlog.assert_consistent()
        self.mirror.assert_consistent()
