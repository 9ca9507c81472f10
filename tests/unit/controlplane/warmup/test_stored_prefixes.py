"""Registered prefixes from Redis are input that may be anything: one that cannot be used stays out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.warmup.prefixes import PREFIX_TOKENS_MAX, Prefixes

GOOD: dict[str, Any] = {"name": "system", "revision": 2, "model_version": "v1", "token_ids": [1, 2, 3, 4]}


def _data(**changes: Any) -> bytes:
    """Return a later revision with changes."""
    return json.dumps(GOOD | {"revision": 3} | changes).encode()


HOSTILE = {
    "empty": b"",
    "no JSON": b"\xff",
    "deep": _data()[:-1] + b', "later": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "another name": _data(name="x"),
    "revision 0": _data(revision=0),
    "a negative id": _data(token_ids=[-1]),
    "a large id": _data(token_ids=[2**31]),
    "a huge id": _data(token_ids=[10**40]),
    "many tokens": _data(token_ids=[1] * (PREFIX_TOKENS_MAX + 1)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_prefixes_stay_out(case: str) -> None:
    """A good one of the same name stays, and what is left fits a package."""
    prefixes = Prefixes()
    prefixes.learn({"system": json.dumps(GOOD).encode()})
    prefixes.learn({"system": HOSTILE[case], "other": HOSTILE[case]})
    assert prefixes.of_version("v1") == ((1, 2, 3, 4),)
