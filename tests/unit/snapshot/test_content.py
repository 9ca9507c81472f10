"""The content of snapshots: what is refused, and that bytes keep everything."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from kvmesh.snapshot import content as contents
from kvmesh.snapshot import published
from kvmesh.snapshot.content import Content, Cordon, PoolTrack, RolloutState, SnapshotError, Track
from kvmesh.snapshot.published import Term

STABLE = PoolTrack("stable", "v1", Track.STABLE, 100)


def split(canary: int, baseline: int = 0, rollout: str = "r1") -> Content:
    """Return a content with a canary and a baseline of these weights."""
    return Content(
        (
            PoolTrack("stable", "v1", Track.STABLE, 100 - canary - baseline),
            PoolTrack("next", "v2", Track.CANARY, canary),
            PoolTrack("stable-young", "v1", Track.BASELINE, baseline),
        ),
        rollout=rollout,
        rollout_state=RolloutState.BAKING,
        step=1,
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (Content(()), "the sum of pools.weight_percent is 0; 100 is needed"),
        (
            Content((replace(STABLE, weight_percent=99),)),
            "the sum of pools.weight_percent is 99; 100 is needed",
        ),
        (Content((STABLE, replace(STABLE, weight_percent=0))), 'the pool "stable" is named twice'),
        (
            Content((STABLE, PoolTrack("b", "v1", Track.STABLE))),
            "2 pools have the track stable; 1 is allowed",
        ),
        (Content((replace(STABLE, track=Track.CANARY),), rollout="r"), "0 pools have the track stable"),
        (Content((replace(STABLE, model_version=""),)), 'pools["stable"].model_version is empty'),
        (Content((replace(STABLE, weight_percent=101),)), "is 101; 0 to 100 is allowed"),
        (Content((replace(STABLE, is_closed=True),)), "must have 0"),
        (Content((replace(STABLE, pool=""),)), "pools[0].pool has 0 bytes; 1 to 256 are allowed"),
        (replace(split(5), rollout=""), "rollout is empty, and the canary's weight is 5 percent"),
        (replace(split(5), ended_rollouts=("r1",)), 'rollout "r1" was taken back'),
        (replace(split(0, 5), ended_rollouts=("r1",)), 'rollout "r1" was taken back'),
        (
            Content((STABLE,), cordons=tuple(Cordon(f"p{n}") for n in range(4097))),
            "cordons has 4097 entries; up to 4096 are allowed",
        ),
    ],
)
def test_an_invalid_content_is_refused_with_field_value_and_range(content: Content, words: str) -> None:
    """Each rule of a content has its own sentence, and nothing refused is published."""
    with pytest.raises(SnapshotError, match=re.escape(words)):
        contents.check(content)
    with pytest.raises(SnapshotError, match=re.escape(words)):
        published.publish(Term(1, "control-0"), 1, content)


def test_bytes_keep_every_field() -> None:
    """A snapshot that was written and read is equal, and so is its name."""
    content = replace(
        split(10, 10),
        only_tenants=frozenset({"a", "b"}),
        never_tenants=frozenset({"c"}),
        cordons=(Cordon("decode-0", "boot", is_draining=True, reason="disk"),),
        ended_rollouts=("r0",),
        published_ms=123,
    )
    made = published.publish(Term(7, "control-1"), 3, content)
    assert published.read(made.data) == made


def test_damaged_bytes_never_pass() -> None:
    """Whatever byte is damaged, the snapshot is refused or its content is untouched."""
    made = published.publish(Term(7, "control-1"), 3, split(10, 10))
    rng = random.Random(5)
    for _ in range(2000):
        data = bytearray(made.data)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            found = published.read(bytes(data))
        except SnapshotError:
            continue
        assert found.content == made.content


def test_a_drain_precedes_a_cordon_and_names_one_boot() -> None:
    """A process that restarted is free of the drain of its earlier boot."""
    content = Content((STABLE,), cordons=(Cordon("decode-0"), Cordon("decode-0", "old", is_draining=True)))
    assert content.cordon_of("decode-0", "old") == content.cordons[1]
    assert content.cordon_of("decode-0", "new") == content.cordons[0]
    assert content.cordon_of("decode-1", "old") is None


def test_moved_points_count_each_session_once() -> None:
    """Moving 10 points from stable to two pools moves 10 points."""
    assert split(5, 5).moved_percent(Content((STABLE,))) == 10
    assert Content((STABLE,)).moved_percent(split(5, 5)) == 10
    assert split(5, 5).moved_percent(split(5, 5)) == 0
