"""The OpenAI form of the fault matrix: its cells, its events, and its page."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from typer.testing import CliRunner

from tests.chaos.cells import Cell, CellError, Run
from tests.chaos.main import app
from tests.chaos.openai_clients import Event, events_of, note
from tests.chaos.openai_page import FORM, form, page
from tests.chaos.records import Record, Seen, Violation


def test_cells_are_chosen_by_name_and_others_refused() -> None:
    """No name means all cells, with each seed."""
    assert form("router:kill, redis:term", 2, None) == [
        Run(Cell(part, fault), seed)
        for seed in (1, 2)
        for part, fault in (("router", "kill"), ("redis", "term"))
    ]
    assert len(form("", 3, None)) == 3 * len(FORM)
    assert form("router:kill", 3, 7) == [Run(Cell("router", "kill"), 7)]
    with pytest.raises(CellError, match="router:cut"):
        form("router:cut", 1, None)
    assert CliRunner().invoke(app, ("openai", "--cells", "pilot:kill")).exit_code == 2


async def test_an_event_that_is_cut_off_is_no_event() -> None:
    """Its tokens come again behind Last-Event-ID."""

    async def lines() -> AsyncIterator[str]:
        for line in ("id: 1", 'data: {"a":1}', "", "event: error", "data:x", "", "id: 2", 'data: {"a"'):
            yield line

    assert [each async for each in events_of(lines())] == [
        Event("1", "", '{"a":1}'),
        Event("", "error", "x"),
    ]


def test_an_event_whose_position_is_not_that_of_its_tokens_is_found() -> None:
    """A repeated or missing token would be one."""
    seen = Seen(0, 0.0)
    note(Event("2", "", '{"choices":[{"token_ids":[7,8],"finish_reason":null}]}'), seen)
    note(Event("3", "", '{"choices":[{"finish_reason":"stop"}]}'), seen)
    assert (seen.ids, seen.finish_reason) == ([7, 8], "stop")
    with pytest.raises(AssertionError, match="id 9"):
        note(Event("9", "", '{"choices":[{"token_ids":[7],"finish_reason":null}]}'), seen)
    with pytest.raises(AssertionError, match="usage says 5 tokens"):
        note(Event("", "", '{"choices":[],"usage":{"completion_tokens":5}}'), seen)


def test_the_page_adds_up_the_runs_of_a_cell() -> None:
    """A row for each cell, what callers saw, and the violations."""
    records = [
        Record(
            part="frontend",
            fault="kill",
            seed=seed,
            target="frontend-0",
            commit="c",
            began="2026-11-29T20:00:00",
            seconds=30.0,
            streams=10,
            client_resumes=seed,
            longest_pause_s=float(seed),
            package={"the whole answer": 2},
            violations=[Violation("LOST", "stream 3")] if seed == 2 else [],
        )
        for seed in (1, 2)
    ]
    text = page(records, "make chaos CLIENTS=openai")
    assert "| frontend, kill | 2 | 20 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 3 | 1.50 / 2.00 | 1 |" in text
    assert "| frontend, kill | the whole answer | 4 |" in text
    assert "- frontend:kill, seed 2: LOST: stream 3" in text
