"""Packages from Redis are input that may be anything: each is used as it was written, or refused with a reason."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from controlplane.warmup.packages import (
    HASHES_MAX,
    PACKAGE_BYTES_MAX,
    PACKAGES_MAX,
    PREFIX_TOKENS_MAX,
    PREFIXES_MAX,
    STALE_S,
    TEXT_CHARACTERS_MAX,
    Package,
    PackageError,
    Packages,
    decode,
    encode,
    package_name,
)
from controlplane.warmup.references import ReferenceKey

KEY = ReferenceKey("v1", "build")
NAME = package_name("prefill", KEY)
NOW_S = 1_700_000_000.0
GOOD: dict[str, Any] = {
    "name": NAME,
    "revision": 3,
    "model_version": "v1",
    "role": "prefill",
    "engine_digest": "build",
    "made_s": NOW_S,
    "shapes": [{"prompt_tokens": 16}],
    "prefixes": [[70_001, 70_002]],
    "golden": [[80_001, 80_002]],
}
"""A package as Redis has it."""


def _data(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode()


def _deep() -> bytes:
    return _data()[:-1] + b', "later": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


HOSTILE = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "no JSON": b"\xff\xfe\x00",
    "cut": _data()[:-5],
    "deep": _deep(),
    "escape": _data(made_from="\x1b[2J"),
    "long text": _data(made_from="x" * (TEXT_CHARACTERS_MAX + 1)),
    "name to the terminal": _data(name="\x1b[31m"),
    "huge": b" " * (PACKAGE_BYTES_MAX + 1),
    "no name": b"{}",
    "another name": _data(name="x"),
    "another role": _data(role="decode"),
    "another version": _data(model_version="v2"),
    "another build": _data(engine_digest=""),
    "another form": _data(form=2),
    "a frontend": _data(role="frontend", name=package_name("frontend", KEY)),
    "half a surrogate": _data(model_version="\ud800"),
    "a negative id": _data(prefixes=[[-1]]),
    "a large id": _data(prefixes=[[2**31]]),
    "a huge id": _data(prefixes=[[10**40]]),
    "no number": _data(prefixes=[["1"]]),
    "many prefixes": _data(prefixes=[[1]] * (PREFIXES_MAX + 1)),
    "many tokens": _data(prefixes=[[1] * (PREFIX_TOKENS_MAX + 1)]),
    "a shape of nothing": _data(shapes=[{"prompt_tokens": 0}]),
    "a negative batch": _data(shapes=[{"prompt_tokens": 1, "batch": -1}]),
    "a huge shape": _data(shapes=[{"prompt_tokens": 10**40}]),
    "an unknown shape": _data(shapes=[{"prompt_tokens": 1, "width": 2}]),
    "revision 0": _data(revision=0),
    "a huge revision": _data(revision=10**40),
    "made before 1970": _data(made_s=-1),
    "made after 9999": _data(made_s=1e18),
    "many hashes": _data(hashes=[1] * (HASHES_MAX + 1)),
    "a huge hash": _data(hashes=[2**64]),
    "a negative golden token": _data(golden=[[-1]]),
    "a huge golden token": _data(golden=[[10**40]]),
    "a golden prompt without tokens": _data(golden=[[1], []]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_packages_stay_out(case: str) -> None:
    """Each has a reason that shows no token, and neither replaces nor hides a good one."""
    packages = Packages(lambda: NOW_S)
    packages.learn({NAME: _data()})
    packages.learn({NAME: HOSTILE[case], "other": HOSTILE[case]})
    found = packages.usable("prefill", KEY)
    assert found is not None and found.revision == 3
    assert set(packages.problems) == {NAME, "other"}
    assert all(reason and len(reason) < 400 and "70" not in reason for reason in packages.problems.values())
    assert [each.name for each in packages.unwritten({NAME: HOSTILE[case]})] == [NAME]


def test_random_bytes_raise_package_errors_only() -> None:
    """Any damage to a good package is refused by its own error, or gives a package that can be written."""
    data = _data()
    for seed in range(3000):
        rng, damaged = random.Random(seed), bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.randrange(3)] = rng.choice(
                (b"", b"9", b"-", b'"', b"[", b"}", rng.randbytes(2))
            )
        try:
            found = decode(NAME, bytes(damaged))
        except PackageError:
            continue
        assert decode(NAME, encode(found)) == found, f"seed={seed}"
        found.token_prefixes()
        found.shape_list()


def test_a_package_shows_no_tokens() -> None:
    """Logs print packages by `repr`."""
    shown = f"{decode(NAME, _data())!r} {[decode(NAME, _data())]} {decode(NAME, _data())}"
    assert "70001" not in shown and "80001" not in shown and NAME in shown


def test_stale_and_quarantined_packages_are_not_used() -> None:
    """Age counts in both directions: a clock may have been wrong."""
    now_s = NOW_S
    packages = Packages(lambda: now_s)
    packages.learn({NAME: _data()})
    for age_s, is_used in (
        (0, True),
        (STALE_S, True),
        (STALE_S + 1, False),
        (-STALE_S, True),
        (-STALE_S - 1, False),
    ):
        now_s = NOW_S + age_s
        assert (packages.usable("prefill", KEY) is not None) is is_used, age_s
    now_s = NOW_S
    assert packages.usable("decode", KEY) is None
    made = packages.quarantine(NAME, "it crashes")
    assert made is not None and made.revision == 4 and packages.usable("prefill", KEY) is None
    packages.learn({NAME: _data()})
    assert packages.usable("prefill", KEY) is None, "an earlier revision lifts no quarantine"
    assert list(packages.unwritten({NAME: _data()})) == [made]
    assert list(packages.unwritten({NAME: encode(made)})) == []
    packages.learn({NAME: _data(revision=5)})
    assert packages.usable("prefill", KEY) is not None
    assert packages.quarantine("unknown", "x") is None


def test_packages_of_the_far_future_push_none_out() -> None:
    """Packages that no replica may use are dropped first, however late they say that they were made."""
    packages = Packages(lambda: NOW_S)
    packages.learn({NAME: _data()})
    stored = {}
    for number in range(2 * PACKAGES_MAX):
        key = ReferenceKey(f"x{number}", "")
        made = Package(
            name=package_name("prefill", key), model_version=key.model_version, role="prefill", made_s=9e10
        )
        stored[made.name] = encode(made)
    packages.learn(stored)
    assert packages.usable("prefill", KEY) is not None and len(packages.ordered()) <= PACKAGES_MAX


def test_a_reason_of_any_text_can_be_read_again() -> None:
    """An operator's reason must not make the package unreadable."""
    packages = Packages(lambda: NOW_S)
    packages.learn({NAME: _data()})
    made = packages.quarantine(NAME, "line\n\x1b[2J" + "x" * 1000)
    assert made is not None and decode(NAME, encode(made)) == made
    assert made.quarantined.isprintable() and made.quarantined.startswith("line??[2J")


def test_a_quarantine_of_an_earlier_release_holds() -> None:
    """It stored the reason as it was given."""
    packages = Packages(lambda: NOW_S)
    packages.learn({NAME: _data(quarantined="crashed\nboots of two")})
    found = packages.named(NAME)
    assert found is not None and found.quarantined == "crashed?boots of two"
    assert packages.usable("prefill", KEY) is None and packages.problems == {}


def test_the_highest_revision_counts_in_any_order() -> None:
    """Processes that read and adopt in different orders end with one package."""
    rows = {revision: msgspec.json.encode(GOOD | {"revision": revision}) for revision in range(1, 6)}
    for seed in range(100):
        order = random.Random(seed).sample(list(rows), len(rows))
        packages = Packages(lambda: NOW_S)
        for revision in order:
            packages.learn({NAME: rows[revision]})
        found = packages.named(NAME)
        assert found is not None and found.revision == 5, seed
