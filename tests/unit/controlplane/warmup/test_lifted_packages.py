"""Counts of failed boots under random schedules, and after the lift of a quarantine."""

from __future__ import annotations

import random
from collections import defaultdict

from controlplane.warming import idle_warming
from controlplane.warmup.boots import Boots
from controlplane.warmup.packages import Package, package_name
from controlplane.warmup.references import ReferenceKey


def test_counts_follow_a_plain_reading() -> None:
    """On random schedules each boot may use what the count of failed boots in a row allows."""
    for seed in range(300):
        rng, boots = random.Random(seed), Boots()
        failed: dict[str, int] = defaultdict(int)
        ended: dict[str, set[str]] = defaultdict(set)
        for _ in range(60):
            name, package = rng.choice("abc"), rng.choice(("", "p", "q"))
            if rng.random() < 0.3:
                boots.served(name)
                failed[name] = 0
            elif rng.random() < 0.1:
                boots.lifted(package)
                ended[package].clear()
            else:
                before = len(ended[package])
                ended[package].add(name)
                is_second = bool(package) and before < 2 <= len(ended[package])
                failed[name] += 1
                assert boots.failed(name, package) is is_second, f"seed={seed}"
            for each in "abc":
                assert boots.count(each) == failed[each], f"seed={seed}"
                assert boots.may_use_package(each) is (failed[each] < 2), f"seed={seed}"
                assert boots.may_warm_up(each) is (failed[each] < 3), f"seed={seed}"


def test_a_lifted_package_is_quarantined_again() -> None:
    """The lift of a quarantine starts the count anew."""
    boots = Boots()
    assert [boots.failed(name, "p") for name in "ab"] == [False, True]
    boots.lifted("p")
    assert [boots.failed(name, "p") for name in "ab"] == [False, True]


def test_a_lift_at_the_control_plane_starts_the_count_anew() -> None:
    """The next two failed replicas quarantine the package again."""
    warming = idle_warming(lambda: 0.0)
    name = package_name("decode", ReferenceKey("v1", ""))
    warming.packages.adopt(Package(name=name, model_version="v1", role="decode"))
    for _ in range(2):
        assert [warming.lives.boots.failed(each, name) for each in "ab"] == [False, True]
        warming.quarantine(name, "it ended boots")
        lifted = warming.lift(name)
        assert lifted is not None and not lifted.quarantined
