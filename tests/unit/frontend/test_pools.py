"""Requests of several pools at one frontend: weights, availability, moves before `started`, and what binds a request."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.snapshot.assignment import Assignment
from kvmesh.snapshot.content import Content, PoolTrack, Track
from kvmesh.tenants.caller import Tenant
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.models import Models
from services.frontend.requests.pool_choice import PoolChoice
from services.frontend.requests.request_spec import NOBODY
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import RESUME_WAIT_S, ROUTER_WAIT_S, Limits
from services.frontend.requests.router_peers import Peers
from services.frontend.requests.takeover import AttemptLocation
from tests.unit.frontend.fake_mesh import DETACHED_S, Client, FakeMesh, Router, oracle, spec
from tests.unit.frontend.test_schedules import FAILURES

POOLS = (("stable", "v1"), ("canary", "v2"), ("baseline", "v1"))
CONTENT = Content(
    (
        PoolTrack("stable", "v1", Track.STABLE, 80),
        PoolTrack("canary", "v2", Track.CANARY, 10),
        PoolTrack("baseline", "v1", Track.BASELINE, 10),
    ),
    rollout="r1",
)
LONG = 10
"""Number of a request with at least 60 output tokens in both versions (checked below)."""


def mesh_of(content: Content = CONTENT, routers: int = 1, retries: float = 3.0) -> FakeMesh:
    core = FrontendCore(
        Limits(4, DETACHED_S, 16), limit=64, retries=RetryBudget(0.0, retries, 1000.0), jitter=lambda: 0.5
    )
    core.take_snapshot(content)
    mesh = FakeMesh(core, random.Random(0), routers, POOLS)
    for router in mesh.routers:
        mesh.open(router)
    return mesh


def begin(mesh: FakeMesh, pool: str, number: int = 0, **changes: object) -> Client:
    """Submit request LONG to `pool`; `number` names it."""
    version = dict(POOLS)[pool]
    fields = {"max_output_tokens": 60, "pool": pool, "model_version": version, "rollout": "r1"}
    made = spec(LONG, **{**fields, **changes})
    return Client(mesh.core, replace(made, request_id=f"{number:032x}"), mesh.now_s)


def routers_of(mesh: FakeMesh, pool: str) -> list[Router]:
    return [router for router in mesh.routers if router.pool == pool]


def finish(mesh: FakeMesh, client: Client, for_s: float = 100.0) -> str:
    """Step until the request ends; return its outcome."""
    until_s = mesh.now_s + for_s
    while mesh.now_s < until_s:
        mesh.settle()
        client.read(mesh.now_s)
        mesh.core.assert_consistent()
        if client.is_done:
            assert client.request.outcome is not None
            return client.request.outcome.name
        mesh.advance(0.05)
    raise AssertionError(f"{client.request} does not end")


def generated(mesh: FakeMesh, client: Client, tokens: int) -> None:
    """Step until the client has at least `tokens` tokens."""
    for _ in range(1000):
        if len(client.ids) >= tokens:
            return
        mesh.settle()
        client.read(mesh.now_s)
    raise AssertionError(f"{client.request} does not move")


def report(mesh: FakeMesh, router: Router, load: pb.LoadReport) -> None:
    mesh.core.on_response(router, pb.AttachResponse(load_report=load), mesh.now_s)


def whole(client: Client) -> list[int]:
    request = client.request.spec
    return oracle(request.prompt_ids, request.max_output_tokens, request.model_version)


def test_the_versions_differ_and_the_oracle_is_long_enough() -> None:
    """Both versions make 60 tokens of the test's prompt, and they differ."""
    ones, twos = (oracle(spec(LONG).prompt_ids, 60, version) for version in ("v1", "v2"))
    assert len(ones) == len(twos) == 60 and ones != twos


def test_weights_are_respected_by_sessions_and_without_a_router_of_its_pool_a_session_goes_elsewhere() -> (
    None
):
    """Shares follow the weights within four standard deviations. A dead pool's sessions go to the largest weight alone."""
    mesh = mesh_of()
    sessions = [f"s{number}" for number in range(20_000)]
    shares = Counter(mesh.core.pools.choose("t", session).pool for session in sessions)
    for pool, weight in (("stable", 0.8), ("canary", 0.1), ("baseline", 0.1)):
        assert abs(shares[pool] - weight * 20_000) < 4 * (20_000 * weight * (1 - weight)) ** 0.5
    assert not mesh.core.pools.diverted
    before = {session: mesh.core.pools.choose("t", session).pool for session in sessions[:500]}
    mesh.cut(routers_of(mesh, "canary")[0])
    for session, pool in before.items():
        chosen = mesh.core.pools.choose("t", session)
        assert chosen.pool == ("stable" if pool == "canary" else pool)
        assert chosen.is_diverted is (pool == "canary")
    assert mesh.core.pools.diverted == {"canary": Counter(before.values())["canary"]}
    mesh.cut(routers_of(mesh, "stable")[0])
    assert {mesh.core.pools.choose("t", session).pool for session in sessions[:500]} == {"baseline"}
    mesh.cut(routers_of(mesh, "baseline")[0])
    for session in sessions[:50]:
        assert mesh.core.pools.choose("t", session).pool == Assignment(CONTENT).choose("t", session).pool


def test_a_request_stays_with_its_model_and_one_without_a_name_gets_that_of_the_stable_pool() -> None:
    """Also in a mesh whose configuration begins with a pool of another model, and whatever pools are dead."""
    pools = (PoolTrack("stable", "v1", Track.STABLE, 100), PoolTrack("canary", "v2"))
    mesh = mesh_of(Content(pools))
    choice = mesh.core.pools
    choice.models = Models("code", {"v1": "chat", "v2": "code"}, [("canary", "v2"), ("stable", "v1")])
    for model, pool in (("", "stable"), ("chat", "stable"), ("code", "canary")):
        assert {choice.choose("t", f"s{number}", model).pool for number in range(50)} == {pool}
    mesh.cut(routers_of(mesh, "stable")[0])
    assert choice.choose("t", "s").pool == "baseline"  # the other pool of its version
    mesh.cut(routers_of(mesh, "baseline")[0])
    assert choice.choose("t", "s") == ("stable", "v1", "", False)
    assert choice.choose("t", "s", "code").pool == "canary"


def test_a_snapshot_of_an_older_configuration_mixes_no_models() -> None:
    """Its weights may be of the time when a pool served the stable pool's model."""
    mesh = mesh_of()
    choice = mesh.core.pools
    choice.models = Models("chat", {"v1": "chat", "v2": "code"}, [("stable", "v1"), ("canary", "v2")])
    pools = Counter(choice.choose("t", f"s{number}").pool for number in range(2000))
    assert set(pools) == {"stable", "baseline"}
    mesh.core.take_snapshot(CONTENT)
    assert "canary" not in {choice.choose("t", f"s{number}").pool for number in range(500)}


def test_features_are_unknown_until_a_router_that_can_place_has_said_them() -> None:
    """Then they stay known while no router is up, or none has a replica. Unknown is not refused."""
    mesh = mesh_of()
    peers, (router,) = mesh.core.peers, routers_of(mesh, "canary")
    assert peers.features("canary") is None and peers.offers("canary", {"penalties"})
    assert not peers.missing("canary", {"penalties"})
    report(mesh, router, pb.LoadReport(can_place=False))
    assert peers.features("canary") is None
    report(mesh, router, pb.LoadReport(can_place=True, features=["penalties"]))
    assert peers.features("canary") == frozenset({"penalties"})
    report(mesh, router, pb.LoadReport(can_place=False))
    assert peers.features("canary") == frozenset({"penalties"})
    mesh.cut(router)
    peer = peers.get(router.name)
    assert peer is not None and peer.features is None, "other engines may stand behind it now"
    mesh.open(router)
    assert peers.offers("canary", {"penalties"}) and not peers.offers("canary", {"guided_output"})
    report(mesh, router, pb.LoadReport(can_place=True))
    assert not peers.offers("canary", {"penalties"}) and peers.offers("canary", ())
    assert peers.missing("canary", {"penalties"}) == {"penalties"}


def test_a_request_moves_to_no_pool_that_lacks_its_features() -> None:
    """Before the first token a dead pool is left, but not for one that would ignore a parameter or refuse it."""
    for features in ([], ["penalties"]):
        mesh = mesh_of()
        for pool in ("stable", "baseline"):
            report(mesh, routers_of(mesh, pool)[0], pb.LoadReport(can_place=True, features=features))
        made = spec(LONG, max_output_tokens=60, pool="canary", model_version="v2")
        sampling = replace(made.sampling, frequency_penalty=1.0)
        client = Client(mesh.core, replace(made, sampling=sampling), mesh.now_s)
        mesh.cut(routers_of(mesh, "canary")[0])
        for _ in range(50):
            mesh.settle()
            client.read(mesh.now_s)
        moved = client.request.spec.pool
        assert (moved in ("stable", "baseline")) == bool(features), (features, moved)


def test_a_closed_pool_gets_nothing_even_as_the_last_and_an_unknown_pool_does() -> None:
    """The last resort is a router of no pool of the snapshot, as of release 0.1.0; never a closed pool."""
    content = Content(
        (
            PoolTrack("stable", "v1", Track.STABLE, 100),
            PoolTrack("canary", "v2", Track.IDLE, 0, is_closed=True),
        )
    )
    mesh = mesh_of(content)
    mesh.cut(routers_of(mesh, "stable")[0])
    assert mesh.core.pools.choose("t", "s").pool == "baseline"
    mesh.cut(routers_of(mesh, "baseline")[0])
    assert mesh.core.pools.choose("t", "s") == ("stable", "v1", "", False)
    old = Router("router-0")
    mesh.routers.append(old)
    mesh.core.add_router(old, "default", "v1")
    mesh.open(old)
    assert mesh.core.pools.choose("t", "s")[:2] == ("default", "v1")
    assert mesh.core.pools.of_version("v2", "t", "canary") == ("canary", "v2", "", False)


@pytest.mark.parametrize("loss", ["router", "report", "refusal", "draining"])
def test_a_pool_that_dies_before_started_refuses_no_request_while_another_can_place(loss: str) -> None:
    """Its requests without `started` go to the pool with the largest weight, and take nothing from the retry budget."""
    mesh = mesh_of(retries=0.0)
    clients = [begin(mesh, "canary", number) for number in range(20)]
    (router,) = routers_of(mesh, "canary")
    if loss == "router":
        mesh.cut(router)
    elif loss == "report":
        mesh.report(router, can_place=False)
    else:
        mesh.send_up(router)
        mesh.arrive_up(router)
        reason = pb.Refusal.REASON_NO_REPLICA if loss == "refusal" else pb.Refusal.REASON_DRAINING
        for run in list(mesh.runs):
            mesh.refuse(run, reason)
    for client in clients:
        assert finish(mesh, client) == "LENGTH", client.request
        assert client.request.spec.pool == "stable" and client.request.spec.rollout == ""
        assert client.ids == whole(client) == oracle(spec(LONG).prompt_ids, 60, "v1")
        assert client.request.retry_state.retries == 0
    assert mesh.core.pools.diverted == {"canary": 20}


def test_a_request_that_waits_for_a_router_moves_when_another_pool_can_place_again() -> None:
    """Every pool is down at first. The request takes the first that can place, not the one of its weight alone."""
    mesh = mesh_of()
    for router in mesh.routers:
        mesh.report(router, can_place=False)
    mesh.settle()
    for router in routers_of(mesh, "canary"):
        mesh.cut(router)
    client = begin(mesh, "canary")
    mesh.settle()
    assert not mesh.submits
    mesh.report(routers_of(mesh, "baseline")[0], can_place=True)
    assert finish(mesh, client) == "LENGTH" and client.request.spec.pool == "baseline"


def test_a_diversion_prefers_the_largest_weight_then_the_same_version_then_the_first_name() -> None:
    """Without a rollout, sessions of stable go to the idle pool of their version, not to the first one by name."""
    stable = PoolTrack("baseline", "v1", Track.STABLE, 100)
    mesh = mesh_of(Content((stable, PoolTrack("canary", "v2"), PoolTrack("stable", "v1"))))
    mesh.cut(routers_of(mesh, "baseline")[0])
    assert mesh.core.pools.choose("t", "s").pool == "stable"
    mesh.cut(routers_of(mesh, "stable")[0])
    assert mesh.core.pools.choose("t", "s").pool == "canary"
    weights = (replace(stable, weight_percent=40), PoolTrack("canary", "v2", Track.CANARY, 50))
    beside = PoolTrack("stable", "v1", Track.BASELINE, 10)
    mesh.core.take_snapshot(replace(CONTENT, pools=(*weights, beside)))
    mesh.open(routers_of(mesh, "stable")[0])
    chosen = [mesh.core.pools.choose("t", f"s{number}") for number in range(200)]
    assert {each.pool for each in chosen if each.is_diverted} == {"canary"}


BARRED = (
    replace(CONTENT, never_tenants=frozenset({"bank"})),
    replace(CONTENT, only_tenants=frozenset({"t"})),
    replace(CONTENT, only_tenants=frozenset({"t", "bank"}), never_tenants=frozenset({"bank"})),
)


@pytest.mark.parametrize("content", BARRED)
def test_no_diversion_takes_a_tenant_that_may_not_leave_stable_to_canary_or_baseline(
    content: Content,
) -> None:
    """Its requests wait for stable. Pools that are not of the rollout serve it, and other tenants are diverted."""
    mesh = mesh_of(content)
    sessions = [f"s{number}" for number in range(300)]
    pools = mesh.core.pools
    told = {
        tenant: {pools.choose(tenant, session).rollout for session in sessions} for tenant in ("bank", "t")
    }
    assert told == {"bank": {""}, "t": {"r1"}}, "the judge compares the tenants of the rollout alone"
    mesh.cut(routers_of(mesh, "stable")[0])
    assert {pools.choose("bank", session)[:2] for session in sessions} == {("stable", "v1")}
    assert not pools.diverted
    assert {pools.choose("t", session).pool for session in sessions} == {"canary", "baseline"}
    assert pools.of_version("v1", "bank") == ("stable", "v1", "", False)
    assert pools.of_version("v1", "t") == ("baseline", "v1", "", False)
    assert pools.of_version("v2", "bank") == ("canary", "v2", "", False), "the version of a token wins"
    unknown = Router("other-router-0", pool="other", model_version="v1")
    mesh.routers.append(unknown)
    mesh.core.add_router(unknown, "other", "v1")
    mesh.open(unknown)
    assert {pools.choose("bank", session).pool for session in sessions} == {"other"}


@pytest.mark.parametrize("loss", ["router", "report"])
@pytest.mark.parametrize("content", BARRED)
def test_a_request_of_such_a_tenant_waits_until_its_pool_can_place_again(content: Content, loss: str) -> None:
    """Neither before `started` nor after it does the request leave stable; its router keeps it and gets it once."""
    mesh = mesh_of(content)
    bank = replace(NOBODY, tenant=Tenant(name="bank"))
    client = begin(mesh, "stable", 1, caller=bank)
    bound = begin(mesh, "stable", 2, caller=bank)
    other = begin(mesh, "stable", 3, caller=replace(NOBODY, tenant=Tenant(name="t")))
    bound.request.is_bound = True
    (router,) = routers_of(mesh, "stable")
    mesh.send_up(router)
    if loss == "router":
        mesh.cut(router)
    else:
        for _ in range(3):
            mesh.report(router, can_place=False)
            mesh.settle()
        submits = [submit for submit in mesh.submits if submit.request_id == client.spec.request_id]
        assert len(submits) == 1, "a request that cannot move stays at its router"
    mesh.advance(0.05)
    mesh.settle()
    mesh.open(router)
    mesh.report(router, can_place=True)
    for each in (client, bound, other):
        assert finish(mesh, each) == "LENGTH", each.request
    assert client.request.spec.pool == bound.request.spec.pool == "stable"
    assert other.request.spec.pool == "baseline"


@pytest.mark.parametrize(
    ("tenant", "outcome", "has_baseline"),
    [("bank", "NO_ROUTER", True), ("bank", "NO_ROUTER", False), ("t", "LENGTH", True)],
)
def test_a_stream_of_such_a_tenant_ends_with_no_router_without_stable(
    tenant: str, outcome: str, has_baseline: bool
) -> None:
    """No other version is for it, so the error is not STALE_SNAPSHOT. Another tenant's stream goes on in the baseline."""
    mesh = mesh_of(BARRED[0])
    client = begin(mesh, "stable", caller=replace(NOBODY, tenant=Tenant(name=tenant)))
    generated(mesh, client, 5)
    mesh.cut(routers_of(mesh, "stable")[0])
    if not has_baseline:
        mesh.cut(routers_of(mesh, "baseline")[0])
    assert finish(mesh, client) == outcome
    expected = ["stable"] if tenant == "bank" else ["stable", "baseline"]
    assert mesh.pools[client.spec.request_id] == expected


@pytest.mark.parametrize("is_started", [True, False])
def test_a_bound_request_never_changes_its_version(is_started: bool) -> None:
    """After `started`, or with tokens, the loss of the version ends the request as STALE_SNAPSHOT, with its tokens."""
    mesh = mesh_of()
    client = begin(mesh, "canary")
    if is_started:
        client.request.is_bound = True
    else:
        generated(mesh, client, 5)
    began_s = mesh.now_s
    mesh.cut(routers_of(mesh, "canary")[0])
    assert finish(mesh, client) == "STALE_SNAPSHOT"
    assert mesh.now_s - began_s >= (ROUTER_WAIT_S if is_started else RESUME_WAIT_S)
    assert client.ids == whole(client)[: len(client.ids)] and (client.ids or is_started)
    assert set(mesh.pools.get(client.spec.request_id, ["canary"])) == {"canary"}
    assert client.request.outcome is not None
    error = client.request.outcome.error
    assert error is not None and error.code.name == "UNAVAILABLE" and error.retry_after_s
    assert error.metadata["tokens_sent"] == str(len(client.ids))


def test_a_stream_of_a_lost_pool_continues_in_another_pool_of_its_version_after_the_wait() -> None:
    """The stable pool dies; its streams go on in the baseline, with the same tokens; those of the canary do not come."""
    mesh = mesh_of()
    client = begin(mesh, "stable")
    generated(mesh, client, 5)
    mesh.cut(routers_of(mesh, "stable")[0])
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client) and client.request.spec.pool == "baseline"
    assert mesh.pools[client.spec.request_id] == ["stable", "baseline"]


def test_a_mesh_without_any_router_still_ends_a_request_with_no_router() -> None:
    """NO_ROUTER, not STALE_SNAPSHOT: no other version is served either, so the mesh is away, not the version."""
    mesh = mesh_of()
    client = begin(mesh, "canary")
    client.request.is_bound = True
    for router in mesh.routers:
        mesh.cut(router)
    assert finish(mesh, client) == "NO_ROUTER"


def test_a_takeover_goes_to_routers_of_the_pool_alone() -> None:
    """With routers of three pools up, the second router of the pool takes the stream over, without recomputing."""
    mesh = mesh_of(routers=2)
    client = begin(mesh, "canary")
    generated(mesh, client, 5)
    (home,) = [peer for peer in mesh.core.peers if peer.slots]
    mesh.cut(next(router for router in mesh.routers if router.name == home.name))
    assert finish(mesh, client) == "LENGTH"
    assert client.ids == whole(client) and client.request.takeovers == 1 and len(mesh.submits) == 1


def test_a_resume_after_promotion_stays_on_its_version() -> None:
    """The canary is stable now, and the old pool has no weight: a resume token of the old version goes to the old pool."""
    mesh = mesh_of()
    promoted = Content(
        (
            PoolTrack("canary", "v2", Track.STABLE, 100),
            PoolTrack("stable", "v1"),
            PoolTrack("baseline", "v1"),
        )
    )
    mesh.core.take_snapshot(promoted)
    assert mesh.core.pools.choose("t", "s").pool == "canary"
    assert mesh.core.pools.of_version("v1", "t", "stable") == ("stable", "v1", "", False)
    received = tuple(oracle(spec(LONG).prompt_ids, 60)[:7])
    fields: dict[str, Any] = {"is_resumed": True, "attempt_base": 256, "received_ids": received}
    location = AttemptLocation(3, "decode-9")
    client = begin(mesh, "stable", rollout="", location=location, **fields)
    assert finish(mesh, client) == "LENGTH"
    assert [*received, *client.ids] == whole(client)
    assert mesh.pools[client.spec.request_id] == ["stable"] and mesh.core.observations.kept_rows == 0


def test_a_token_without_a_pool_goes_to_the_largest_weight_of_its_version() -> None:
    """Tokens of release 0.1.0 name a version alone. A pool that can place comes first; an unknown version has none."""
    mesh = mesh_of()
    pools = mesh.core.pools
    assert pools.of_version("v1", "t") == ("stable", "v1", "", False)
    mesh.cut(routers_of(mesh, "stable")[0])
    assert pools.of_version("v1", "t") == ("baseline", "v1", "", False)
    mesh.cut(routers_of(mesh, "baseline")[0])
    assert pools.of_version("v1", "t") == ("stable", "v1", "", False)
    assert pools.of_version("v1", "t", "gone") == ("stable", "v1", "", False)
    assert pools.of_version("v9", "t") is None and not pools.diverted


def test_a_move_to_another_tokenizer_ends_the_request_to_be_read_again() -> None:
    """The core cannot make the other version's token ids, so the service reads the request again. No router saw it."""
    mesh = mesh_of()
    mesh.core.pools.share_tokenizer = lambda one, other: one == other
    mesh.cut(routers_of(mesh, "canary")[0])
    client = begin(mesh, "canary")
    assert client.request.must_reread and finish(mesh, client) == "NO_ROUTER"
    assert not mesh.submits and not client.ids


def test_readiness_needs_the_stable_pool_or_a_router_that_can_place() -> None:
    """A stable router that cannot place counts, because it queues; one of another pool counts while it can place."""
    mesh = mesh_of()
    for pool in ("canary", "baseline"):
        mesh.report(routers_of(mesh, pool)[0], can_place=False)
    mesh.settle()
    found = [mesh.core.pools.has_router]
    mesh.cut(routers_of(mesh, "stable")[0])
    found.append(mesh.core.pools.has_router)
    mesh.report(routers_of(mesh, "canary")[0], can_place=True)
    mesh.settle()
    found.append(mesh.core.pools.has_router)
    assert found == [True, False, True]


def test_routers_of_the_last_release_can_place_and_serve_the_default_pool() -> None:
    """A report without `can_place` means that the router can; a mesh without pools needs none."""
    peers: Peers[object] = Peers()
    core = FrontendCore(
        Limits(4, DETACHED_S, 16), limit=8, retries=RetryBudget(0.0, 3.0, 0.0), jitter=lambda: 0.5
    )
    mesh = FakeMesh(core, random.Random(0), 2)
    for router in mesh.routers:
        mesh.open(router)
        mesh.report(router, can_place=None)
    mesh.settle()
    assert core.pools.can_place("default", "v1") and not core.pools.has_several
    client = Client(core, spec(LONG), mesh.now_s)
    assert finish(mesh, client) in ("LENGTH", "END_TOKEN")
    assert PoolChoice(peers).choose("", "s")[:2] == ("default", "")


class Schedule:
    """A random run over three pools: links, reports, refusals and failures, snapshots, and clients that bind late."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.core = FrontendCore(
            Limits(8, DETACHED_S, 16),
            limit=64,
            retries=RetryBudget(0.1, 3.0, 1000.0),
            jitter=self.draw.random,
        )
        self.core.take_snapshot(CONTENT)
        self.mesh = FakeMesh(self.core, self.draw, self.draw.randint(1, 2), POOLS)
        self.clients: list[Client] = []
        self.bound: dict[int, str] = {}
        """Version of each client that was told one, by its index."""
        self.counts: Counter[tuple[str, str]] = Counter()
        for router in self.mesh.routers:
            if self.draw.random() < 0.8:
                self.mesh.open(router)

    def begin(self) -> None:
        number = len(self.clients) + 1
        chosen = self.core.pools.choose("", f"s{number}")
        made = spec(
            number, pool=chosen.pool, model_version=chosen.model_version, deadline_s=self.mesh.now_s + 600
        )
        self.clients.append(Client(self.core, made, self.mesh.now_s))

    def read(self, index: int) -> None:
        """Bind as the service does: before the client gets anything."""
        client = self.clients[index]
        if client.request.output.has_waiting() or self.draw.random() < 0.2:
            client.request.is_bound = True
            version = client.request.spec.model_version
            assert self.bound.setdefault(index, version) == version
            client.read(self.mesh.now_s)

    def fault(self) -> None:
        draw, mesh = self.draw, self.mesh
        router = draw.choice(mesh.routers)
        run = draw.choice(mesh.runs) if mesh.runs else None
        choice = draw.randrange(7)
        if choice == 0:
            mesh.cut(router)
        elif choice < 3:
            mesh.open(router)
        elif choice == 3:
            mesh.report(router, can_place=draw.choice([True, True, False, None]))
        elif choice == 4:
            self.count()
        elif run is None:
            return
        elif choice == 5 and run.stage == "queued" and run.router is not None:
            mesh.refuse(run, draw.choice([pb.Refusal.REASON_NO_REPLICA, pb.Refusal.REASON_DRAINING]))
        elif choice == 6 and draw.random() < 0.3:
            mesh.fail(run, draw.choice(FAILURES))

    def count(self) -> None:
        batch = self.core.observations.drain(self.mesh.now_s)
        if batch is not None:
            for row in batch.counts:
                for field in ("started", "ended", "dropped"):
                    self.counts[row.pool, field] += getattr(row, field)
            self.core.observations.confirm(batch.sequence)

    def run(self) -> None:
        draw, mesh = self.draw, self.mesh
        for _ in range(500):
            if draw.random() < 0.25:
                self.fault()
            elif len(self.clients) < 16 and draw.random() < 0.2:
                self.begin()
            elif self.clients and draw.random() < 0.3:
                self.read(draw.randrange(len(self.clients)))
            else:
                mesh.settle() if draw.random() < 0.7 else mesh.advance(draw.choice([0.01, 0.3]))
            self.core.assert_consistent()
        for _ in range(3000):
            for router in mesh.routers:
                mesh.open(router)
                if not router.can_place:
                    mesh.report(router, can_place=True)
            mesh.settle()
            for index in range(len(self.clients)):
                self.read(index)
            self.core.assert_consistent()
            if all(client.is_done for client in self.clients) and not self.core.admitted.leaving:
                break
            mesh.advance(0.05)
        mesh.advance(1.0)
        self.count()


def test_random_schedules_keep_each_client_on_its_version_and_conserve_the_counts() -> None:
    """Tokens are those of the version that the client was told; no attempt of it went to another version."""
    outcomes, moves = Counter[str](), 0
    for seed in range(150):
        schedule = Schedule(seed)
        schedule.run()
        for index, client in enumerate(schedule.clients):
            outcome = client.request.outcome
            assert outcome is not None and client.is_done, f"seed={seed}: {client.request}"
            outcomes[outcome.name] += 1
            moves += client.request.moves
            expected = whole(client)
            assert client.ids == expected[: len(client.ids)], f"seed={seed}: {client.request}"
            assert outcome.error is not None or client.ids == expected, f"seed={seed}"
            assert schedule.bound.get(index) in (None, client.request.spec.model_version), f"seed={seed}"
        for pool in dict(POOLS):
            counts = schedule.counts
            assert counts[pool, "started"] == counts[pool, "ended"] + counts[pool, "dropped"], f"seed={seed}"
    assert moves > 50 and outcomes["LENGTH"] + outcomes["END_TOKEN"] > 1000, (moves, outcomes)
