"""Parts of a control process that belong to regions, from the configuration."""

from __future__ import annotations

import pytest

from controlplane.region_parts import is_seeded
from tests.integration.regions import two_regions


@pytest.mark.parametrize(
    ("warm_up", "expected"),
    [({}, True), ({"seeding": "replay"}, True), ({"seeding": "none"}, False), ({"mode": "shapes"}, False)],
)
def test_regions_seed_each_other_where_replicas_are_seeded(warm_up: dict[str, str], expected: bool) -> None:
    """One setting turns both off: an operator who wants no prompts to be kept gets that."""
    assert is_seeded(two_regions("eu", warm_up=warm_up)) == expected
