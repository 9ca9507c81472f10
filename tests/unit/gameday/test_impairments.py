"""The table of impairments, against a dumb twin under random changes."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from tests.integration.containers.impairments import HEALTHY, Impairment, Impairments

SITES = ("eu", "us", "ap")
PATHS = list(permutations(SITES, 2))


def test_each_change_is_that_of_a_dumb_twin() -> None:
    """Random changes leave on each path what a table of three values a path says, and leave earlier tables as they were."""
    for seed in range(300):
        rng = random.Random(seed)
        table = Impairments(SITES)
        delay_s, loss, cut = dict.fromkeys(PATHS, 0.0), dict.fromkeys(PATHS, 0.0), dict.fromkeys(PATHS, False)
        for _ in range(30):
            before, seen = table, {path: table.on(*path) for path in PATHS}
            a, b = rng.sample(SITES, 2)
            is_directed = rng.random() < 0.5
            both = [(a, b)] if is_directed else [(a, b), (b, a)]
            match rng.choice(("slow", "cut", "isolate", "heal", "heal all")):
                case "slow":
                    given = rng.choice((0.0, 0.04)), rng.choice((0.0, 0.01))
                    table = table.slow(a, b, *given, is_directed=is_directed)
                    for path in both:
                        delay_s[path], loss[path] = given
                case "cut":
                    table = table.cut(a, b, is_directed=is_directed)
                    cut |= dict.fromkeys(both, True)
                case "isolate":
                    table = table.isolate(a)
                    cut |= {path: True for path in PATHS if a in path}
                case "heal":
                    table = table.heal(a, b)
                    for path in ((a, b), (b, a)):
                        delay_s[path], loss[path], cut[path] = 0.0, 0.0, False
                case _:
                    table = table.heal()
                    delay_s, loss = dict.fromkeys(PATHS, 0.0), dict.fromkeys(PATHS, 0.0)
                    cut = dict.fromkeys(PATHS, False)
            for path in PATHS:
                wanted = Impairment(delay_s[path], loss[path], cut[path])
                assert table.on(*path) == wanted, f"seed {seed}, {path}"
                assert before.on(*path) == seen[path], f"seed {seed}, {path}"


def test_paths_are_all_ordered_pairs() -> None:
    """Three sites have six paths, healthy at first."""
    table = Impairments(SITES)
    assert sorted(table.paths()) == sorted(PATHS)
    assert {table.on(*path) for path in PATHS} == {HEALTHY}


def test_errors_name_value_and_range() -> None:
    """An unknown site, a path to itself and values out of range are refused with what is allowed."""
    table = Impairments(SITES)
    with pytest.raises(ValueError, match='site "sa" is unknown: the link has eu, us, ap'):
        table.isolate("sa")
    with pytest.raises(ValueError, match='no path leads from site "eu" to itself'):
        table.cut("eu", "eu")
    with pytest.raises(ValueError, match=r"delay_s = 6: allowed are 0 to 5 s"):
        table.slow("eu", "us", 6.0)
    with pytest.raises(ValueError, match=r"loss = 1.5: allowed are 0 to 1"):
        table.slow("eu", "us", 0.0, 1.5)
