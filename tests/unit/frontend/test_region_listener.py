"""Listener of a frontend whose region is drained: closed after DRAIN_S, opened at once, never without another region."""

from __future__ import annotations

from dataclasses import replace

from kvmesh.snapshot.content import Content, PoolTrack, Track
from kvmesh.snapshot.regions import RegionEntry
from services.frontend.region_listener import DRAIN_S, RegionListener, is_drained


def test_a_drain_closes_after_its_time_and_a_restore_opens_at_once() -> None:
    """A weight in between starts the time anew."""
    listener = RegionListener()
    assert listener.is_wanted(0.0, is_drained=False)
    assert listener.is_wanted(1.0, is_drained=True)
    assert listener.is_wanted(1.0 + 0.9 * DRAIN_S, is_drained=True)
    assert listener.is_wanted(2.0 + DRAIN_S, is_drained=False)
    assert listener.is_wanted(3.0 + DRAIN_S, is_drained=True)
    assert not listener.is_wanted(3.0 + 2 * DRAIN_S, is_drained=True)
    assert listener.is_wanted(4.0 + 2 * DRAIN_S, is_drained=False)


def test_only_weight_0_beside_another_region_is_a_drain() -> None:
    """Without regions, with a weight, or as the last region with load, the listener stays open."""
    own, other = RegionEntry("eu", weight_percent=0), RegionEntry("us")
    content = Content((PoolTrack("default", "v1", Track.STABLE, 100),))
    assert not is_drained(content, "eu")
    assert is_drained(replace(content, regions=(own, other)), "eu")
    assert not is_drained(replace(content, regions=(replace(own, weight_percent=1), other)), "eu")
    assert not is_drained(replace(content, regions=(own, replace(other, weight_percent=0))), "eu")
