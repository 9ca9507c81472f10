"""Shadow traffic: users see nothing of it, bounds hold, and it ends at once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.snapshot.shadow import ShadowMode
from services.frontend.shadow.traffic import IN_FLIGHT_MAX, QUEUE_MAX, in_flight_max
from tests.unit.frontend.fake_mesh import changed
from tests.unit.frontend.shadow.shadow_mesh import WALL_S, ShadowMesh, shadow

FAULTS = (pb.Failure.CODE_REPLICA_LOST, pb.Failure.CODE_ENGINE_ERROR, pb.Failure.CODE_STALLED)
REFUSALS = (pb.Refusal.REASON_QUEUE_FULL, pb.Refusal.REASON_NO_REPLICA, pb.Refusal.REASON_DRAINING)


def users_of(mesh: ShadowMesh) -> dict[str, Any]:
    """Return everything that users, tenants and routers see of users' requests."""
    core = mesh.users.core
    batch = core.observations.drain(mesh.now_s)
    return {
        "tokens": [client.ids for client in mesh.clients],
        "text": [client.text for client in mesh.clients],
        "outcomes": [client.request.outcome and client.request.outcome.name for client in mesh.clients],
        "reach": [client.request.progress.reach for client in mesh.clients],
        "metrics": mesh.observer.ends,
        "submits": [each.SerializeToString(deterministic=True) for each in mesh.users.submits],
        "adopts": mesh.users.adopts,
        "cancels": mesh.users.cancels,
        "retries": (core.retries.level, core.retries.spent_total),
        "counts": batch and [str(each) for each in batch.counts],
        "now": mesh.now_s,
    }


def scheduled(seed: int, *, with_tap: bool) -> ShadowMesh:
    """Run a random schedule of users, copies and faults on both sides. The users' part depends on `seed` alone."""
    mesh = ShadowMesh(seed, with_tap=with_tap, router_count=2)
    draw, other = random.Random(seed), random.Random(seed + 2)
    mode = other.choice([ShadowMode.FULL, ShadowMode.TTFT_ONLY])
    mesh.take(shadow(mode=mode, baseline_pool=other.choice(["", "young"])))
    for step in range(150):
        choice = draw.randrange(8)
        if choice == 0 and len(mesh.clients) < 12:
            mesh.begin(len(mesh.clients) + 1, logprobs=draw.random() < 0.5)
        elif choice == 1 and mesh.clients:
            client = draw.choice(mesh.clients)
            mesh.users.core.leave(client.request, mesh.now_s)
        elif choice == 2:
            mesh.users.cut(draw.choice(mesh.users.routers))
        elif choice == 3:
            for router in mesh.users.routers:
                mesh.users.open(router)
        elif choice == 4 and mesh.users.runs:
            mesh.users.fail(draw.choice(mesh.users.runs), draw.choice(FAULTS))
        else:
            mesh.users.settle()
            for client in mesh.clients:
                client.read(mesh.now_s)
        fault_copies(mesh, other)
        mesh.pump()
        mesh.advance(draw.choice([0.001, 0.01, 0.1]))
        if step == 120 and other.random() < 0.3:
            mesh.take()
    for router in (*mesh.users.routers, *mesh.copies.routers):
        router.is_frozen = False
    for each in (mesh.users, mesh.copies):
        for router in each.routers:
            each.open(router)
    for _ in range(3000):
        mesh.users.settle()
        for client in mesh.clients:
            client.read(mesh.now_s)
        if all(client.is_done for client in mesh.clients):
            break
        mesh.advance(0.05)
    return mesh


def fault_copies(mesh: ShadowMesh, other: random.Random) -> None:
    """Do something to the copies."""
    copies = mesh.copies
    choice = other.randrange(10)
    if choice == 0:
        copies.cut(other.choice(copies.routers))
    elif choice == 1:
        for router in copies.routers:
            copies.open(router)
    elif choice == 2 and copies.runs:
        copies.fail(other.choice(copies.runs), other.choice(FAULTS))
    elif choice == 3:
        queued = [run for run in copies.runs if run.stage == "queued" and run.router is not None]
        if queued:
            copies.refuse(other.choice(queued), other.choice(REFUSALS))
    elif choice == 4 and mesh.redis is not None:
        mesh.redis.is_up = other.random() < 0.7
    elif choice == 5:
        mesh.traffic.sweep(mesh.now_s)
        mesh.check()
    elif choice == 6:
        copies.report(other.choice(copies.routers), can_place=other.random() < 0.6)
    else:
        copies.settle()


@pytest.mark.parametrize("seed", range(60))
def test_users_see_nothing_of_their_copies(seed: int) -> None:
    """Tokens, ends, metrics, submits and retries are equal with the tap on and off, whatever happens to the copies."""
    on, off = scheduled(seed, with_tap=True), scheduled(seed, with_tap=False)
    assert users_of(on) == users_of(off)
    assert not off.copies.submits
    assert all(len(pools) == 1 for pools in on.copies.pools.values()), "a copy was sent twice, or moved"
    assert not on.copies.adopts and not on.copies.contradictions


def test_schedules_copy_requests() -> None:
    """The property above is about something: copies are sent, end, fail and are compared."""
    meshes = [scheduled(seed, with_tap=True) for seed in range(12)]
    assert sum(len(mesh.copies.submits) for mesh in meshes) > 30
    tallies = [mesh.traffic.tally for mesh in meshes if mesh.traffic.tally is not None]
    assert sum(tally.counts.target.pairs for tally in tallies) > 10


def test_a_copy_is_marked_and_goes_to_the_pools_of_the_shadow_alone() -> None:
    """Its budget says shadow, lowest class, sheddable, half of the KV blocks free; nothing is charged."""
    mesh = ShadowMesh(1)
    mesh.take(shadow(baseline_pool="young"))
    client = mesh.begin(1, session_id="session", temperature=0.5)
    mesh.settle(3)
    first, second = mesh.copies.submits
    assert {mesh.copies.pools[each.request_id][0] for each in (first, second)} == {"next", "young"}
    user = mesh.users.submits[0]
    for submit in (first, second):
        budget = submit.budget
        assert budget.shadow and budget.purpose == budget_pb2.PURPOSE_SHADOW and budget.sheddable
        assert (budget.tenant, budget.band, budget.reservation_id) == ("shadow", 0, "")
        assert budget.kv_head_room_permille == 500 and budget.attempts_max == 1
        assert submit.token_ids == user.token_ids and submit.sampling == user.sampling
        assert submit.session_id == "session" and submit.request_id != client.request.spec.request_id
    assert not user.budget.shadow and user.budget.purpose == budget_pb2.PURPOSE_UNSPECIFIED


def test_a_copy_has_twice_the_time_that_the_user_has_left() -> None:
    """A slow target is compared too, and a hanging one ends."""
    mesh = ShadowMesh(1)
    mesh.take(shadow())
    mesh.begin(1, deadline_s=mesh.now_s + 3.0, ttft_deadline_s=mesh.now_s + 1.0)
    mesh.pump()
    (copy,) = mesh.traffic.core.admitted.serving
    assert copy.spec.timing.deadline_s == pytest.approx(mesh.now_s + 6.0)
    assert copy.spec.timing.ttft_deadline_s == pytest.approx(mesh.now_s + 2.0)


@pytest.mark.parametrize(
    ("mode", "first", "expected"),
    [(ShadowMode.TTFT_ONLY, 0, 1), (ShadowMode.FIRST, 5, 5), (ShadowMode.FULL, 0, 40)],
)
def test_a_mode_limits_the_output_of_copies(mode: ShadowMode, first: int, expected: int) -> None:
    """The limit is never above the user's."""
    mesh = ShadowMesh(1)
    mesh.take(shadow(mode=mode, first_tokens=first))
    mesh.begin(1, max_output_tokens=40)
    mesh.settle(3)
    assert [each.budget.max_output_tokens for each in mesh.copies.submits] == [expected]
    mesh.finish()


def test_a_target_with_equal_tokens_shows_no_difference() -> None:
    """Both pools make the tokens of the history, so each token is compared and equal."""
    mesh = ShadowMesh(2)
    mesh.take(shadow())
    for number in range(1, 31):
        mesh.begin(number, session_id=f"session-{number % 7}")
    mesh.finish()
    tally = mesh.traffic.tally
    assert tally is not None
    arm = tally.counts.target
    assert arm.pairs == 30 and arm.sessions == arm.token_sessions == 7
    assert arm.tokens == sum(len(client.ids) for client in mesh.clients) and not arm.differences
    assert arm.ended_pairs == 30 and not arm.finish_differences and not arm.errors
    assert arm.length_sum == pytest.approx(0.0) and tally.counts.copied == 30
    used = sum(client.request.spec.prompt_tokens + len(client.ids) for client in mesh.clients)
    assert tally.counts.tokens == used == mesh.traffic.ledger.used


def test_a_target_with_other_tokens_differs_at_the_first_one() -> None:
    """The first difference ends a pair, so each pair has one difference and few compared tokens."""
    mesh = ShadowMesh(3, target_version="v2")
    mesh.take(shadow(keeps_tokens=True))
    for number in range(1, 21):
        mesh.begin(number, max_output_tokens=50)
    mesh.finish()
    tally = mesh.traffic.tally
    assert tally is not None and tally.counts.target.differences == tally.counts.target.pairs == 20
    (report,) = tally.report()
    first = report.differences[0]
    assert first.kind == "tokens" and first.user_tokens[0] != first.copy_tokens[0]
    assert first.pool == "next" and len(first.user_tokens) <= 16


def test_requests_that_may_have_been_copied_before_are_not_copied() -> None:
    """A resumed request, a later execution and one of another pool are no sample."""
    mesh = ShadowMesh(1)
    mesh.take(shadow())
    mesh.begin(1, is_resumed=True, attempt_base=256)
    mesh.begin(2, attempt_base=512)
    client = mesh.begin(3)
    assert mesh.traffic.queued == 1
    client.request.spec = changed(client.request.spec, pool="canary")
    mesh.traffic.offer(client.request, mesh.now_s)
    assert mesh.traffic.queued == 1


def test_the_queue_is_bounded_and_a_full_one_drops_and_counts() -> None:
    """A target that takes nothing costs users nothing: the queue fills, and later requests are dropped."""
    mesh = ShadowMesh(1)
    mesh.take(shadow())
    for router in mesh.copies.routers:
        router.is_frozen = True
    request = mesh.begin(1).request
    mesh.pump()
    for _ in range(2 * QUEUE_MAX):
        mesh.traffic.offer(request, mesh.now_s)
        mesh.pump()
        assert mesh.traffic.queued <= QUEUE_MAX and mesh.traffic.in_flight <= IN_FLIGHT_MAX
    assert mesh.traffic.in_flight == IN_FLIGHT_MAX and mesh.traffic.queued == QUEUE_MAX
    assert mesh.traffic.dropped_totals["queue_full"] == 2 * QUEUE_MAX + 1 - QUEUE_MAX - IN_FLIGHT_MAX
    mesh.advance(11.0)
    mesh.traffic.in_flight_max = IN_FLIGHT_MAX + 1
    mesh.pump()
    assert mesh.traffic.dropped_totals["late"] >= QUEUE_MAX


@pytest.mark.parametrize("seed", range(10))
def test_a_shadow_that_leaves_the_snapshot_ends_at_once(seed: int) -> None:
    """Copies in flight are cancelled in the same step, and nothing is sent afterwards."""
    mesh = ShadowMesh(seed)
    mesh.take(shadow())
    for number in range(1, 21):
        mesh.begin(number)
    mesh.settle(seed % 4 + 1)
    running = len(mesh.traffic.core.admitted.serving)
    assert running
    before = mesh.now_s
    mesh.take()
    assert mesh.traffic.is_idle and not mesh.traffic.core.admitted.serving and mesh.now_s == before
    submitted = len(mesh.copies.submits)
    mesh.settle(3)
    assert not [run for run in mesh.copies.runs if run.router is not None]
    assert len(mesh.copies.submits) == submitted
    mesh.begin(99)
    mesh.finish()
    assert len(mesh.copies.submits) == submitted


def test_a_shadow_is_off_while_users_wait_and_on_again_behind_it() -> None:
    """The queue delay of users' routers decides, with a hold."""
    mesh = ShadowMesh(1)
    mesh.take(shadow())
    mesh.report(queue_delay_s=0.6)
    mesh.traffic.sweep(mesh.now_s)
    mesh.begin(1)
    assert mesh.traffic.queued == 0 and mesh.traffic.dropped_totals["queue_delay"] == 1
    mesh.report(queue_delay_s=0.1)
    mesh.advance(4.0)
    mesh.traffic.sweep(mesh.now_s)
    mesh.begin(2)
    assert mesh.traffic.dropped_totals["queue_delay"] == 2
    mesh.advance(2.0)
    mesh.traffic.sweep(mesh.now_s)
    mesh.begin(3)
    assert mesh.traffic.queued == 1


def test_a_shadow_ends_by_itself_at_its_time() -> None:
    """The wall clock ends it without a control plane, also for requests that wait."""
    mesh = ShadowMesh(1)
    mesh.take(shadow(expires_ms=round(1000 * (WALL_S + mesh.now_s + 5))))
    mesh.begin(1)
    mesh.advance(6.0)
    mesh.traffic.sweep(mesh.now_s)
    assert mesh.traffic.queued == 0 and mesh.traffic.dropped_totals["expired"] == 1
    tally = mesh.traffic.tally
    assert tally is not None and tally.off_reason == "expired"


def test_without_redis_nothing_is_copied() -> None:
    """The ceiling fails closed."""
    mesh = ShadowMesh(1)
    mesh.take(shadow())
    assert mesh.redis is not None
    mesh.redis.is_up = False
    mesh.begin(1)
    mesh.settle(3)
    assert not mesh.copies.submits and mesh.traffic.dropped_totals["no_ledger"] == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_ceiling_is_never_exceeded(seed: int) -> None:
    """Prompt and output tokens of all copies stay below it; the shadow is then off for good, and says so."""
    mesh = ShadowMesh(seed)
    ceiling = random.Random(seed).randint(100, 3000)
    mesh.take(shadow(token_max=ceiling))
    for number in range(1, 40):
        mesh.begin(number)
        mesh.settle()
        mesh.advance(0.01)
    mesh.finish()
    tally = mesh.traffic.tally
    assert tally is not None and mesh.traffic.ledger.used <= ceiling
    assert tally.off_reason == "ceiling" and mesh.traffic.dropped_totals["ceiling"]


def test_in_flight_is_a_tenth_of_the_target_shared_by_frontends() -> None:
    """At least one, at most eight."""
    assert [in_flight_max(*each) for each in ((0, 1), (256, 1), (512, 8), (40, 1), (40, 4))] == [
        1,
        8,
        6,
        4,
        1,
    ]


def test_a_lost_router_ends_its_copies_without_a_word_on_the_new_stream() -> None:
    """The slots of the broken stream are void: a cancel would hit a slot of the new one."""
    mesh = ShadowMesh(1)
    mesh.take(shadow())
    mesh.begin(1)
    mesh.settle(2)
    (router,) = [each for each in mesh.copies.routers if each.pool == "next"]
    mesh.copies.cut(router)
    assert not router.outbox.waiting_bytes and not mesh.traffic.core.admitted.serving
    mesh.finish()
    assert mesh.traffic.dropped_totals["refused"] == 1


def test_neither_pool_is_always_the_first() -> None:
    """The order of the copies alternates, so that it cancels in the ratio of latencies."""
    mesh = ShadowMesh(1)
    mesh.take(shadow(baseline_pool="young"))
    for number in range(1, 5):
        mesh.begin(number)
    mesh.pump()
    mesh.pump()
    firsts = [copy.pool for pair in mesh.traffic._in_flight for copy in pair.copies[:1]]
    assert sorted(firsts) == ["next", "next", "young", "young"]
    mesh.finish()
    tally = mesh.traffic.tally
    assert tally is not None and tally.counts.latency.pairs == 4


def test_one_large_request_does_not_end_the_shadow_of_all() -> None:
    """A request that needs more than the whole ceiling is not copied. The requests after it are."""
    mesh = ShadowMesh(1)
    mesh.take(shadow(token_max=20_000))
    mesh.begin(1, max_output_tokens=100_000)
    mesh.settle(3)
    assert mesh.traffic.dropped_totals == {"too_large": 1}
    mesh.begin(2)
    mesh.settle(3)
    assert mesh.copies.submits and mesh.traffic.tally is not None and not mesh.traffic.tally.off_reason
