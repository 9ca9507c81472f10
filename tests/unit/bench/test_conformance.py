"""The page of conformance: every engine and every result is on it."""

from __future__ import annotations

import importlib.util

from bench.conformance import Judged, lines
from bench.conformance_engines import ENGINES, CheckedEngine

RECORD = {
    "checks": [
        {"capability": "cancel", "check": "frees", "result": "pass", "why": "0.1 s"},
        {"capability": "seed", "check": "repeats", "result": "not offered", "why": "a|b; fallback: c"},
    ]
}


def test_the_page_has_each_engine_and_each_reason() -> None:
    """An engine that cannot be started here is on it, too, with the reason."""
    missing = CheckedEngine("gpu", "On a GPU.", "engines.gpu", needs="no_such_package")
    page = "\n".join(lines([Judged(ENGINES[0], RECORD), Judged(missing, None, missing.obstacle())]))
    assert (
        "| hashed | The reference engine with hashed arithmetic, which tests of the mesh use. | 1 | 0 | 1 | 0 |"
        in page
    )
    assert "On a GPU. Not run here: the package no_such_package is not installed. | - | - | - | - |" in page
    assert "| cancel | frees | pass |" in page and "| seed | repeats | - |" in page
    assert "| hashed | seed | repeats | not offered | a\\|b | c |" in page


def test_the_modules_of_engines_exist() -> None:
    """Each has a name of its own, and can be started unless a package is missing."""
    assert len({engine.name for engine in ENGINES}) == len(ENGINES)
    for engine in ENGINES:
        assert engine.obstacle() or importlib.util.find_spec(engine.module) is not None
