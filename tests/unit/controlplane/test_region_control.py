"""Regions at one control process: news, takeover, orders, snapshot entries and traffic."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from controlplane import region_views
from controlplane.actions import AppendEvent, Steer
from controlplane.pools.registry import Registry
from controlplane.region_control import STALE_S, UNKNOWN_S, RegionControl, RegionNames
from controlplane.regions.declared import Declared, DeclaredState
from controlplane.regions.document import AvoidEntry, RegionOrders
from controlplane.regions.news import DeclaredNews, News, NewsError, RolloutNews, of_message, to_message
from controlplane.regions.orders import Drain, drain
from controlplane.regions.signals import Replicas, Signals
from controlplane.snapshots.receivers import Receiver, Receivers
from kvmesh.control.v1 import region_pb2
from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.membership.member import Member
from kvmesh.regions.quantity import Quantity
from kvmesh.snapshot.content import Content, PoolTrack, Track
from kvmesh.snapshot.regions import DeclaredState as PublishedState
from kvmesh.snapshot.regions import ObservedState, RegionEntry, RegionProcess

CONTENT = Content((PoolTrack("default", "m", Track.STABLE, 100),))
NAMES = RegionNames("eu", {"eu": 0.5, "us": 0.5}, tenants_sha256=b"a" * 32)
ROUTER = RegionProcess("router-0", "10.1.0.1:7000", "b", "default", "m", 32)


class Cell:
    """A leader of region "eu" with one router, one prefill and one decode replica, on a virtual clock."""

    def __init__(self) -> None:
        self.now_s = self.wall_s = 1_000_000.0
        self.control = RegionControl(NAMES, lambda: self.wall_s)
        self.registry, self.receivers = Registry(), Receivers()
        self.registry.take(
            [
                Member(
                    process_id=name,
                    role=role,  # type: ignore[arg-type]  # one of the roles
                    address="127.0.0.1:1",
                    boot_id=f"boot-{name}",
                    model_version="m",
                    block_tokens=32,
                    pool="default" if role != "frontend" else "",
                )
                for name, role in (
                    *(("frontend-0", "frontend"), ("router-0", "router")),
                    *(("prefill-0", "prefill"), ("decode-0", "decode")),
                )
            ],
            self.now_s,
        )
        for name, role in (("frontend-0", "frontend"), ("router-0", "router")):
            pool = "default" if role == "router" else ""
            self.receivers.hello(Receiver(name, f"boot-{name}", role, pool), self.now_s)

    def report(self, load: region_pb2.RouterLoad) -> None:
        """Take the report of the router."""
        router = self.receivers.named("router-0")
        assert router is not None
        router.report = pb.ReceiverReport(region_load=load)

    def step(
        self, seconds: float = 1.0, content: Content = CONTENT, events: list[AppendEvent] | None = None
    ) -> list[Steer]:
        """Step for a time, and return the traffic of the last step. `events`: gets the audit's events."""
        traffic: list[Steer] = []
        for _ in range(round(seconds)):
            self.now_s += 1
            self.wall_s += 1
            self.control.step(self.registry, self.receivers, content, self.now_s)
            actions = self.control.take_actions()
            traffic = [each for each in actions if isinstance(each, Steer)]
            if events is not None:
                events += [each for each in actions if isinstance(each, AppendEvent)]
        return traffic


def signals(load: float = 100.0, capacity: float = 1000.0) -> Signals:
    """Return the signals of a healthy region."""
    return Signals(
        replicas={"prefill": Replicas(2, 2), "decode": Replicas(2, 2)},
        attempts=100,
        load=Quantity(load, 10),
        capacity=Quantity(capacity, 1000),
        leased_capacity=Quantity(capacity, 1000),
    )


def news(sequence: int, **fields: object) -> News:
    given = {
        "region": "us",
        "term": 1,
        "sequence": sequence,
        "signals": signals(),
        "routers": (ROUTER,),
        **fields,
    }
    return News(**given)  # type: ignore[arg-type]  # fields by name


def entry(cell: Cell, region: str = "us") -> RegionEntry:
    return next(each for each in cell.control.entries(cell.now_s) if each.name == region)


def test_news_are_published_and_old_ones_are_ignored() -> None:
    """The order is term, then sequence; a restarted peer with a lower term is heard again once it counts as stale."""
    cell = Cell()
    cell.step()
    assert cell.control.on_news(news(5, stable_version="m2"), cell.now_s)
    assert entry(cell).routers == (ROUTER,) and entry(cell).stable_version == "m2"
    assert not cell.control.on_news(news(4, routers=()), cell.now_s)
    assert not cell.control.on_news(news(6, region="ap"), cell.now_s)
    assert not cell.control.on_news(replace(news(1), region="eu"), cell.now_s)
    assert entry(cell).routers == (ROUTER,)
    cell.step(STALE_S + 1)
    assert entry(cell).routers == (ROUTER,), "a region that cannot be heard keeps its last entry"
    assert cell.control.is_stale("us", cell.now_s)
    assert cell.control.on_news(news(1, term=0, routers=()), cell.now_s)
    assert entry(cell).routers == ()


def test_a_peer_that_takes_over_erases_nothing() -> None:
    """Its new leader knows no process, no version and no rollout yet. It sends nothing, and earlier releases did."""
    cell = Cell()
    cell.step()
    rollout = RolloutNews("BAKING", "v2", False, 60)
    assert cell.control.on_news(news(5, stable_version="m2", rollout=rollout), cell.now_s)
    new_leader = RegionControl(replace(NAMES, own="us"), lambda: cell.wall_s)
    assert not new_leader.is_begun, "RegionService and RegionFederation send nothing"
    assert not cell.control.on_news(new_leader.news(2, cell.now_s), cell.now_s + 1)
    assert entry(cell).routers == (ROUTER,) and entry(cell).stable_version == "m2"
    assert cell.control.rollouts(cell.now_s)["us"].state == "BAKING"
    cell.step(STALE_S + 1)
    assert cell.control.unheard(cell.now_s) == ("us",)


def test_news_that_came_during_a_takeover_are_fresher_than_the_snapshot() -> None:
    """The snapshot in force still has the processes of a minute ago."""
    cell = Cell()
    cell.control.on_news(news(1, stable_version="m2", tenants_sha256=b"z" * 32), cell.now_s)
    published = (RegionEntry("eu"), RegionEntry("us", observed=ObservedState.SUSPECT, weight_percent=100))
    cell.control.begin_term(replace(CONTENT, regions=published), RegionOrders(), cell.now_s)
    assert entry(cell).routers == (ROUTER,) and entry(cell).tenants_differ


def test_a_clock_step_brings_no_load_back() -> None:
    """A drained region's second drain keeps the ramp where it is. A listener with a wrong clock learns the age later."""
    cell = Cell()
    first = Declared(state=DeclaredState.DRAINING, revision=1, reason="move", at_s=cell.wall_s)
    cell.control.take_orders(RegionOrders().with_declared("eu", first), cell.now_s)
    cell.step(60)
    cell.wall_s -= 120
    second = drain(Drain("eu", "longer"), first, ("eu",), "bob", cell.wall_s)
    cell.control.take_orders(RegionOrders().with_declared("eu", second), cell.now_s)
    assert cell.control.regions.known("eu").declared.reason == "longer"  # type: ignore[union-attr]  # it is known
    assert entry(cell, "eu").weight_percent == 0
    other = msgspec.structs.replace(first, revision=7, at_s=cell.wall_s + 300)
    cell.control.begin_term(CONTENT, RegionOrders().with_declared("us", other), cell.now_s)
    assert entry(cell).weight_percent == 60, "by the clock of the other region it has just begun"
    cell.control.on_news(news(1, declared=(DeclaredNews("us", other, 60.0),)), cell.now_s)
    assert entry(cell).weight_percent == 0
    cell.control.on_news(news(2, declared=(DeclaredNews("us", other, 0.0),)), cell.now_s)
    assert entry(cell).weight_percent == 0


@pytest.mark.parametrize("is_restore_heard", [True, False])
def test_a_drain_after_a_restore_ramps_anew(is_restore_heard: bool) -> None:
    """Only the same drain keeps its age. A listener that was cut off hears of no restore between two drains."""
    cell = Cell()
    for revision in (2, 4):
        state = DeclaredState.DRAINING
        drained = Declared(state=state, revision=revision, reason="move", at_s=cell.wall_s)
        cell.control.take_orders(RegionOrders().with_declared("eu", drained), cell.now_s)
        assert entry(cell, "eu").weight_percent == 60
        cell.step(60)
        assert entry(cell, "eu").weight_percent == 0
        if is_restore_heard:
            serving = Declared(revision=revision + 1, at_s=cell.wall_s)
            cell.control.take_orders(RegionOrders().with_declared("eu", serving), cell.now_s)


def test_the_other_region_gets_a_grant_within_the_headroom_and_the_router_enforces_it() -> None:
    """Capacity 1,000 tokens/s at a load of 200: at most 600 are granted, 1.5 times the load of the source."""
    cell = Cell()
    quantity = region_pb2.Quantity
    cell.report(
        region_pb2.RouterLoad(
            own=quantity(tokens_per_s=200, blocks=20), capacity=quantity(tokens_per_s=1000, blocks=1000)
        )
    )
    cell.control.on_news(news(1, signals=signals(load=300)), cell.now_s)
    steers = cell.step(3)
    to_router = next(each.traffic for each in steers if each.process_id == "router-0")
    (grant,) = to_router.grants
    assert grant.region == "us" and 400 <= grant.quantity.tokens_per_s <= 450
    assert next(each.traffic for each in steers if each.process_id == "frontend-0").spill == []
    assert cell.control.news(1, cell.now_s).grants["us"].tokens_per_s == pytest.approx(450, rel=0.01)


def test_a_grant_is_where_guests_will_come() -> None:
    """A router with the own callers gets nine tenths before the first guest; one without callers can take the first few."""
    cell = Cell()
    quantity = region_pb2.Quantity
    cell.receivers.hello(Receiver("router-1", "boot-router-1", "router", "default"), cell.now_s)
    for name, own in (("router-0", 200.0), ("router-1", 0.0)):
        router = cell.receivers.named(name)
        assert router is not None
        load = region_pb2.RouterLoad(
            own=quantity(tokens_per_s=own, blocks=20), capacity=quantity(tokens_per_s=1000, blocks=1000)
        )
        router.report = pb.ReceiverReport(region_load=load)
    cell.control.on_news(news(1, signals=signals(load=300)), cell.now_s)
    parts = {
        each.process_id: grant.quantity.tokens_per_s for each in cell.step(3) for grant in each.traffic.grants
    }
    whole = sum(parts.values())
    assert whole == pytest.approx(450, rel=0.01)
    assert parts["router-0"] == pytest.approx(0.95 * whole, abs=2)


def test_a_loaded_region_spills_up_to_the_grant_and_frontends_are_told() -> None:
    """Load 950 of 1,000 wants 1 - 0.8/0.95 = 16 percent elsewhere."""
    cell = Cell()
    quantity = region_pb2.Quantity
    cell.report(
        region_pb2.RouterLoad(
            own=quantity(tokens_per_s=950, blocks=20), capacity=quantity(tokens_per_s=1000, blocks=1000)
        )
    )
    for sequence in range(1, 4):
        cell.control.on_news(news(sequence, grants={"eu": Quantity(500, 500)}), cell.now_s)
        steers = cell.step(2)
    (share,) = next(each.traffic for each in steers if each.process_id == "frontend-0").spill
    assert share.region == "us" and share.share == pytest.approx(1 - 0.8 / 0.95, abs=0.01)


def test_a_takeover_keeps_weights_and_processes_until_peers_are_heard() -> None:
    """A new leader must not send callers to a region that was OUT, nor forget its routers."""
    cell = Cell()
    known = RegionEntry("us", observed=ObservedState.OUT, weight_percent=0, routers=(ROUTER,))
    cell.control.begin_term(replace(CONTENT, regions=(RegionEntry("eu"), known)), RegionOrders(), cell.now_s)
    cell.step(5)
    assert (entry(cell).observed, entry(cell).weight_percent) == (ObservedState.OUT, 0)
    assert entry(cell).routers == (ROUTER,)


def test_a_declaration_of_a_peer_wins_by_revision_and_is_written_down() -> None:
    """The own declaration comes back from a peer after a loss of memory; a lower revision changes nothing."""
    cell = Cell()
    declared = Declared(state=DeclaredState.DRAINED, revision=9, reason="fire")
    cell.control.on_news(news(1, declared=(DeclaredNews("eu", declared, 60.0),)), cell.now_s)
    cell.step()
    assert entry(cell, "eu").declared is PublishedState.DRAINED and entry(cell, "eu").weight_percent == 0
    orders = cell.control.wanted_orders(RegionOrders(), cell.now_s)
    assert orders.declared["eu"].reason == "fire"
    older = Declared(state=DeclaredState.SERVING, revision=8)
    cell.control.on_news(news(2, declared=(DeclaredNews("eu", older, 0.0),)), cell.now_s)
    assert entry(cell, "eu").declared is PublishedState.DRAINED


def test_a_drain_ends_when_the_last_request_has_ended() -> None:
    """DRAINING ramps to 0; DRAINED follows once no frontend serves."""
    cell = Cell()
    orders = RegionOrders().with_declared(
        "eu", Declared(state=DeclaredState.DRAINING, revision=1, reason="move", at_s=cell.wall_s)
    )
    cell.control.take_orders(orders, cell.now_s)
    seen = []
    for _ in range(16):
        cell.step()
        seen.append(entry(cell, "eu").weight_percent)
        cell.control.take_busy({"frontend-0": 3}, cell.now_s)
        orders = cell.control.wanted_orders(orders, cell.now_s)
    assert sorted(set(seen), reverse=True) == [60, 30, 0] and seen == sorted(seen, reverse=True)
    assert orders.declared["eu"].state is DeclaredState.DRAINING, "requests are open"
    cell.control.take_busy({}, cell.now_s)
    orders = cell.control.wanted_orders(orders, cell.now_s)
    assert orders.declared["eu"].state is DeclaredState.DRAINED


def test_a_drain_waits_for_every_frontend_and_router() -> None:
    """Guests come from frontends of other regions, and a new leader has heard none of the processes yet."""
    cell = Cell()
    frontend, router = (cell.receivers.named(name) for name in ("frontend-0", "router-0"))
    assert frontend is not None and router is not None
    registry, receivers = cell.registry, cell.receivers
    assert registry.busy(receivers) == {"frontend-0": None, "router-0": None}, "nothing is reported yet"
    for at_frontend, at_router in ((0, None), (None, 0), (3, 0), (0, 2), (0, 0)):
        for receiver, count in ((frontend, at_frontend), (router, at_router)):
            receiver.report = None if count is None else pb.ReceiverReport(live_request_count=count)
        found = {"frontend-0": at_frontend, "router-0": at_router}
        assert registry.busy(receivers) == {name: count for name, count in found.items() if count != 0}
    receivers.gone("router-0", "boot-router-0")
    assert registry.busy(receivers) == {"router-0": None}, (
        "the stream of a router is cut, and its guests go on"
    )
    registry.take([], cell.now_s)
    assert registry.busy(receivers) == {}, "the router is gone for good"
    frontend.report = pb.ReceiverReport(live_request_count=1)
    assert registry.busy(receivers) == {"frontend-0": 1}, "Redis forgot the leases"
    receivers.gone("frontend-0", "boot-frontend-0")
    assert registry.busy(receivers) is None, "no process is known, so nothing is known of requests"


def test_a_region_without_any_process_is_drained_after_a_while() -> None:
    """Its operator stopped all of them. A new leader, which has heard of none yet, does not say so at once."""
    cell = Cell()
    declared = Declared(state=DeclaredState.DRAINING, revision=1, reason="move", at_s=cell.wall_s - 60)
    orders = RegionOrders().with_declared("eu", declared)
    cell.control.take_orders(orders, cell.now_s)

    def wanted_after(seconds: float, busy: Mapping[str, int] | None) -> RegionOrders:
        cell.step(seconds)
        cell.control.take_busy(busy, cell.now_s)
        return cell.control.wanted_orders(orders, cell.now_s)

    for busy in (None, {"frontend-0": 1}, None):
        for _ in range(4):
            assert wanted_after(1, busy) == orders
    drained = wanted_after(UNKNOWN_S, None)
    assert drained.declared["eu"].state is DeclaredState.DRAINED
    cell.control.forget()
    cell.control.take_orders(orders, cell.now_s)
    assert wanted_after(4, None) == orders, "a new term has heard of no process yet"
    assert wanted_after(UNKNOWN_S, None).declared["eu"].state is DeclaredState.DRAINED


def test_a_drain_beyond_its_end_is_an_event_once() -> None:
    """`--until` restores nothing. A second drain with a later end takes the warning back, and may be late again."""
    cell = Cell()
    late: list[AppendEvent] = []
    for revision in (1, 2):
        declared = Declared(
            state=DeclaredState.DRAINING,
            revision=revision,
            reason=f"move {revision}",
            at_s=cell.wall_s,
            until_s=cell.wall_s + 3,
        )
        cell.control.take_orders(RegionOrders().with_declared("eu", declared), cell.now_s)
        for _ in range(6):
            cell.step(events=late)
            assert cell.control.is_overdue("eu") == (cell.wall_s >= declared.until_s)
    declared = msgspec.structs.replace(declared, state=DeclaredState.DRAINED, revision=3)
    cell.control.take_orders(RegionOrders().with_declared("eu", declared), cell.now_s)
    cell.step(3, events=late)
    overdue = [(each.target, each.result) for each in late if each.what == "region.overdue"]
    assert overdue == [("eu", "move 1"), ("eu", "move 2")], (
        "its last stream ended too late: no second warning"
    )
    assert not cell.control.is_overdue("us")


def test_an_avoid_order_holds_until_its_end_across_a_takeover() -> None:
    """The order is in the desired document, with its end in Unix time. It is an event once, not in each term."""
    cell = Cell()
    avoid = AvoidEntry(until_s=cell.wall_s + 60, reason="ill", author="ann")
    orders = RegionOrders().with_avoid("us", avoid)
    cell.control.take_orders(orders, cell.now_s)
    assert [each.what for each in cell.control.regions.take_events()] == ["region.out"]
    cell.step()
    assert entry(cell).weight_percent == 0 and cell.control.regions.states(cell.now_s)["us"].is_by_hand
    cell.control.forget()
    cell.control.begin_term(CONTENT, orders, cell.now_s)
    assert not cell.control.regions.take_events()
    cell.step()
    assert entry(cell).weight_percent == 0
    cell.step(60)
    assert not cell.control.regions.states(cell.now_s)["us"].is_by_hand
    assert cell.control.wanted_orders(orders, cell.now_s).avoids == {}


@pytest.mark.parametrize("is_ok", [False, True])
def test_an_avoid_order_that_ends_during_a_takeover_is_over(is_ok: bool) -> None:
    """The snapshot in force was published under the order. The region recovers, and does not dwell in OUT."""
    cell = Cell()
    observed = ObservedState.HEALTHY if is_ok else ObservedState.OUT
    published = RegionEntry("us", observed=observed, weight_percent=100 if is_ok else 0)
    orders = RegionOrders().with_avoid("us", AvoidEntry(is_ok=is_ok, until_s=cell.wall_s - 1, author="ann"))
    content = replace(CONTENT, regions=(RegionEntry("eu"), published))
    cell.control.begin_term(content, orders, cell.now_s)
    assert entry(cell).observed is (ObservedState.HEALTHY if is_ok else ObservedState.RECOVERING)
    assert entry(cell).weight_percent == (100 if is_ok else 5)


def test_news_survive_the_wire_and_hostile_news_are_refused() -> None:
    """Random news are the same behind a round trip; a field out of range refuses the message and names it."""
    chance = random.Random(7)
    for _ in range(100):
        sent = news(
            chance.randint(1, 1 << 40),
            frontends=tuple(
                replace(ROUTER, process_id=f"f{at}", pool="") for at in range(chance.randint(0, 3))
            ),
            secrets=(chance.randbytes(32),),
            grants={"eu": Quantity(chance.random() * 1e6, chance.random() * 1e4)},
            signals=replace_signals(chance),
            declared=(DeclaredNews("us", Declared(revision=3, reason="r", author="ann"), 1.5),),
            tenants_sha256=b"x" * 32,
            seed_wishes=("eu",) * chance.randint(0, 1),
            seeded_from=("eu",) * chance.randint(0, 1),
        )
        assert of_message(region_pb2.RegionNews.FromString(to_message(sent).SerializeToString())) == sent
    for field, message in (
        ("region", region_pb2.RegionNews(region="")),
        ("resume_secrets", region_pb2.RegionNews(region="us", resume_secrets=[b"short"])),
        ("sequence", region_pb2.RegionNews(region="us", sequence=1 << 60)),
        ("routers", region_pb2.RegionNews(region="us", routers=[region_pb2.RegionProcess()])),
        (
            "grants",
            region_pb2.RegionNews(
                region="us",
                grants=[
                    region_pb2.Grant(region="eu", quantity=region_pb2.Quantity(tokens_per_s=float("nan")))
                ],
            ),
        ),
        (
            "failures",
            region_pb2.RegionNews(
                region="us", signals=region_pb2.RegionSignals(attempt_count=1, failure_count=2)
            ),
        ),
        (
            "final_weight_percent",
            region_pb2.RegionNews(
                region="us", declared=[region_pb2.Declared(region="us", final_weight_percent=float("inf"))]
            ),
        ),
    ):
        with pytest.raises(NewsError, match=field):
            of_message(message)


def replace_signals(chance: random.Random) -> Signals:
    attempts = chance.randint(0, 1000)
    return Signals(
        replicas={"decode": Replicas(1, 2)},
        attempts=attempts,
        failures=chance.randint(0, attempts),
        load=Quantity(chance.random() * 1e6, 5),
        cold_factor=1 + chance.random(),
        guests={"eu": Quantity(chance.random(), 1)},
        capacity=Quantity(1e6, 100),
        leased_capacity=Quantity(2e6, 200),
        wanted=Quantity(chance.random(), 0),
        is_spilling=chance.random() < 0.5,
        engine_age_s=chance.choice((float("inf"), 12.5)),
    )


def test_a_region_is_hard_down_when_no_own_frontend_reaches_it() -> None:
    """One frontend that reaches it is enough; without a report nothing is known. Told of its seeding, it recovers."""
    cell = Cell()
    frontend = cell.receivers.named("frontend-0")
    assert frontend is not None
    sequence = 0

    def run(seconds: int, is_up: bool | None) -> ObservedState:
        nonlocal sequence
        for _ in range(seconds):
            sequence += 1
            reached = [] if is_up is None else [pb.RegionReach(region="us", up=is_up)]
            frontend.report = pb.ReceiverReport(reached=reached)
            cell.control.on_news(news(sequence), cell.now_s)
            cell.step()
        return entry(cell).observed

    assert run(20, None) is ObservedState.HEALTHY
    assert run(20, True) is ObservedState.HEALTHY
    assert run(5, False) is ObservedState.HEALTHY
    assert run(1, True) is ObservedState.HEALTHY, "a flap restarts the time"
    assert run(12, False) is ObservedState.OUT and entry(cell).weight_percent == 0
    assert run(305, True) is ObservedState.OUT, "the end of its seeding is not told"
    sequence += 1
    cell.control.on_news(news(sequence, seeded_from=("eu",)), cell.now_s)
    assert run(1, True) is ObservedState.RECOVERING


def test_rollouts_of_other_regions_are_told_with_their_age() -> None:
    """The age goes on while the region is not heard."""
    cell = Cell()
    cell.step()
    cell.control.on_news(news(1, rollout=RolloutNews("COMPLETED", "m2", True, 100.0)), cell.now_s)
    cell.step(50)
    found = cell.control.rollouts(cell.now_s)["us"]
    assert (found.state, found.to_version) == ("COMPLETED", "m2") and found.age_s == pytest.approx(150)


def test_processes_of_a_release_without_regions_are_counted() -> None:
    """Their leases name no region; operators see that an upgrade is not over."""
    cell = Cell()
    cell.step()
    assert cell.control.unaware_count == 2
    members = [msgspec.structs.replace(each, region="eu") for each in cell.registry.ordered()]
    cell.registry.take(members, cell.now_s)
    cell.step()
    assert cell.control.unaware_count == 0
    (own, other) = region_views.views(cell.control, cell.now_s)
    assert (own.region, own.is_own, other.region, other.unaware_count) == ("eu", True, "us", 0)


def test_a_dead_pool_keeps_the_load_that_its_callers_had() -> None:
    """Callers that no grant covers are seen nowhere; a load of what other regions admit would shrink the grants."""
    cell, quantity = Cell(), region_pb2.Quantity
    whole = quantity(tokens_per_s=1000, blocks=1000)
    cell.report(region_pb2.RouterLoad(own=quantity(tokens_per_s=400, blocks=40), capacity=whole))
    cell.step(4)
    cell.registry.take([each for each in cell.registry.ordered() if each.role != "decode"], cell.now_s)
    cell.report(region_pb2.RouterLoad(own=quantity(), capacity=quantity(tokens_per_s=1000)))
    cell.step(60)
    found = cell.control.signals("eu")
    assert found is not None and found.load == Quantity(400, 40)


def test_replicas_that_are_warmed_up_make_no_region_ill() -> None:
    """A region that starts or grows has replicas that do not serve yet; a quarantined one counts."""
    cell = Cell()
    cell.step(2)
    for state, share in (("warming", None), ("quarantined", 0.0), ("", 1.0)):
        members = [
            msgspec.structs.replace(each, state=state, draining=bool(state))
            if each.role == "decode"
            else each
            for each in cell.registry.ordered()
        ]
        cell.registry.take(members, cell.now_s)
        cell.step(2)
        found = cell.control.signals("eu")
        assert found is not None
        decode = found.replicas["decode"]
        assert (decode.serving / decode.leased if decode.leased else None) == share


def test_news_on_two_streams_count_once() -> None:
    """Both regions dial, so each measurement arrives twice; doubled signals would halve the window of health."""
    eu, us = Cell(), Cell()
    us.control = RegionControl(RegionNames("us", NAMES.shares), lambda: us.wall_s)
    taken = 0
    for _ in range(20):
        us.step()
        told = us.control.news(1, us.now_s)
        taken += sum(eu.control.on_news(told, eu.now_s) for _ in range(2))
        eu.step()
    assert taken == 10, "one of two seconds has a measurement"


def test_a_new_leader_keeps_the_grant_of_guests_whose_region_is_dead() -> None:
    """The control plane restarts while the callers of a dead region are here: a grant of nothing would refuse them."""
    cell, quantity = Cell(), region_pb2.Quantity
    guests = [region_pb2.GuestLoad(region="us", load=quantity(tokens_per_s=200, blocks=20))]
    cell.report(
        region_pb2.RouterLoad(
            own=quantity(tokens_per_s=100, blocks=10),
            capacity=quantity(tokens_per_s=1000, blocks=1000),
            guests=guests,
        )
    )
    steers = cell.step(1)
    (grant,) = next(each.traffic for each in steers if each.process_id == "router-0").grants
    assert grant.region == "us" and grant.quantity.tokens_per_s >= 200
