"""Choice of the region of new requests: locality, spill that sticks to sessions, versions, guests and residency."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvmesh.client import client
from kvmesh.errors import MeshError
from kvmesh.regions.names import HOME_METADATA
from kvmesh.snapshot.content import Content, PoolTrack, Track
from kvmesh.snapshot.regions import RegionEntry
from kvmesh.tenants.caller import Tenant
from services.frontend.requests.core import FrontendCore
from services.frontend.requests.moved_sessions import IDLE_S, MovedSessions
from services.frontend.requests.region_choice import RegionChoice, RegionSettings
from services.frontend.requests.region_refusals import LAST_S, REFUSED_BURST, REST_S
from services.frontend.requests.retry_budget import RetryBudget
from services.frontend.requests.retry_state import Limits
from tests.unit.frontend.fake_mesh import DETACHED_S, FakeMesh, Router, changed, spec

NAMES = frozenset({"eu", "us", "ap"})
TENANT = Tenant(name="acme")
SESSIONS = [f"s{number}" for number in range(4000)]


def entry(name: str, weight: int = 100, version: str = "v1", *, differ: bool = False) -> RegionEntry:
    return RegionEntry(
        name, weight_percent=weight, stable_version=version, stable_pool="default", tenants_differ=differ
    )


def content(*entries: RegionEntry, version: str = "v1") -> Content:
    own = entry("eu", version=version)
    return Content((PoolTrack("default", version, Track.STABLE, 100),), regions=(own, *entries))


def mesh_of(
    *entries: RegionEntry,
    own_version: str = "v1",
    may_rebind: bool = True,
    routers: int = 2,
    retries: float = 3.0,
) -> FakeMesh:
    """Return a mesh of region eu with routers of all `entries`, all up. The routers serve the stable versions."""
    core = FrontendCore(
        Limits(4, DETACHED_S, 16),
        limit=64,
        retries=RetryBudget(0.0, retries, 1000.0),
        jitter=lambda: 0.5,
        regions=RegionSettings("eu", NAMES, may_rebind),
    )
    core.take_snapshot(content(*entries, version=own_version))
    others = {each.name: (("default", each.stable_version),) for each in entries}
    mesh = FakeMesh(core, random.Random(0), routers, (("default", own_version),), others)
    for router in mesh.routers:
        mesh.open(router)
    return mesh


def routers_of(mesh: FakeMesh, region: str = "") -> list[Router]:
    return [router for router in mesh.routers if router.region == region]


def stop(mesh: FakeMesh, region: str = "") -> None:
    """Cut all routers of a region."""
    for router in routers_of(mesh, region):
        mesh.cut(router)


def regions_of(
    choice: RegionChoice, tenant: Tenant = TENANT, home: str = "eu", now_s: float = 0.0
) -> dict[str, str]:
    """Return the region of each session; "eu" for the own one."""
    pools = {each: choice.choose(tenant, each, home, now_s).pool for each in SESSIONS}
    return {each: pool.rpartition("/")[0] or "eu" for each, pool in pools.items()}


def test_home_serves_all_until_it_cannot_and_then_others_by_weight_and_stickily() -> None:
    """Without spill no session leaves; without own routers each has one region, by weights, and weight 0 gets none."""
    mesh = mesh_of(entry("us"), entry("ap", 50), entry("sa", 0))
    regions = mesh.core.regions
    assert set(regions_of(regions).values()) == {"eu"}
    stop(mesh)
    found = regions_of(regions)
    count = Counter(found.values())
    assert count.keys() == {"us", "ap"} and abs(count["us"] - len(SESSIONS) * 2 / 3) < 4 * 30
    assert regions_of(regions) == found
    stop(mesh, "ap")
    after = regions_of(regions)
    assert set(after.values()) == {"us"} and all(
        after[each] == "us" for each in SESSIONS if found[each] == "us"
    )
    stop(mesh, "us")
    assert set(regions_of(regions).values()) == {"eu"}, "no region can take it: it waits at home"


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("region", ["", "us"])
def test_a_request_moves_to_no_region_that_lacks_its_features(region: str, version: str) -> None:
    """Neither home nor away, of its version or of another one. A region that is not known to lack them is taken."""
    mesh = mesh_of(entry("us", version=version), entry("ap", version=version))
    needs = changed(spec(1), pool=f"{region}/default".strip("/"), frequency_penalty=1.0)
    regions = mesh.core.regions

    def found() -> str | None:
        moved = regions.away(needs, may_rebind=True)
        return None if moved is None else moved.region

    def tell(name: str, *features: str) -> None:
        for router in routers_of(mesh, name):
            mesh.report(router, can_place=True, features=features)
        mesh.settle()

    others = [each for each in ("", "us", "ap") if each != region]
    assert found() in others
    for each in others:
        tell(each)
    assert found() is None
    for each in others:
        tell(each, "penalties")
        assert found() == each
        tell(each)


@pytest.mark.parametrize("loss", ["draining", "report"])
def test_a_home_that_drains_or_cannot_place_is_left(loss: str) -> None:
    """Own routers that drain, or report that they cannot place, take nothing while another region has one that does."""
    mesh = mesh_of(entry("us"))
    for router in routers_of(mesh):
        peer = mesh.core.peers.get(router.name)
        assert peer is not None
        if loss == "draining":
            peer.is_draining = True
        else:
            mesh.report(router, can_place=False)
    mesh.settle()
    assert set(regions_of(mesh.core.regions).values()) == {"us"}


def test_spill_moves_its_share_and_a_moved_session_stays_until_it_is_idle() -> None:
    """The share is met; after its end moved sessions that go on stay, and those that were idle for IDLE_S come home."""
    mesh = mesh_of(entry("us"), entry("ap"))
    regions = mesh.core.regions
    regions.take_shares({"us": 0.2, "ap": 0.1}, 0.0)
    found = regions_of(regions)
    count = Counter(found.values())
    assert abs(count["us"] - 0.2 * len(SESSIONS)) < 110 and abs(count["ap"] - 0.1 * len(SESSIONS)) < 80
    regions.take_shares({}, 0.0)
    assert regions_of(regions, now_s=IDLE_S - 1) == found
    assert set(regions_of(regions, now_s=2 * IDLE_S).values()) == {"eu"}


def test_shares_that_no_control_plane_renews_age_like_grants() -> None:
    """A quarter after 30 s, nothing after 600 s, and all again with the next message."""
    mesh = mesh_of(entry("us"))
    regions = mesh.core.regions

    def share(now_s: float, label: str) -> float:
        found = Counter(
            regions.choose(TENANT, f"{label}{at}", "eu", now_s, is_session=False).pool for at in range(1000)
        )
        return found["us/default"] / 1000

    regions.take_shares({"us": 0.8}, 0.0)
    assert share(29.0, "a") == pytest.approx(0.8, abs=0.05)
    assert share(31.0, "b") == pytest.approx(0.2, abs=0.05)
    assert share(601.0, "c") == 0.0
    regions.take_shares({"us": 0.8}, 700.0)
    assert share(701.0, "d") == pytest.approx(0.8, abs=0.05)


def test_a_spilled_session_is_served_at_home_while_its_region_cannot_take_it() -> None:
    """A target without a router, with weight 0, with other tenants or just refused for its grant gets nothing."""
    mesh = mesh_of(entry("us"))
    regions = mesh.core.regions
    regions.take_shares({"us": 1.0}, 0.0)
    assert set(regions_of(regions).values()) == {"us"}
    regions.note_refused(changed(spec(1), pool="us/default", session_id="s1"), 0.0, is_grant=True)
    assert regions.choose(TENANT, "s2", "eu", REST_S / 2).pool == "default"
    assert regions.choose(TENANT, "s2", "eu", REST_S).pool == "us/default"
    for entries in ([entry("us", 0)], [entry("us", differ=True)], []):
        regions.take(content(*entries).regions)
        assert regions.choose(TENANT, "new", "eu", 1.0).pool == "default"
    regions.take(content(entry("us")).regions)
    stop(mesh, "us")
    assert set(regions_of(regions).values()) == {"eu"}


@pytest.mark.parametrize(("refused", "least"), [(0.01, 0.45), (0.05, 0.45), (0.5, 0.05), (1.0, 0.05)])
def test_spill_falls_with_what_its_target_refuses(refused: float, least: float) -> None:
    """Refusals stay a tenth of all requests; a few stop nothing. Sessions that moved go on where they are."""
    mesh = mesh_of(entry("us"))
    regions, rng = mesh.core.regions, random.Random(1)
    regions.take_shares({"us": 0.5}, 0.0)
    moved = next(each for each in SESSIONS if regions.choose(TENANT, each, "eu", 0.0).pool == "us/default")
    spilled = refusals = 0
    for number in range(2000):
        now_s = number / 100
        regions.take_shares({"us": 0.5}, now_s)
        chosen = regions.choose(TENANT, f"new-{number}", "eu", now_s)
        if chosen.pool == "us/default":
            spilled += 1
            if rng.random() < refused:
                refusals += 1
                regions.note_refused(
                    changed(spec(1), pool=chosen.pool, session_id=f"new-{number}"), now_s, is_grant=False
                )
        assert regions.choose(TENANT, moved, "eu", now_s).pool == "us/default"
    assert spilled >= least * 2000 and refusals <= 0.1 * 4000 + REFUSED_BURST


def test_failover_asks_a_region_that_refused_lately_last() -> None:
    """Sessions of the full region go to the idle one at once. Without another one it is asked all the same."""
    mesh = mesh_of(entry("us"), entry("ap"))
    regions = mesh.core.regions
    stop(mesh)
    found = regions_of(regions)
    assert set(found.values()) == {"us", "ap"}
    for is_grant in (False, True):
        regions.note_refused(changed(spec(1), pool="us/default", session_id="s"), 10.0, is_grant=is_grant)
        assert set(regions_of(regions, now_s=10.0).values()) == {"ap"}
    assert regions_of(regions, now_s=10.0 + LAST_S) == found
    stop(mesh, "ap")
    regions.note_refused(changed(spec(1), pool="us/default", session_id="s"), 20.0, is_grant=False)
    assert set(regions_of(regions, now_s=20.0).values()) == {"us"}


def test_sessions_keep_their_region_while_another_one_loses_its_weight() -> None:
    """The place of a region without weight stays free. Otherwise all sessions of the others would move."""
    mesh = mesh_of(entry("ap"), entry("us"))
    regions = mesh.core.regions
    regions.take_shares({"us": 0.2}, 0.0)
    before = {each: regions.choose(TENANT, each, "eu", 1.0, is_session=False).pool for each in SESSIONS}
    regions.take(content(entry("ap", 0), entry("us")).regions)
    assert before == {
        each: regions.choose(TENANT, each, "eu", 1.0, is_session=False).pool for each in SESSIONS
    }
    assert Counter(before.values())["us/default"] > 700


def test_moved_sessions_come_home_while_tenants_differ() -> None:
    """The other region's table may pin their tenant, or disable it."""
    mesh = mesh_of(entry("us"))
    regions = mesh.core.regions
    regions.take_shares({"us": 1.0}, 0.0)
    assert regions.choose(TENANT, "s", "eu", 0.0).pool == "us/default"
    regions.take(content(entry("us", differ=True)).regions)
    assert regions.choose(TENANT, "s", "eu", 1.0).pool == "default"
    regions.take(content(entry("us")).regions)
    assert regions.choose(TENANT, "s", "eu", 2.0).pool == "us/default"


def test_a_region_outside_the_configuration_gets_nothing() -> None:
    """A control process that was restarted first knows one more."""
    mesh = mesh_of(entry("us"))
    regions = mesh.core.regions
    regions.take(content(entry("sa")).regions)
    assert not regions.has_others


def test_a_request_that_is_read_again_goes_to_no_region_that_it_left() -> None:
    """It is neither spilled again nor sent where it was; without any other region it waits at home."""
    mesh = mesh_of(entry("us"), entry("ap"))
    regions = mesh.core.regions
    regions.take_shares({"us": 1.0}, 0.0)
    assert regions.choose(TENANT, "s", "eu", 0.0, without={"us"}).pool == "default"
    assert regions.choose(TENANT, "s", "us", 0.0, without={""}).pool == "us/default", "a guest goes home"
    stop(mesh)
    assert regions.choose(TENANT, "s", "eu", 0.0, without={"us"}).pool == "ap/default"
    assert regions.choose(TENANT, "s", "eu", 0.0, without={"us", "ap"}).pool == "default"


def test_a_guest_is_spilled_nowhere_and_leaves_for_its_home_alone() -> None:
    """Shares do not concern guests; without own routers only the guest's home may take it."""
    mesh = mesh_of(entry("us"), entry("ap"))
    regions = mesh.core.regions
    regions.take_shares({"us": 0.5, "ap": 0.5}, 0.0)
    assert set(regions_of(regions, home="us").values()) == {"eu"}
    stop(mesh)
    assert set(regions_of(regions, home="us").values()) == {"us"}
    stop(mesh, "us")
    assert set(regions_of(regions, home="us").values()) == {"eu"}


def test_a_pinned_tenant_never_leaves_its_regions() -> None:
    """Neither spill nor a dead home takes it elsewhere, and outside of its regions it is refused at once."""
    mesh = mesh_of(entry("us"), entry("ap"))
    regions = mesh.core.regions
    regions.take_shares({"us": 0.5, "ap": 0.5}, 0.0)
    pinned = Tenant(name="acme", regions=("ap", "eu"))
    assert set(regions_of(regions, pinned).values()) == {"eu", "ap"}
    stop(mesh)
    assert set(regions_of(regions, pinned).values()) == {"ap"}
    regions.take(content(entry("us"), entry("ap", differ=True)).regions)
    assert set(regions_of(regions, pinned).values()) == {"eu"}, "its tables may not pin the tenant"
    regions.check(pinned)
    with pytest.raises(MeshError) as refused:
        regions.check(Tenant(name="acme", regions=("us", "ap")))
    assert refused.value.reason == "REGION_UNAVAILABLE" and refused.value.retry_after_s is not None
    assert refused.value.metadata == {"regions": "us,ap"}


def test_another_region_serves_the_version_or_its_stable_one_or_nothing() -> None:
    """The version is kept where it is served. Else the stable one is taken, if its tokenizer is here and it is allowed."""
    mesh = mesh_of(entry("us", version="v2"))
    regions = mesh.core.regions
    stop(mesh)
    assert regions.choose(TENANT, "s", "eu", 0.0)[:2] == ("us/default", "v2")
    assert regions.other_version == {"us": 1} and regions.may_change_version("v1")
    assert regions.of_version("v1", TENANT, "eu", "s") is None
    old = Router("us/old-router", pool="old", model_version="v1", region="us")
    mesh.core.add_router(old, "old", "v1", "us")
    mesh.open(old)
    assert regions.choose(TENANT, "s", "eu", 0.0)[:2] == ("us/old", "v1")
    mesh.cut(old)
    regions.serves = lambda version: version == "v1"
    assert regions.choose(TENANT, "s", "eu", 0.0)[:2] == ("default", "v1")
    refusing = mesh_of(entry("us", version="v2"), may_rebind=False)
    stop(refusing)
    assert refusing.core.regions.choose(TENANT, "s", "eu", 0.0)[:2] == ("default", "v1")
    assert not refusing.core.regions.may_change_version("v1")


def test_homes_are_the_configured_regions() -> None:
    """An unknown name counts as an own caller; a mesh without regions knows no homes."""
    regions = mesh_of(entry("us")).core.regions
    assert [regions.home_of(told) for told in ("", "eu", "us", "mars")] == ["eu", "eu", "us", "eu"]
    assert regions.unknown_home_total == 1 and regions.guests == {"us": 1}
    assert HOME_METADATA == client._HOME
    alone = RegionChoice(mesh_of().core.peers, mesh_of().core.pools, RegionSettings())
    assert alone.home_of("us") == "" and alone.unknown_home_total == 0


def test_moved_sessions_are_bounded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound the session that was idle longest goes first; idle ones go in any case."""
    monkeypatch.setattr("services.frontend.requests.moved_sessions.SESSIONS_MAX", 3)
    sessions = MovedSessions()
    for position in range(4):
        sessions.note(position, "us", float(position))
    sessions.note(1, "us", 4.0)
    sessions.note(9, "ap", 5.0)
    assert [sessions.region(each, 5.0) for each in (0, 1, 2, 3, 9)] == ["", "us", "", "us", "ap"]
    sessions.expire(IDLE_S + 4.5)
    assert len(sessions) == 1 and sessions.region(9, IDLE_S + 4.5) == "ap"
    sessions.forget(9)
    sessions.forget(9)
    assert not len(sessions)
