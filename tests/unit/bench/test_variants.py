"""Variants of a mesh and the table that compares them."""

from __future__ import annotations

import random

from bench import comparison, text_client
from bench.results import Results
from bench.variants import VARIANTS, Variant, interleaved
from kvmesh import config


def test_every_variant_is_a_valid_configuration() -> None:
    """Variants differ in known keys, and each is a mesh that starts."""
    assert len({repr(config.build(variant.over({"engine": {"salt": "a"}}))) for variant in VARIANTS}) == 2


def test_a_variant_keeps_the_other_keys() -> None:
    """Sections are joined key by key; the variant wins, and its base is not changed."""
    base = {"engine": {"salt": "a", "arithmetic": "hashed"}}
    made = Variant("x", {"engine": {"salt": "b"}, "mesh": {"hops": "grpcio"}}).over(base)
    assert made == {"engine": {"salt": "b", "arithmetic": "hashed"}, "mesh": {"hops": "grpcio"}}
    assert base["engine"]["salt"] == "a"


def test_rounds_turn_around() -> None:
    """A drift of the machine burdens all alike."""
    assert "".join(interleaved("AB", 3)) == "ABBAAB"


def test_the_table_has_a_column_per_variant() -> None:
    """A row has both medians and their ratio; a case of no variant is not in the table."""
    results = Results()
    for label, values in (("old", (10.0, 30.0, 20.0)), ("new", (5.0, 5.0, 5.0))):
        for value in values:
            results.add("cost", f"64 streams, 20 ms, {label}", "CPU", "us", value)
    results.add("cost", "idle", "CPU", "us", 1.0)
    results.add("cost", "b, new", "CPU", "us", 1.0)
    lines = comparison.lines(results.of("cost"))
    assert lines[2:] == [
        "| 64 streams, 20 ms | CPU | us | 20.0 [10.0..30.0] | 5.00 | 0.25 |",
        "| b | CPU | us | - | 1.00 | - |",
    ]


def test_a_request_has_the_words_asked_for() -> None:
    """A prompt has as many words as its case names, for one token."""
    made = text_client.request(40, text_client.vocabulary(), random.Random(1))
    assert len(made.text.split()) == 40
    assert made.limits.max_output_tokens == 1
