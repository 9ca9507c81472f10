"""Restarts of a process: a pause that doubles, and an end to a crash loop."""

from __future__ import annotations

from kvmesh.cli.restarts import DEATHS_MAX, PERIOD_S, Restarts


def test_the_pause_doubles_until_the_process_is_given_up() -> None:
    """Within the period."""
    restarts = Restarts()
    pauses = [restarts.pause_s(at) for at in range(DEATHS_MAX)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, None]


def test_old_deaths_do_not_count() -> None:
    """A process that dies once an hour is always started again."""
    restarts = Restarts()
    assert {restarts.pause_s(at * PERIOD_S) for at in range(50)} == {0.1}
