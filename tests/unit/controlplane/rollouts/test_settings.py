"""Settings of a rollout: defaults, and errors with field, value and range."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from controlplane.rollouts import settings
from controlplane.rollouts.settings import RolloutSettings, SettingsError
from kvmesh.control.v1 import control_pb2 as pb
from tests.unit.controlplane.rollouts.facts import POOLS


def parse(**fields: Any) -> RolloutSettings:
    """Return the settings of a message with `fields`."""
    message = pb.RolloutSettings(**{"to_pool": "next", **fields})
    return settings.parse(message, versions=POOLS, stable_pool="stable", golden_versions=frozenset())


def test_defaults() -> None:
    """A message that names only the pool gives the settings of production."""
    assert parse() == RolloutSettings(to_pool="next")
    defaults = parse()
    assert (defaults.steps_percent, defaults.bake_s, defaults.bake_max_s) == (
        (1, 5, 25, 50, 100),
        120.0,
        1800.0,
    )
    assert defaults.keep_old_s == 3600.0


def test_settings_return_as_they_were() -> None:
    """Through a message and back, with every field set."""
    given = parse(
        baseline_pool="young",
        steps_percent=[10, 50, 100],
        bake=Duration(seconds=10, nanos=500_000_000),
        bake_max=Duration(seconds=300),
        on_inconclusive=pb.ON_INCONCLUSIVE_PAUSE,
        only_tenants=["a", "b"],
        never_tenants=["c"],
        requirements=["evals"],
        keep_old=Duration(seconds=10),
        ttft_p95_max_s=1.5,
        error_share_max=0.02,
    )
    again = settings.parse(settings.to_message(given), versions=POOLS, stable_pool="stable")
    assert again == given and given.bake_s == 10.5


def test_a_longer_bake_lifts_the_default_longest_time() -> None:
    """A step needs more time than its bake time. With equal times it would always end without a decision."""
    assert parse(bake=Duration(seconds=7200)).bake_max_s == 14400.0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"to_pool": "nxt"}, 'to_pool is "nxt"; the known pools are: next, other, stable, young'),
    ({"to_pool": ""}, 'to_pool is ""; the known pools are'),
    ({"to_pool": "stable"}, 'to_pool is "stable"; a pool other than the stable pool'),
    ({"baseline_pool": "old"}, 'baseline_pool is "old"; the known pools are'),
    ({"baseline_pool": "next"}, "a pool other than to_pool"),
    ({"baseline_pool": "stable"}, "a pool other than the stable pool"),
    ({"baseline_pool": "other"}, 'a pool of the stable version "v1" is needed'),
    ({"steps_percent": [5, 1, 100]}, "steps_percent is 5,1,100; each step must be above"),
    ({"steps_percent": [5, 5, 100]}, "each step must be above"),
    ({"steps_percent": [5, 50]}, "steps_percent is 5,50; the last step must be 100"),
    ({"steps_percent": [0, 100]}, "1 to 100 is allowed"),
    ({"steps_percent": [5, 101]}, "1 to 100 is allowed"),
    ({"steps_percent": [*range(1, 17), 100]}, "steps_percent is 17 steps; 1 to 16"),
    ({"bake": Duration(seconds=9)}, "bake is 9 s; 10 to 86400 s"),
    ({"bake": Duration(seconds=-10)}, "bake is -10 s"),
    ({"bake": Duration(seconds=86_401), "bake_max": Duration(seconds=90_000)}, "bake is 86401 s"),
    (
        {"bake": Duration(seconds=60), "bake_max": Duration(seconds=30)},
        "bake_max is 30 s; at least bake and 10 s (70 s) is needed",
    ),
    (
        {"bake": Duration(seconds=600), "bake_max": Duration(seconds=600)},
        "bake_max is 600 s; at least bake and 10 s (610 s) is needed",
    ),
    ({"keep_old": Duration()}, "keep_old is 0 s; 10 to"),
    ({"requirements": ["Evals"]}, 'requirements is "Evals"'),
    ({"requirements": ["evals", "evals"]}, "each name may occur once"),
    ({"requirements": [f"r{at}" for at in range(17)]}, "17 names; up to 16"),
    ({"only_tenants": ["a b"]}, 'only_tenants is "a b"'),
    ({"never_tenants": [""]}, 'never_tenants is ""'),
    ({"only_tenants": ["a"], "never_tenants": ["a"]}, "only_tenants as well"),
    ({"only_tenants": [f"t{at}" for at in range(1025)]}, "1025 tenants; up to 1024"),
    ({"expectation": 9}, 'expectation is 9; "exact" or "different"'),
    ({"on_inconclusive": 9}, "on_inconclusive is 9"),
    ({"expectation": pb.EXPECTATION_DIFFERENT}, 'needs a golden set of the version "v2"'),
    ({"ttft_p95_max_s": float("nan")}, "ttft_p95_max_s is nan"),
    ({"error_share_max": 1.5}, "error_share_max is 1.5; 0 (none) to 1"),
]


@pytest.mark.parametrize(("fields", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_a_refusal_names_field_value_and_range(fields: dict[str, Any], text: str) -> None:
    """Each range has its sentence."""
    with pytest.raises(SettingsError) as refused:
        parse(**fields)
    assert text in str(refused.value)


def test_a_known_golden_set_allows_other_tokens() -> None:
    """Without knowledge about sets the question is left to the preparation."""
    message = pb.RolloutSettings(to_pool="next", expectation=pb.EXPECTATION_DIFFERENT)
    for known in (frozenset({"v2"}), None):
        found = settings.parse(message, versions=POOLS, stable_pool="stable", golden_versions=known)
        assert found.expectation is settings.Expectation.DIFFERENT
