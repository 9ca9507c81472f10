"""Durations on the command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.bad_option import BadOption
from kvmesh.cli.control import durations


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("30m", 1800.0), ("2h", 7200.0), ("0.5h", 1800.0), ("0s", 0.0)]
)
def test_a_number_and_a_unit(text: str, seconds: float) -> None:
    """Seconds, minutes and hours."""
    assert durations.parse("--ttl", text, 0, 7200) == seconds


@pytest.mark.parametrize("text", ["", "s", "90", "-1s", "1d", "1h30m", "1e3s", " 1s", "１s", "inf", "1_0s"])
def test_other_texts_are_refused_with_the_range(text: str) -> None:
    """Also digits of other scripts, which int() would read."""
    with pytest.raises(BadOption) as refused:
        durations.parse("--ttl", text, 1, 86400)
    words = "is no duration: allowed are 1s to 24h, written like 90s, 30m or 2h."
    assert str(refused.value) == f'--ttl = "{text}" {words}'


@given(st.integers(0, 10**9))
def test_a_duration_survives_the_message(milliseconds: int) -> None:
    """To the millisecond."""
    message = durations.message(milliseconds / 1000)
    assert durations.seconds_of(message) == pytest.approx(milliseconds / 1000, abs=1e-6)
    assert 0 <= message.nanos < 1_000_000_000


@given(st.integers(0, 10**7))
def test_the_short_form_is_read_again(seconds: int) -> None:
    """So the range in an error can be typed as it stands there."""
    assert durations.parse("--ttl", durations.short(seconds), 0, 10**7) == seconds


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0 s"), (2.51, "2.5 s"), (59, "59 s"), (60, "1 min"), (84, "1 min 24 s"), (5400, "1 h 30 min")],
)
def test_words_have_two_units_at_most(seconds: float, words: str) -> None:
    """A table needs no more."""
    assert durations.words(seconds) == words
