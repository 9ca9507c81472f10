"""Regions in a snapshot: what a sender wrote arrives, and a receiver refuses what breaks a bound."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvmesh.control.v1 import snapshot_pb2 as pb
from kvmesh.snapshot.content import Content, PoolTrack, SnapshotError, Track, check, decode, encode
from kvmesh.snapshot.regions import (
    DeclaredState,
    ObservedState,
    RegionEntry,
    RegionProcess,
    of_message,
    to_message,
)

ROUTER = RegionProcess(
    "router-0", "10.0.0.1:7000", "b0", "default", "m", 32, is_draining=True, capabilities=("pools",)
)


def content(*regions: RegionEntry) -> Content:
    return Content((PoolTrack("default", "m", Track.STABLE, 100),), regions=regions)


def test_only_a_drain_to_weight_0_beside_another_region_counts() -> None:
    """Without regions, with a weight, without a declaration, or as the last region with load, callers have to stay."""
    own, other = RegionEntry("eu", DeclaredState.DRAINING, weight_percent=0), RegionEntry("us")
    assert content(own, other).is_region_drained("eu")
    assert not content().is_region_drained("eu")
    assert not content(own, other).is_region_drained("us")
    for less in (replace(own, weight_percent=1), replace(own, declared=DeclaredState.SERVING)):
        assert not content(less, other).is_region_drained("eu")
    assert not content(own, replace(other, weight_percent=0)).is_region_drained("eu")


def test_regions_survive_the_wire() -> None:
    """Random entries are the same behind a round trip, and `region` finds each by its name."""
    chance = random.Random(15)
    for _ in range(200):
        entries = tuple(
            RegionEntry(
                f"r{at}",
                chance.choice(list(DeclaredState)),
                chance.choice(list(ObservedState)),
                chance.randint(0, 100),
                chance.randint(0, 1000),
                tuple(replace(ROUTER, process_id=f"router-{n}") for n in range(chance.randint(0, 3))),
                tuple(RegionProcess(f"frontend-{n}", "10.0.0.2:1", "b") for n in range(chance.randint(0, 3))),
                chance.choice(("", "m")),
                chance.choice(("", "default")),
                tenants_differ=chance.random() < 0.5,
            )
            for at in range(chance.randint(0, 4))
        )
        found = decode(encode(content(*entries)))
        assert found.regions == entries
        assert all(
            found.region(entry.name) is entry_found
            for entry, entry_found in zip(entries, found.regions, strict=True)
        )
    assert content().region("eu") is None


def test_states_of_a_later_release_count_as_none() -> None:
    """A receiver of this release must not refuse the snapshot of a newer control plane."""
    message = to_message(RegionEntry("eu"))
    message.declared, message.observed = 99, 99  # type: ignore[assignment]  # a later release has more states
    found = of_message(pb.RegionEntry.FromString(message.SerializeToString()))
    assert (found.declared, found.observed) == (DeclaredState.SERVING, ObservedState.UNKNOWN)


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        (
            [RegionEntry("eu"), RegionEntry("eu")],
            'the region "eu" is named twice; each region once is allowed',
        ),
        ([RegionEntry("")], "regions[0].name has 0 bytes; 1 to 256 are allowed"),
        ([RegionEntry("eu", weight_percent=101)], "regions[0].weight_percent is 101; 0 to 100 is allowed"),
        (
            [RegionEntry("eu", limit_share_permille=1001)],
            "limit_share_permille is 1001; 0 to 1000 is allowed",
        ),
        ([RegionEntry(f"r{at}") for at in range(11)], "regions has 11 entries; up to 10 are allowed"),
        (
            [RegionEntry("eu", routers=(ROUTER, ROUTER))],
            'the process "router-0" is named twice; once is allowed',
        ),
        (
            [RegionEntry("eu", frontends=(replace(ROUTER, address=""),))],
            "frontends[0] has an empty or a long text",
        ),
        (
            [RegionEntry("eu", routers=tuple(replace(ROUTER, process_id=f"r{at}") for at in range(257)))],
            "regions[0].routers has 257 entries; up to 256 are allowed",
        ),
    ],
)
def test_a_broken_bound_is_refused_with_field_value_and_range(entries: list[RegionEntry], fault: str) -> None:
    """No receiver holds unbounded data."""
    with pytest.raises(SnapshotError) as caught:
        check(content(*entries))
    assert fault in str(caught.value)
