"""Requests of a frontend between regions: what leaves the own region, what comes back, and what never crosses."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.tenants.caller import Tenant
from services.frontend.requests.region_choice import RegionSettings
from services.frontend.requests.region_refusals import REFUSED_BURST, REFUSED_SHARE
from services.frontend.requests.request import MOVES_MAX
from services.frontend.requests.request_spec import NOBODY, RequestSpec
from services.frontend.requests.resume_token import SECRET_BYTES, Seal, unpack
from services.frontend.requests.retry_state import RESUME_WAIT_S, ROUTER_WAIT_S
from services.frontend.requests.state import State
from services.frontend.requests.takeover import AttemptLocation
from tests.unit.frontend.fake_mesh import DETACHED_S, Client, FakeMesh, Router, changed, oracle, spec
from tests.unit.frontend.test_pools import finish, generated, whole
from tests.unit.frontend.test_region_choice import entry, mesh_of, routers_of, stop
from tests.unit.frontend.test_schedules import FAILURES, REFUSALS, Schedule, check, core_of

LONG = 10
"""Number of a request with at least 60 output tokens."""

PINNED = replace(NOBODY, tenant=Tenant(name="pinned", regions=("eu",)))


def begin(mesh: FakeMesh, number: int = 0, **changes: object) -> Client:
    """Submit request LONG at home; `number` names it."""
    fields: dict[str, object] = {"max_output_tokens": 60, "home": "eu", "border": "eu"}
    made = spec(LONG, **{**fields, **changes})
    return Client(mesh.core, replace(made, request_id=f"{number:032x}"), mesh.now_s)


def regions(mesh: FakeMesh, client: Client) -> list[str]:
    """Return the regions of the attempts of a request, repeated ones once."""
    found = mesh.regions.get(client.spec.request_id, [])
    return [each for at, each in enumerate(found) if at == 0 or found[at - 1] != each]


def test_streams_of_a_dead_home_go_on_in_the_other_region_token_for_token() -> None:
    """Their takeover is given up at once, no time passes, and nothing is paid from the retry budget."""
    mesh = mesh_of(entry("us"), retries=0.0)
    clients = [begin(mesh, number) for number in range(20)]
    while any(len(client.ids) < 3 for client in clients):
        mesh.settle()
        for client in clients:
            client.read(mesh.now_s)
    began_s = mesh.now_s
    stop(mesh)
    mesh.settle(1)
    assert mesh.now_s == began_s and all(client.request.spec.region == "us" for client in clients)
    for client in clients:
        assert finish(mesh, client) == "LENGTH" and client.ids == whole(client)
        assert regions(mesh, client) == ["", "us"] and client.request.takeovers == 0
    assert not mesh.adopts and mesh.core.regions.failed_over == {"us": 20}


def test_a_takeover_stays_in_the_region_of_the_attempt() -> None:
    """With a second router at home the running attempt is adopted there, and no other region hears of it."""
    mesh = mesh_of(entry("us"))
    client = begin(mesh)
    generated(mesh, client, 5)
    (router,) = [each for each in routers_of(mesh) if each.runs]
    mesh.cut(router)
    assert finish(mesh, client) == "LENGTH" and client.ids == whole(client)
    assert client.request.takeovers == 1 and regions(mesh, client) == [""]
    assert [region for region, _ in mesh.adopted] == [""]


def test_no_replica_costs_no_retry_where_another_region_takes_the_request() -> None:
    """A home without replicas refuses all with an empty retry budget: each request is served in the other region."""
    mesh = mesh_of(entry("us"), retries=0.0, routers=1)
    clients = [begin(mesh, number) for number in range(40)]
    mesh.settle()
    for run in [each for each in mesh.runs if each.region == ""]:
        mesh.refuse(run, pb.Refusal.REASON_NO_REPLICA)
    for client in clients:
        assert finish(mesh, client) == "LENGTH" and client.ids == whole(client)
        assert regions(mesh, client) == ["", "us"]
    assert mesh.core.retries.spent_total == mesh.core.retries.refused_total == 0


@pytest.mark.parametrize("is_bound", [False, True])
def test_requests_that_wait_at_a_dead_home_move_although_its_pool_is_the_only_one(is_bound: bool) -> None:
    """The report that nothing can be placed moves the queue, also of requests that are bound to their version."""
    mesh = mesh_of(entry("us"), routers=1, retries=0.0)
    client = begin(mesh)
    client.request.is_bound = is_bound
    mesh.settle()
    mesh.report(routers_of(mesh)[0], can_place=False)
    assert finish(mesh, client) == "LENGTH" and regions(mesh, client) == ["", "us"]


def test_a_refusal_for_the_grant_goes_home_free_and_the_router_counts_as_able() -> None:
    """The spilled request is served at home; the region is not marked unable, and rests from spill for a moment."""
    mesh = mesh_of(entry("us"), retries=0.0)
    client = begin(mesh, pool="us/default", session_id="s")
    mesh.settle()
    (run,) = mesh.runs
    mesh.refuse(run, pb.Refusal.REASON_GRANT, 1000)
    assert finish(mesh, client) == "LENGTH" and regions(mesh, client) == ["us", ""]
    assert all(peer.can_place for peer in mesh.core.peers)
    assert mesh.core.retries.refused_total == 0 and mesh.core.regions.grant_refusals == {"us": 1}


@pytest.mark.parametrize("reason", [pb.Refusal.REASON_QUEUE_FULL, pb.Refusal.REASON_DEADLINE])
def test_a_full_region_refuses_no_caller_of_another_one(reason: pb.Refusal.Reason.ValueType) -> None:
    """Its queue, or its estimate, sends the spilled request home; a full home still refuses."""
    mesh = mesh_of(entry("us"), retries=0.0)
    client = begin(mesh, pool="us/default")
    mesh.settle()
    mesh.refuse(mesh.runs[0], reason)
    assert finish(mesh, client) == "LENGTH" and regions(mesh, client) == ["us", ""]
    own = begin(mesh, 1)
    mesh.settle()
    (run,) = [each for each in mesh.runs if each.submit.request_id == own.spec.request_id]
    mesh.refuse(run, pb.Refusal.REASON_QUEUE_FULL)
    assert finish(mesh, own) == "QUEUE_FULL" and regions(mesh, own) == [""]


@pytest.mark.parametrize("code", FAILURES)
@pytest.mark.parametrize("stage", ["queued", "placed", "running"])
def test_a_region_that_fails_attempts_costs_no_answer_while_home_works(
    stage: str, code: pb.Failure.Code.ValueType
) -> None:
    """After its first failure there the request is at home, with an empty retry budget and with its tokens."""
    mesh = mesh_of(entry("us"), retries=0.0)
    client = begin(mesh, pool="us/default", session_id="s")
    while not any(run.stage == stage for run in mesh.runs):
        for router in mesh.routers:
            mesh.send_up(router)
            mesh.arrive_up(router)
        for run in mesh.runs:
            if run.stage != stage:
                mesh.work(run)
    mesh.fail(mesh.runs[0], code)
    assert finish(mesh, client) == "LENGTH" and client.ids == whole(client)
    assert regions(mesh, client) == ["us", ""] and mesh.core.retries.refused_total == 0


@pytest.mark.parametrize("tokens", [0, 5])
def test_a_region_that_falls_silent_is_left_after_one_attempt(tokens: int) -> None:
    """Its routers keep their streams and answer nothing: the watchdog sends the request home."""
    mesh = mesh_of(entry("us"), retries=0.0)
    client = begin(mesh, pool="us/default")
    if tokens:
        generated(mesh, client, tokens)
    for router in routers_of(mesh, "us"):
        router.is_frozen = True
    assert finish(mesh, client) == "LENGTH" and client.ids == whole(client)
    assert regions(mesh, client)[-1] == "" and len(client.request.attempts) == 2


def test_what_fits_nowhere_ends_as_a_full_queue_with_a_time() -> None:
    """Home is dead, and no grant covers the request: QUEUE_FULL with the router's Retry-After."""
    mesh = mesh_of(entry("us"), routers=1)
    stop(mesh)
    client = begin(mesh, pool="us/default")
    mesh.settle()
    mesh.refuse(mesh.runs[0], pb.Refusal.REASON_GRANT, 1500)
    assert finish(mesh, client) == "QUEUE_FULL"
    error = client.request.outcome.error if client.request.outcome is not None else None
    assert error is not None and error.retry_after_s == 1.5


def test_a_resumed_stream_waits_for_the_grant_and_is_not_refused() -> None:
    """Home died in the middle of the stream: the other region's refusals for the grant delay the rest of it."""
    mesh = mesh_of(entry("us"), routers=1)
    client = begin(mesh)
    generated(mesh, client, 5)
    stop(mesh)
    mesh.settle(1)
    for _ in range(4):
        for run in [each for each in mesh.runs if each.region == "us" and each.router is not None]:
            mesh.refuse(run, pb.Refusal.REASON_GRANT, 500)
        mesh.settle(1)
        mesh.advance(1.0)
    assert finish(mesh, client) == "LENGTH" and client.ids == whole(client)


def test_an_attempt_in_a_region_that_lost_its_weight_is_the_last_one_there() -> None:
    """It runs on while it can. After a loss the request goes home, also if no region has a weight any more."""
    mesh = mesh_of(entry("us"), retries=0.0)
    whole_there, broken = begin(mesh, pool="us/default"), begin(mesh, 1, pool="us/default")
    mesh.settle()
    mesh.core.regions.take([entry("eu"), entry("us", 0)])
    (run,) = [each for each in mesh.runs if each.submit.request_id == broken.spec.request_id]
    mesh.fail(run, FAILURES[0])
    assert not mesh.core.regions.takes_new and mesh.core.pools.has_router
    for client, seen in ((whole_there, ["us"]), (broken, ["us", ""])):
        assert finish(mesh, client) == "LENGTH" and client.ids == whole(client)
        assert regions(mesh, client) == seen


def test_a_guest_goes_home_after_a_refusal_for_its_grant_or_is_refused() -> None:
    """Its home serves it while its routers answer; a third region never does."""
    for is_home_up in (True, False):
        mesh = mesh_of(entry("us"), entry("ap"), retries=0.0)
        if not is_home_up:
            stop(mesh, "us")
        client = begin(mesh, home="us")
        mesh.settle()
        mesh.refuse(mesh.runs[0], pb.Refusal.REASON_GRANT, 700)
        assert finish(mesh, client) == ("LENGTH" if is_home_up else "QUEUE_FULL")
        assert regions(mesh, client) == (["", "us"] if is_home_up else [""])


@pytest.mark.parametrize("reason", [pb.Refusal.REASON_GRANT, pb.Refusal.REASON_QUEUE_FULL])
@pytest.mark.parametrize("others", [("us",), ("us", "ap")])
def test_full_regions_do_not_multiply_the_load_of_a_dead_one(
    others: tuple[str, ...], reason: pb.Refusal.Reason.ValueType
) -> None:
    """Each further region takes a retry of the retry budget; without one the caller gets the refusal, with its delay."""
    mesh = mesh_of(*map(entry, others), retries=0.0, routers=1)
    stop(mesh)
    clients = [begin(mesh, number) for number in range(60)]
    for _ in range(6):
        mesh.settle(1)
        for run in [each for each in mesh.runs if each.router is not None]:
            mesh.refuse(run, reason, 1000)
    for client in clients:
        assert finish(mesh, client) == "QUEUE_FULL"
        error = client.request.outcome.error if client.request.outcome is not None else None
        assert error is not None and error.retry_after_s
    assert all(len(client.request.attempts) == 1 for client in clients)


@pytest.mark.parametrize(
    "reason", [pb.Refusal.REASON_QUEUE_FULL, pb.Refusal.REASON_DEADLINE, pb.Refusal.REASON_GRANT]
)
def test_a_full_target_of_spill_does_not_multiply_the_load_of_home(
    reason: pb.Refusal.Reason.ValueType,
) -> None:
    """Its sessions come home, and no further one is spilled once a tenth of all requests was refused."""
    mesh = mesh_of(entry("us"), retries=0.0, routers=1)
    count = attempts = 0
    for turn in range(6):
        for number in range(40):
            mesh.core.regions.take_shares({"us": 0.5}, mesh.now_s)
            session = f"s{number}"
            pool = mesh.core.regions.choose(Tenant(name=""), session, "eu", mesh.now_s).pool
            client = begin(mesh, 100 * turn + number, pool=pool, session_id=session, max_output_tokens=2)
            for _ in range(3):
                mesh.settle(1)
                for run in [each for each in mesh.runs if each.router is not None and each.region == "us"]:
                    mesh.refuse(run, reason, 1000)
            assert finish(mesh, client) == "LENGTH"
            count, attempts = count + 1, attempts + len(client.request.attempts)
            mesh.advance(0.25)
    assert attempts <= (1 + REFUSED_SHARE) * count + REFUSED_BURST


def test_a_deadline_that_no_region_meets_says_nothing_of_the_region() -> None:
    """It goes home, and the sessions of others are spilled as before: no queue was in its way."""
    mesh = mesh_of(entry("us"), routers=1)
    regions = mesh.core.regions
    for number in range(50):
        client = begin(mesh, number, pool="us/default", session_id="s")
        mesh.settle()
        for run in [each for each in mesh.runs if each.router is not None and each.region == "us"]:
            mesh.refuse(run, pb.Refusal.REASON_DEADLINE, 0)
        mesh.settle()
        assert not client.request.spec.region
    assert not regions.refusals.is_full("us") and not regions.refusals.is_last("us", mesh.now_s)


def test_a_home_that_dies_loses_no_stream_to_a_region_that_is_full() -> None:
    """The other one takes them: only the first requests meet the full one. Streams pay nothing from the retry budget."""
    mesh = mesh_of(entry("us"), entry("ap"), retries=0.3, routers=1)
    clients = [begin(mesh, number) for number in range(30)]
    while any(len(client.ids) < 3 for client in clients):
        mesh.settle()
        for client in clients:
            client.read(mesh.now_s)
    stop(mesh)
    for _ in range(6):
        mesh.settle(1)
        for run in [each for each in mesh.runs if each.router is not None and each.region == "us"]:
            mesh.refuse(run, pb.Refusal.REASON_GRANT, 1000)
    assert mesh.core.retries.spent_total == 0
    fresh = [
        begin(mesh, 100 + number, pool=choice_of(mesh, f"s{number}"), session_id=f"s{number}")
        for number in range(20)
    ]
    for client in (*clients, *fresh):
        assert finish(mesh, client) == "LENGTH" and client.ids == whole(client)
        assert client.request.spec.region == "ap"


def choice_of(mesh: FakeMesh, session: str) -> str:
    """Return the pool of a new request of a session."""
    return mesh.core.regions.choose(Tenant(name=""), session, "eu", mesh.now_s).pool


def test_a_region_that_was_full_once_takes_the_stream_later() -> None:
    """Its refusal counts until the first token."""
    mesh = mesh_of(entry("us"), routers=1)
    client = begin(mesh, pool="us/default", session_id="s")
    mesh.settle()
    mesh.refuse(mesh.runs[0], pb.Refusal.REASON_QUEUE_FULL)
    generated(mesh, client, 5)
    assert not client.request.spec.region
    stop(mesh)
    assert finish(mesh, client) == "LENGTH" and client.ids == whole(client)
    assert regions(mesh, client) == ["us", "", "us"]


@pytest.mark.parametrize("what", ["QUEUE_FULL", "REPLICA_LOST", "GRANT"])
@pytest.mark.parametrize("is_home_up", [True, False])
def test_a_request_with_another_tokenizer_there_is_read_again_a_few_times(
    what: str, is_home_up: bool
) -> None:
    """Each reading ends in the region that refuses or fails it. A later reading knows that, and goes elsewhere, or home."""
    mesh = mesh_of(entry("us", version="v2"), entry("ap"), retries=3.0, routers=1)
    mesh.core.pools.share_tokenizer = lambda one, other: one == other
    regions, session = mesh.core.regions, "s1"
    regions.take_shares({"us": 1.0}, mesh.now_s)
    if not is_home_up:
        stop(mesh)
    left, moves = frozenset[str](), 0
    for reading in range(MOVES_MAX + 2):
        chosen = regions.choose(Tenant(name=""), session, "eu", mesh.now_s, without=left)
        client = begin(
            mesh,
            reading,
            pool=chosen.pool,
            model_version=chosen.model_version,
            session_id=session,
            left_regions=left,
            moves=moves,
        )
        for _ in range(3):
            mesh.settle(1)
            for run in [each for each in mesh.runs if each.router is not None and each.region == "us"]:
                if what == "REPLICA_LOST":
                    mesh.fail(run, pb.Failure.CODE_REPLICA_LOST)
                else:
                    mesh.refuse(run, getattr(pb.Refusal, f"REASON_{what}"), 1000)
        if not client.request.must_reread:
            break
        left, moves = frozenset(client.request.refused_regions), client.request.moves
    assert reading <= 2 and finish(mesh, client) == "LENGTH"
    assert client.request.spec.region == ("" if is_home_up else "ap")


@pytest.mark.parametrize("is_superseded", [False, True])
def test_an_observer_that_fails_keeps_no_client_waiting(is_superseded: bool) -> None:
    """The request ends for its client, and leaves nothing behind."""

    class Broken:
        def on_end(self, request: object) -> None:
            raise KeyError("sa")

    mesh = mesh_of(entry("us"))
    mesh.core._observer = Broken()
    client = begin(mesh)
    woken: list[bool] = []
    client.request.on_ready = lambda: woken.append(client.request.outcome is not None)
    if is_superseded:
        generated(mesh, client, 3)
        mesh.core.supersede(client.spec.request_id, 1, mesh.now_s)
        assert client.request.outcome is not None and woken[-1]
    else:
        assert finish(mesh, client) == "LENGTH" and woken[-1]
    assert client.request.state is State.ENDED


def test_a_version_without_another_region_ends_stale_with_the_tokens_that_are_out() -> None:
    """Streams of v1 do not go on as v2. A request without tokens takes the other region's stable version."""
    mesh = mesh_of(entry("us", version="v2"), routers=1)
    bound, free = begin(mesh), begin(mesh, 1)
    generated(mesh, bound, 5)
    bound.request.is_bound = True
    free_run = next(each for each in mesh.runs if each.submit.request_id == free.spec.request_id)
    assert free_run.stage != "queued" and not free.request.is_bound
    stop(mesh)
    late = begin(mesh, 2)
    assert finish(mesh, late) == "LENGTH" and late.request.spec.model_version == "v2"
    assert late.ids == whole(late)
    assert finish(mesh, bound, RESUME_WAIT_S + 10) == "STALE_SNAPSHOT"
    error = bound.request.outcome.error if bound.request.outcome is not None else None
    assert error is not None and error.metadata["tokens_sent"] == str(len(bound.ids)) != "0"
    assert mesh.core.regions.other_version["us"] >= 1


def test_a_pinned_tenant_ends_with_its_regions_and_is_placed_nowhere_else() -> None:
    """Its home died: no attempt leaves it, and the error names the regions that may serve it."""
    mesh = mesh_of(entry("us"), routers=1)
    stop(mesh)
    client = begin(mesh, caller=PINNED)
    assert finish(mesh, client, ROUTER_WAIT_S + 5) == "REGION_UNAVAILABLE"
    error = client.request.outcome.error if client.request.outcome is not None else None
    assert error is not None and error.metadata == {"regions": "eu"} and not regions(mesh, client)


def test_a_verdict_of_another_region_does_not_touch_the_own_replica_of_equal_name() -> None:
    """decode-0 over there called a request invalid that decode-0 here serves: the routers over there hear of it."""
    mesh = mesh_of(entry("us"), routers=1, retries=8.0)
    client = begin(mesh, pool="us/default")
    mesh.settle()
    (run,) = mesh.runs
    while run.stage != "placed":
        mesh.settle()
    stop_after = routers_of(mesh, "us")[0]
    mesh.fail(run, pb.Failure.CODE_INVALID, contestable=True)
    mesh.settle(1)
    mesh.report(stop_after, can_place=False)
    assert finish(mesh, client) == "LENGTH" and regions(mesh, client) == ["us", ""]
    assert [submit.contested_replicas for submit in mesh.submits[-1:]] == [[]]
    assert set(mesh.contradictions) == {(stop_after.name, "decode-0")}


def test_requests_served_elsewhere_are_not_observed() -> None:
    """Counts and rows of pools know requests of the own region alone; a request that left ended there."""
    mesh = mesh_of(entry("us"), routers=1)
    spilled, moved = begin(mesh, pool="us/default"), begin(mesh, 1)
    mesh.settle()
    stop(mesh)
    assert [finish(mesh, each) for each in (spilled, moved)] == ["LENGTH", "LENGTH"]
    batch = mesh.core.observations.drain(mesh.now_s)
    assert batch is not None
    assert [(each.pool, each.started, each.ended, each.open) for each in batch.counts] == [
        ("default", 1, 1, 0)
    ]


def test_budget_and_priority_of_a_request_between_regions() -> None:
    """The home is always told; a guest is one class below own callers, and class 0 is the lowest."""
    mesh = mesh_of(entry("us"))
    for at, (home, pool, band) in enumerate(
        [("eu", "default", 4), ("us", "default", 3), ("eu", "us/default", 3), ("us", "us/default", 4)]
    ):
        caller = replace(NOBODY, service_class=replace(NOBODY.service_class, priority_class=4))
        begin(mesh, at, home=home, pool=pool, caller=caller)
        mesh.settle(1)
        assert (mesh.submits[-1].budget.region, mesh.submits[-1].budget.band) == (home, band)
    lowest = replace(NOBODY, service_class=replace(NOBODY.service_class, priority_class=0))
    begin(mesh, 9, home="us", caller=lowest)
    mesh.settle(1)
    assert mesh.submits[-1].budget.band == 0


def test_a_token_names_the_region_only_between_regions_and_is_read_with_its_secret() -> None:
    """Without regions tokens stay as they were. A seal that knows the other region's secrets opens its tokens."""
    here, there = Seal(b"e" * SECRET_BYTES), Seal(b"u" * SECRET_BYTES)
    location = AttemptLocation(3, "decode-0")
    plain = unpack(spec(1).resume_token(location, 7).pack(here), here)
    assert plain.location == location
    told = spec(1, border="eu", pool="us/stable").resume_token(location, 7).pack(here)
    with pytest.raises(ValueError):
        unpack(told, there)
    there.know("eu", (b"x" * SECRET_BYTES, b"e" * SECRET_BYTES))
    token = unpack(told, there)
    assert token.location == AttemptLocation(3, "us/decode-0") and token.pool == "stable"
    assert there.secret == b"u" * SECRET_BYTES
    own = unpack(spec(1, border="eu").resume_token(location, 7).pack(here), here)
    assert own.location is not None and own.location.region == "eu"


class RegionSchedule(Schedule):
    """A random run of a frontend in eu with two other regions, spill, guests, pinned tenants and refusals for grants."""

    HOMES: tuple[str, ...] = ("eu", "eu", "eu", "us")

    def __init__(self, seed: int, fault_share: float, *, spares_home: bool = False) -> None:
        self.draw = random.Random(seed)
        self.core = core_of(self.draw)
        self.core.regions.settings = RegionSettings("eu", frozenset({"eu", "us", "ap"}))
        others = {"us": (("default", "v1"),), "ap": (("default", "v1"),)}
        self.mesh = FakeMesh(self.core, self.draw, self.draw.randint(1, 2), others=others)
        self.clients: list[Client] = []
        self.fault_share = fault_share
        self.spares_home = spares_home
        self.weight = self.draw.choice([0, 10, 100])
        for router in self.mesh.routers:
            self.mesh.open(router)

    def _begin(self) -> None:
        draw, number = self.draw, len(self.clients) + 1
        self.core.regions.take(
            [entry("eu"), entry("us", draw.choice([0, 100, 100])), entry("ap", self.weight)]
        )
        self.core.regions.take_shares(
            {"us": draw.choice([0.0, 0.5, 0.9]), "ap": draw.choice([0.0, 0.1])}, self.mesh.now_s
        )
        home, is_pinned = draw.choice(self.HOMES), draw.random() < 0.2
        caller = PINNED if is_pinned and home == "eu" else NOBODY
        made = spec(number, home=home, border="eu", caller=caller)
        session = draw.choice(["", f"s{number % 3}"])
        chosen = self.core.regions.choose(
            caller.tenant, session or made.request_id, home, self.mesh.now_s, is_session=bool(session)
        )
        made = changed(made, pool=chosen.pool, session_id=session)
        self.clients.append(Client(self.core, made, self.mesh.now_s))

    def _fault(self, router: Router) -> None:
        draw, mesh = self.draw, self.mesh
        if self.spares_home and not router.region:
            return
        runs = [each for each in mesh.runs if not self.spares_home or each.region]
        choice = draw.randrange(9)
        if choice < 2:
            mesh.cut(router)
        elif choice < 5:
            mesh.open(router)
        elif choice == 5:
            mesh.report(router, can_place=draw.random() < 0.5)
        elif choice == 6 and not self.spares_home:
            router.is_frozen = not router.is_frozen
        elif runs:
            run = draw.choice(runs)
            if run.stage == "queued" and run.router is not None:
                reasons = [*REFUSALS, pb.Refusal.REASON_GRANT, pb.Refusal.REASON_GRANT]
                mesh.refuse(run, draw.choice(reasons), draw.choice([0, 0, 50]))
            elif run.stage != "queued" and draw.random() < 0.3:
                mesh.fail(run, draw.choice(FAILURES))


@pytest.mark.parametrize("fault_share", [0.02, 0.15])
def test_tokens_are_equal_nothing_is_spilled_twice_and_residency_holds_under_random_faults(
    fault_share: float,
) -> None:
    """Whatever fails in three regions: each token once, guests here or at home, pinned tenants at home, one end each."""
    crossed: Counter[str] = Counter()
    for seed in range(60):
        schedule = RegionSchedule(seed, fault_share)
        try:
            schedule.run(steps=600)
        except Exception as error:
            raise AssertionError(f"seed={seed}") from error
        check(schedule, seed)
        for client in schedule.clients:
            seen = set(schedule.mesh.regions.get(client.spec.request_id, []))
            crossed[" ".join(sorted(each or "eu" for each in seen))] += 1
            if client.spec.home != "eu":
                assert seen <= {"", client.spec.home}, (
                    f"seed={seed} a guest of {client.spec.home} was in {seen}"
                )
            if client.spec.caller is PINNED:
                assert seen <= {""}, f"seed={seed} a pinned tenant was in {seen}"
            assert "ap" not in seen or schedule.weight, f"seed={seed} weight 0"
    assert crossed["eu us"] > 20 and crossed["us"] > 20, crossed


def test_an_own_caller_is_never_refused_because_of_another_region() -> None:
    """Home works. Whatever the other regions refuse, lose or claim: each request of an own caller ends well."""
    crossed = 0
    for seed in range(80):
        schedule = RegionSchedule(seed, 0.2, spares_home=True)
        schedule.HOMES = ("eu",)
        try:
            schedule.run(steps=600)
        except Exception as error:
            raise AssertionError(f"seed={seed}") from error
        outcomes = check(schedule, seed)
        assert set(outcomes) <= {"END_TOKEN", "LENGTH"}, f"seed={seed} {outcomes}"
        crossed += sum(len(set(each)) > 1 for each in schedule.mesh.regions.values())
    assert crossed > 50


def test_the_oracle_is_long_enough() -> None:
    """Request LONG has 60 tokens in both versions, and a detached stream ends in the time of these tests."""
    made: RequestSpec = spec(LONG)
    assert all(len(oracle(made.prompt_ids, 60, version)) == 60 for version in ("v1", "v2"))
    assert DETACHED_S < RESUME_WAIT_S
