"""The meaning of `--only`."""

from __future__ import annotations

import pytest
import typer

from bench.options import selected


def test_names_by_commas_and_all_without_any() -> None:
    """Order is the caller's; spaces do not matter."""
    assert selected(" b ,a,", {"a": 1, "b": 2, "c": 3}) == ["b", "a"]
    assert selected("", ("a", "b")) == ["a", "b"]


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    """The sentence names it and what is allowed."""
    with pytest.raises(typer.BadParameter, match="'d' is unknown; allowed are a, b"):
        selected("a,d", ("a", "b"))
