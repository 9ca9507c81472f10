"""Capacity before a step: by measured prefill work, with moved prompts whole."""

from __future__ import annotations

import pytest

from controlplane.rollouts.capacity import prefill_load, shortages_at
from controlplane.rollouts.settings import RolloutSettings
from controlplane.rollouts.view import PoolFacts, View

SETTINGS = RolloutSettings(to_pool="next", baseline_pool="young")


def lacking(
    weight: int, target: int, stable: tuple[float | None, float | None], canary: tuple[float, int]
) -> dict[str, int] | None:
    """Return missing replicas by pool. `stable`: warm and uncached work; `canary`: its work and its replicas."""
    pools = {
        "stable": PoolFacts(1, 8, 8, prefill_load=stable[0], uncached_prefill=stable[1]),
        "next": PoolFacts(1, canary[1], 1, prefill_load=canary[0], uncached_prefill=canary[0]),
        "young": PoolFacts(1, 1, 1, prefill_load=0.0, uncached_prefill=0.0),
    }
    found = shortages_at(SETTINGS, "stable", weight, target, View(pools=pools))
    return None if found is None else {each.pool: each.lacking for each in found}


@pytest.mark.parametrize(
    ("weight", "target", "stable", "canary", "expected"),
    [
        (0, 10, (2.0, 6.0), (0.0, 1), {}),  # 0.2 warm and 0.3 cold
        (0, 100, (2.0, 6.0), (0.0, 1), {"next": 2}),  # 2.0 and 0.3: three replicas
        (0, 10, (2.0, 6.0), (0.0, 0), {"next": 1}),
        (0, 25, (2.0, 20.0), (0.0, 1), {"next": 1, "young": 1}),  # 0.5 and 1.0
        (50, 100, (0.5, 1.0), (0.5, 1), {"next": 1}),  # 1.0 of both pools, and 0.075
        (10, 50, (0.9, 0.9), (0.5, 1), {"next": 2}),  # the canary's own prefill is five times slower
        (4, 50, (0.1, 0.1), (0.5, 1), {}),  # too little to scale
        (0, 10, (0.0, 0.0), (0.0, 1), {}),  # an idle mesh
        (0, 10, (None, 6.0), (0.0, 1), None),
        (0, 10, (2.0, None), (0.0, 1), None),
    ],
)
def test_missing_replicas(
    weight: int,
    target: int,
    stable: tuple[float | None, float | None],
    canary: tuple[float, int],
    expected: dict[str, int] | None,
) -> None:
    """Warm work at the step's weight, and one rise of at most five points whose prompts are cold."""
    assert lacking(weight, target, stable, canary) == expected


def test_a_shortage_says_how_many_replicas_are_missing() -> None:
    """With the figures that decided."""
    pools = {"stable": PoolFacts(1, 8, 8, prefill_load=2.0, uncached_prefill=6.0), "next": PoolFacts(1, 1, 1)}
    found = shortages_at(RolloutSettings(to_pool="next"), "stable", 50, 100, View(pools=pools))
    assert found is not None
    assert str(found[0]) == (
        'the pool "next" lacks 2 prefill replicas: the step needs 2.30 s of prefill per second, and 1 may take 0.90'
    )


def test_an_unknown_stable_pool_is_unknown_load() -> None:
    """Missing data lets nothing go forward."""
    assert shortages_at(SETTINGS, "stable", 0, 10, View()) is None


@pytest.mark.parametrize(
    ("share", "uncached", "load"), [(0.0, 0.0, 0.0), (0.0, 1.0, None), (0.5, 1.0, 1.0), (-1.0, 0.0, 0.0)]
)
def test_a_share_of_zero_is_unknown_while_work_arrives(
    share: float, uncached: float, load: float | None
) -> None:
    """As the report says: 0 is unknown. An idle pool has no work."""
    assert prefill_load(share, uncached, 2) == load
