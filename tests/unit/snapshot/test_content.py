"""The content of snapshots: what is refused, and that bytes keep everything."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from kvmesh.snapshot import content as contents
from kvmesh.snapshot import published
from kvmesh.snapshot.content import Content, Cordon, PoolTrack, RolloutState, SnapshotError, Track
from kvmesh.snapshot.published import Term
from kvmesh.snapshot.shadow import Shadow, ShadowMode

STABLE = PoolTrack("stable", "v1", Track.STABLE, 100)


SHADOW = Shadow(
    id="shadow-1",
    to_pool="next",
    baseline_pool="stable-young",
    sample_permille=50,
    mode=ShadowMode.FIRST,
    first_tokens=32,
    token_max=2_000_000,
    tokens_per_minute_max=100_000,
    expires_ms=1_800_000_000_000,
    keeps_tokens=True,
    rollout="r1",
)


def shadowed(**changes: Any) -> Content:
    """Return a content with SHADOW, changed."""
    return replace(split(0), shadows=(replace(SHADOW, **changes),))


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
        (shadowed(id=""), "shadows[0].shadow is ''; 1 to 64 printable characters is allowed"),
        (shadowed(sample_permille=0), "shadows[0].sample_permille is 0; 1 to 1000 is allowed"),
        (shadowed(sample_permille=1001), "shadows[0].sample_permille is 1001; 1 to 1000 is allowed"),
        (shadowed(first_tokens=0), "shadows[0].first_tokens is 0; 1 to 65536 is allowed"),
        (shadowed(mode=ShadowMode.FULL), "shadows[0].first_tokens is 32; 0 to 0 is allowed"),
        (shadowed(token_max=0), "shadows[0].token_max is 0"),
        (shadowed(tokens_per_minute_max=10**12 + 1), "shadows[0].tokens_per_minute_max is 1000000000001"),
        (shadowed(expires_ms=0), "shadows[0].expires_ms is 0"),
        (shadowed(to_pool="stable"), 'shadows[0] copies to "stable" and "stable-young"'),
        (shadowed(to_pool="gone"), 'shadows[0] copies to "gone"'),
        (shadowed(baseline_pool="next"), 'shadows[0] copies to "next" and "next"'),
        (
            replace(split(0), shadows=tuple(replace(SHADOW, id=f"s{n}") for n in range(9))),
            "shadows has 9 entries; up to 8 are allowed",
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
        shadows=(SHADOW,),
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


def test_all_to_stable_turns_shadows_off() -> None:
    """Copies of users' requests end with a rollback."""
    assert shadowed().all_to_stable().shadows == ()


def test_a_shadow_samples_whole_sessions_at_its_rate() -> None:
    """The requests of one session are all copied or none, independent of other shadows."""
    draw = random.Random(3)
    sessions = [f"session-{draw.random()}" for _ in range(20_000)]
    copied = [session for session in sessions if SHADOW.samples("tenant", session)]
    assert 0.04 < len(copied) / len(sessions) < 0.06
    assert [session for session in sessions if SHADOW.samples("tenant", session)] == copied
    other = replace(SHADOW, id="shadow-2")
    both = sum(other.samples("tenant", session) for session in copied)
    assert both < 0.2 * len(copied)
    assert all(replace(SHADOW, sample_permille=1000).samples("tenant", session) for session in sessions)
