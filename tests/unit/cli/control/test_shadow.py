"""`kvmesh shadow`: options with their ranges, and the report in words."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from kvmesh.bad_option import BadOption
from kvmesh.cli.control import shadow_text
from kvmesh.cli.control.shadow_settings import ShadowOptions, request_of
from kvmesh.cli.control.shares import sample_permille, tokens
from kvmesh.control.v1 import shadow_pb2 as pb


@pytest.mark.parametrize(
    ("text", "permille"), [("5%", 50), ("0.1%", 1), ("100%", 1000), ("12.5%", 125), ("100.0%", 1000)]
)
def test_a_share_is_given_in_percent(text: str, permille: int) -> None:
    """One digit behind the point."""
    assert sample_permille("--sample", text) == permille


@pytest.mark.parametrize("text", ["", "5", "0%", "0.05%", "101%", "100.1%", "-1%", "5 %", "a%"])
def test_a_bad_share_is_refused_with_its_range(text: str) -> None:
    """The sentence names option, value and range."""
    with pytest.raises(BadOption, match=r"--sample = .*allowed are 0.1% to 100%"):
        sample_permille("--sample", text)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1500", 1500), ("500k", 500_000), ("2M", 2_000_000), ("1.5M", 1_500_000), ("1G", 10**9)],
)
def test_a_count_may_have_a_unit(text: str, number: int) -> None:
    """k, M and G."""
    assert tokens("--max-tokens", text, 1) == number


@pytest.mark.parametrize("text", ["", "0", "2m", "-1", "1e6", "1001G", "0.0001k", "9" * 13])
def test_a_bad_count_is_refused(text: str) -> None:
    """Also one that rounds to nothing."""
    with pytest.raises(BadOption, match=r"--max-tokens = .*allowed are 1 to 1000000000000"):
        tokens("--max-tokens", text, 1)


@pytest.mark.parametrize(
    ("mode", "expected", "first"),
    [
        ("full", pb.Shadow.MODE_FULL, 0),
        ("ttft-only", pb.Shadow.MODE_TTFT_ONLY, 0),
        ("first:32", pb.Shadow.MODE_FIRST, 32),
    ],
)
def test_options_become_a_request(mode: str, expected: int, first: int) -> None:
    """Each option has its field."""
    given = ShadowOptions("next", "5%", mode, "2M", "100k", "30m", "young", keeps_tokens=True)
    made = request_of(given, reason="why", dry_run=True)
    settings = made.settings
    assert (settings.to_pool, settings.baseline_pool, settings.sample_permille) == ("next", "young", 50)
    assert (settings.mode, settings.first_tokens) == (expected, first)
    assert (settings.token_max, settings.tokens_per_minute_max) == (2_000_000, 100_000)
    assert made.ttl.seconds == 1800 and settings.keep_tokens and made.validate_only and made.reason == "why"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mode": "half"}, "--mode"),
        ({"mode": "first:0"}, "--mode"),
        ({"mode": "first:x"}, "--mode"),
        ({"ttl": "25h"}, "--ttl"),
        ({"ttl": "1s"}, "--ttl"),
        ({"baseline": "next"}, "--baseline"),
        ({"to": ""}, "--to"),
    ],
)
def test_a_bad_option_is_named(changes: dict[str, Any], text: str) -> None:
    """Before anything is sent."""
    values: dict[str, Any] = {"to": "next", "sample": "5%", "max_tokens": "2M"}
    with pytest.raises(BadOption, match=text):
        request_of(ShadowOptions(**(values | changes)), reason="", dry_run=False)


def test_a_report_has_figures_bands_and_differences() -> None:
    """All of it on one screen, also for a program's pipe."""
    shadow = pb.ShadowView(
        settings=pb.Shadow(
            shadow="s1", to_pool="next", sample_permille=55, mode=pb.Shadow.MODE_FIRST, first_tokens=8
        ),
        to_version="v2",
        running=True,
        verdict="beyond",
        reference="s0",
    )
    shadow.settings.token_max = 1000
    shadow.counts.sampled = 5
    shadow.counts.dropped["late"] = 2
    shadow.frontends.add(process_id="frontend-0", off_reason="queue_delay")
    shadow.criteria.add(
        name="tokens",
        unit="per 100,000",
        figure=400,
        low=300,
        high=500,
        samples=9,
        reference=200,
        p=0.0001,
        result="beyond",
    )
    shadow.differences.add(request_id="abc", pool="next", kind="tokens", position=7)
    console = Console(file=io.StringIO(), width=160)
    console.print(shadow_text.screen(shadow, lambda _: "now"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    for words in (
        "5.5 %",
        "first:8",
        "late 2",
        "frontend-0 (queue_delay)",
        "400 (300 to 500)",
        "beyond",
        "abc",
        "s0",
    ):
        assert words in shown, words
    assert "tokens 400" in shadow_text.plain_line(shadow)
