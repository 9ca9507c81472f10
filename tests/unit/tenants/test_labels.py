"""Label values of tenants in metrics."""

from __future__ import annotations

import random

from kvmesh.tenants.labels import NAMES_MAX, Labels


def test_the_cardinality_of_tenant_labels_is_bounded() -> None:
    """All frontends use the same labels, in any order of calls."""
    names = [f"t{number}" for number in range(1000)]
    labels = Labels(names)
    asked = random.Random(3).choices([*names, "", "nobody"], k=5000)
    assert len({labels.of(name) for name in asked}) <= NAMES_MAX + 2
    assert [labels.of(name) for name in names[:NAMES_MAX]] == names[:NAMES_MAX]
    assert labels.of(names[NAMES_MAX]) == labels.of("nobody") == "other"
    assert labels.of("") == "anonymous"
