"""Tenants in metrics."""

from __future__ import annotations

import random

from kvmesh.tenants.labels import NAMES_MAX, Labels


def test_however_many_tenants_there_are_metrics_know_few() -> None:
    """The same ones at every frontend, whoever called first."""
    names = [f"t{number}" for number in range(1000)]
    labels = Labels(names)
    asked = random.Random(3).choices([*names, "", "nobody"], k=5000)
    assert len({labels.of(name) for name in asked}) <= NAMES_MAX + 2
    assert [labels.of(name) for name in names[:NAMES_MAX]] == names[:NAMES_MAX]
    assert labels.of(names[NAMES_MAX]) == labels.of("nobody") == "other"
    assert labels.of("") == "anonymous"
