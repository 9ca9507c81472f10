"""The incrementally computed scores of replicas, against a direct evaluation of the formula."""

from __future__ import annotations

import math
import random

import pytest

from kvmesh.queue_order import fifo, shortest
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.backlog import UTILISATION_S, Backlog
from services.router.placement.collision_risk import CollisionRisk
from services.router.placement.cost_policy import CostPolicy
from services.router.placement.displaced_demand import BUSY_MAX, MEMORY_S, loss_integral
from services.router.placement.policy import (
    Dispatched,
    Finished,
    Hit,
    Placement,
    PlacementRequest,
    PoolView,
    ReplicaState,
    Started,
)
from services.router.placement.precedence import DEFAULT_PRECEDENCE, Precedence, WorkAhead
from services.router.placement.prefill_choice import CONGESTION_WEIGHT_MAX, TYPICAL_FLOOR_S
from services.router.queue.release_queue import LOOK_AHEAD

BLOCK = 10
AHEAD_S = 0.3
BANDS = (
    DEFAULT_PRECEDENCE,
    Precedence(6),
    Precedence(3, tenant="a"),
    Precedence(3, tenant="b", weight=2.0, priority=1),
)


class Twin:
    """Computes scores from the records and events of a policy, each time from the beginning."""

    def __init__(self, policy: CostPolicy, *, is_in_order: bool) -> None:
        self.policy = policy
        self.is_in_order = is_in_order
        self.told: list[Dispatched] = []

    def busy(self, name: str, now_s: float) -> float:
        faded = [
            one.prefill_s * math.exp((one.at_s - now_s) / UTILISATION_S)
            for one in self.told
            if one.replica == name
        ]
        return sum(faded) / UTILISATION_S

    def displaced_s(self, name: str, queue_s: float, seconds: float, now_s: float) -> float:
        seen = self.policy.prefills._displaced_demand.demands.get(name)
        if seen is None:
            return 0.0
        rate, loss_s, own_busy, since_s = seen
        fading = math.exp(min(0.0, since_s - now_s) / MEMORY_S)
        rate *= fading
        busy = self.busy(name, now_s) if self.is_in_order else own_busy * fading
        longer_s = loss_integral(queue_s + seconds, loss_s) - loss_integral(queue_s, loss_s)
        return rate * longer_s / (1 - min(BUSY_MAX, busy))

    def scores(
        self, request: PlacementRequest, view: PoolView, now_s: float
    ) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Return scores without the collision risk, the queue's seconds, and the seconds until all is done, by name.

        Must be called before the policy places the request.
        """
        policy, held = self.policy, self.policy.prefills._held
        policy._expire(now_s)
        for entry in held.expired(now_s):
            held.remove(entry.key)
        own_wish = held.remove(("", request.request_id))
        since_s = own_wish.at_s if own_wish is not None else now_s
        typical_s = max(TYPICAL_FLOOR_S, policy.prefills.typical_s)
        everybody = [one.name for one in view.prefill]
        waiting_s = sum(
            work.prefill_s for name in everybody for work in policy.backlog.of(name) if work.started_s is None
        )
        congestion_weight = min(
            CONGESTION_WEIGHT_MAX, (waiting_s / typical_s + view.waiting_requests) / len(view.prefill)
        )
        depths = policy.local_index.matched(request.hashes)
        scores, queues, ends = {}, {}, {}
        for one in view.prefill:
            uncached = max(1, request.token_count - depths.get(one.name, 0) * BLOCK)
            seconds = policy.costs.estimate_s(uncached, request.token_count) * policy.speeds.factor(one.name)
            ahead_s, behind, waiting, there_s, total_s = plain_line(
                policy.backlog, one.name, seconds, now_s, request.precedence
            )
            held_s, held_behind, _, _, held_total_s = plain_line(
                held, one.name, seconds, since_s, request.precedence
            )
            unknown_s = max(0, one.queued_requests - waiting) * typical_s
            queue_s = ahead_s + held_s + unknown_s
            score = queue_s + seconds * (1 + behind + held_behind + congestion_weight)
            score += self.displaced_s(one.name, queue_s, seconds, now_s)
            if waiting and there_s + seconds > AHEAD_S:
                score += min(there_s, there_s + seconds - AHEAD_S) * view.waiting_requests / LOOK_AHEAD
            scores[one.name], queues[one.name] = score, queue_s
            ends[one.name] = total_s + held_total_s + unknown_s + seconds
        if own_wish is not None:
            held.add(own_wish)
        return scores, queues, ends


def plain_line(
    backlog: Backlog, name: str, seconds: float, now_s: float, precedence: Precedence
) -> tuple[float, int, int, float, float]:
    """Return seconds ahead, prompts behind, waiting prompts, their seconds, and seconds of all, by a walk over the work."""
    order = backlog._order_key(seconds, now_s)
    ahead = WorkAhead(precedence, order)
    running_s = there_s = 0.0
    behind = waiting = 0
    for work in backlog.of(name):
        if work.started_s is not None:
            left_s = work.prefill_s if work.begun_s is None else work.begun_s + work.prefill_s - now_s
            running_s += max(0.0, left_s)
            continue
        waiting += 1
        there_s += work.prefill_s
        ahead.add(work.precedence or precedence, work.order, work.prefill_s, work.tokens)
        behind += (work.precedence or precedence) == precedence and work.order > order
    return running_s + ahead.seconds(), behind, waiting, there_s, running_s + there_s


@pytest.mark.parametrize("is_in_order", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_scores_are_those_of_the_formula(seed: int, *, is_in_order: bool) -> None:
    """Random histories with classes, tenants, held requests, silent queues and other routers: equal within 1e-9."""
    rng = random.Random(seed)
    prefill = [ReplicaState(f"p{index}") for index in range(rng.choice((2, 4, 12)))]
    policy = CostPolicy(
        "r0",
        LocalPrefixIndex(),
        random.Random(seed),
        block_tokens=BLOCK,
        dispatch_ahead_s=AHEAD_S,
        local_prefill_tokens_max=0,
        order_key=fifo if is_in_order else shortest,
    )
    for one in prefill:
        policy.local_index.add(one.name)
    view = PoolView(prefill, [ReplicaState("d0")], rng.choice((0, 3)))
    twin, running, now_s, compared = Twin(policy, is_in_order=is_in_order), list[Dispatched](), 0.0, 0
    others = rng.random() < 0.5
    for index in range(300):
        now_s += rng.expovariate(2 * len(prefill))
        while running and rng.random() < 0.7:
            told = running.pop(rng.randrange(len(running)))
            policy.observe(Started(told.router, told.request_id, now_s))
            if rng.random() < 0.3:
                running.append(told)
                break
            hit = Hit(0, told.token_count, 0, rng.uniform(0.01, 0.3))
            policy.observe(Finished(told.router, told.request_id, now_s, hit))
        for one in prefill:
            if rng.random() < 0.05:
                one.queued_requests, one.is_stale = rng.randint(0, 4), rng.random() < 0.2
        first = rng.randrange(20) * 1000
        hashes = tuple(range(first, first + rng.randint(1, 60)))
        precedence = rng.choice(BANDS) if seed % 3 else DEFAULT_PRECEDENCE
        request = PlacementRequest(
            f"{index - index % 2}" if rng.random() < 0.2 else f"{index}",  # some ask again
            hashes,
            len(hashes) * BLOCK + 5,
            100,
            explain=True,
            precedence=precedence,
        )
        if others and rng.random() < 0.3:
            other = Dispatched("r1", f"x{index}", rng.choice(prefill).name, hashes, 0.1, now_s, now_s + 3)
            policy.observe(other)
            twin.told.append(other)
        scores, queues, ends = twin.scores(request, view, now_s)
        typical_s = max(TYPICAL_FLOOR_S, policy.prefills.typical_s)
        answer = policy.place(request, view, now_s)
        if not isinstance(answer, Placement):
            continue
        assert len(answer.candidates) == len(prefill)
        risks: CollisionRisk = policy.prefills._collision_risk
        for scored in answer.candidates:
            risk_s = risks.risk(scored.replica) * typical_s if risks.routers > 1 else 0.0
            assert scored.score == pytest.approx(scores[scored.replica] + risk_s, rel=1e-9), (seed, index)
            displaced_s = twin.displaced_s(scored.replica, scored.queue_s, scored.prefill_s, now_s)
            assert (scored.displaced_s, scored.risk_s) == pytest.approx((displaced_s, risk_s)), (seed, index)
            assert scored.queue_s == pytest.approx(queues[scored.replica], rel=1e-9, abs=1e-12), (seed, index)
        assert answer.candidates[0].score <= min(scored.score for scored in answer.candidates) * (1 + 1e-9)
        beside = [one for one in answer.candidates if one.replica != answer.prefill]
        soonest_s = min(ends[one.replica] for one in beside)
        lost_s = {  # several values where the next best replicas are equally soon
            soonest_s - answer.prefill_s if is_in_order or one.matched_blocks < answer.matched_blocks else 0.0
            for one in beside
            if ends[one.replica] <= soonest_s + 1e-9
        }
        chosen_s = policy.prefills._chosen[1]
        assert any(chosen_s == pytest.approx(max(0.0, one), abs=1e-9) for one in lost_s), (seed, index)
        compared += 1
        told = Dispatched(
            "r0",
            request.request_id,
            answer.prefill or "",
            hashes,
            answer.prefill_s,
            now_s,
            now_s + rng.choice((2.0, 1e6)),
            precedence,
            request.token_count,
        )
        policy.observe(told)
        twin.told.append(told)
        running.append(told)
    policy.assert_consistent()
    assert compared > 30
