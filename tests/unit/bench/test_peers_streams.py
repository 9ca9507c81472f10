"""The figures of the streams of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.pages import NOTES
from bench.peers import page
from bench.peers.experiment import Schedule
from bench.peers.streams import Fault, Figures, Outcome, Stream, figures

FAULT = Fault("worker-2", "worker-2-again", killed_s=2.0, started_s=5.0, ready_s=5.5)


def stream(
    sent_s: float, arrivals: list[float], ended_s: float, outcome: Outcome, *workers: str, detail: str = ""
) -> Stream:
    """Return a stream with one token at each of `arrivals`."""
    made = Stream(sent_s)
    for at_s in arrivals:
        made.arrive(at_s, 1)
    made.workers = list(workers)
    made.end(ended_s, outcome, detail)
    return made


def test_a_run_is_summed_up() -> None:
    """Lost, refused and moved streams, pauses before and after the kill, and the way back are each counted once."""
    streams = [
        stream(0.0, [0.1, 0.4, 0.5], 0.5, Outcome.DONE, "worker-1"),
        stream(1.5, [1.6, 1.9], 2.1, Outcome.LOST, "worker-2", detail="connection cut"),
        stream(1.5, [1.6, 1.9, 3.0], 3.0, Outcome.DONE, "worker-2", "worker-0"),
        stream(2.5, [], 2.6, Outcome.LOST, detail="status 503"),
        stream(5.2, [6.25, 6.3], 6.3, Outcome.DONE, "worker-2-again"),
        stream(7.0, [7.1], 7.1, Outcome.WRONG, "worker-2-again", detail="a token beyond the last"),
    ]
    told = figures(streams, FAULT, ended_s=14.5)
    assert (told.done, told.lost, told.refused, told.wrong) == (3, 1, 1, 1)
    assert (told.hit, told.moved) == (2, 1)
    assert told.moved_pause_s == pytest.approx(1.1)
    assert told.pause_s == pytest.approx(1.1)
    assert told.quiet_pause_s == pytest.approx(0.3)
    assert told.first_wait_s == pytest.approx(1.05)
    assert told.readmitted_s == pytest.approx(0.75)
    assert (told.ready_s, told.watched_s) == (0.5, 9.0)
    assert set(told.details) == {
        "1 x lost: connection cut",
        "1 x refused: status 503",
        "1 x wrong: a token beyond the last",
    }


def test_silence_before_the_end_is_a_pause() -> None:
    """A stream that falls mute and is given up had a pause as long as its silence."""
    mute = stream(1.9, [1.95], 12.0, Outcome.LOST, "worker-2")
    assert figures([mute], FAULT, 14.0).pause_s == pytest.approx(10.05)


def test_a_request_before_the_restart_does_not_show_the_return() -> None:
    """If the victim keeps its name, only a request with a first token after the restart shows its return."""
    same = Fault("decode-2", "decode-2", 2.0, 5.0, 9.0)
    before = stream(1.0, [1.1, 3.0], 3.0, Outcome.DONE, "decode-2")
    moved = stream(8.0, [8.1, 9.5], 9.5, Outcome.DONE, "decode-1", "decode-2")
    assert figures([before, moved], same, 15.0).readmitted_s is None
    after = stream(9.1, [9.3], 9.3, Outcome.DONE, "decode-2")
    assert figures([before, after], same, 15.0).readmitted_s == pytest.approx(0.3)


def test_the_page_names_systems_that_were_not_installed() -> None:
    """A router that pip does not find stands in the table with the reason; medians and spreads are shown."""
    record = page.FaultRecord("python -m bench.peers", {"cpu": "one"}, page.About(Schedule(), 150.0))
    run = Figures(9, 4, 0, 0, 4, 0, 0.06, None, 0.03, 0.1, 0.15, None, 9.0, ("4 x lost: connection cut",))
    for lost in (4, 5, 3):
        record.add("smg", "1.13.0", "cache_aware", _with_lost(run, lost))
    record.unavailable["vllm-router"] = "vllm-router==0.1.17 cannot be installed: no such wheel"
    text = page.page(record, f"{NOTES}\nA note.\n")
    assert "| smg 1.13.0 | cache_aware | 3 | 9 | 4 [3..5] |" in text
    assert "none within 9" in text
    assert "| vllm-router | not measured: vllm-router==0.1.17 cannot be installed: no such wheel |" in text
    assert text.endswith("A note.\n")
    rows = [line for line in text.splitlines() if line.startswith(("| system", "| smg", "| vllm-router"))]
    assert len({row.count("|") for row in rows}) == 1


def _with_lost(run: Figures, lost: int) -> Figures:
    return replace(run, lost=lost)
