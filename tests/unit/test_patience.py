"""Bounds of the tests' waits: seconds of a quiet machine, and an end for a wait that hangs on a busy one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests import patience as patience_module
from tests.patience import SHARE, Patience, patience, stalled_s


class Machine:
    """A machine with a clock, and with the time in which its processes waited for a processor."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.stalled_s = 7.0

    def run(self, seconds: float, busy: float = 0.0) -> None:
        """Let time pass. `busy`: share of it in which a process waited."""
        self.now_s += seconds
        self.stalled_s += busy * seconds

    def patience(self, bound_s: float) -> Patience:
        return Patience(bound_s, lambda: self.now_s, lambda: self.stalled_s)


def test_a_bound_is_seconds_of_a_quiet_machine() -> None:
    """All of them count."""
    machine = Machine()
    bound = machine.patience(5)
    machine.run(4.9)
    assert not bound.is_over and bound.left_s() == pytest.approx(0.1)
    machine.run(0.1)
    assert bound.is_over


def test_seconds_of_a_busy_machine_count_a_share() -> None:
    """The wait still ends."""
    machine = Machine()
    bound = machine.patience(5)
    machine.run(5 / SHARE - 0.1, busy=1.0)
    assert not bound.is_over
    machine.run(0.2, busy=1.0)
    assert bound.is_over


def test_a_counter_that_jumps_counts_no_more_than_the_wait() -> None:
    """Backwards, or further than the time that passed."""
    machine = Machine()
    bound = machine.patience(5)
    machine.stalled_s = 0.0
    machine.run(1)
    assert bound.left_s() == pytest.approx(4)
    machine.stalled_s = 1e9
    assert bound.left_s() == pytest.approx(5 - SHARE)


def test_the_kernel_counts_or_nothing_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the counter, or with another text there, has no busy seconds."""
    told = tmp_path / "cpu"
    monkeypatch.setattr(patience_module, "_PRESSURE", told)
    assert stalled_s() == 0.0
    told.write_text("some avg10=0.00 avg60=1.26 avg300=28.02 total=2500000\nfull avg10=0.00 total=0\n")
    assert stalled_s() == 2.5
    for text in ("", "some\n", "some total=much\n"):
        told.write_text(text)
        assert stalled_s() == 0.0


async def test_a_block_ends_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a block that takes longer raises; one that is extended goes on."""
    async with patience(60):
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with patience(0.01):
            await asyncio.Event().wait()
    left_s = [0.01, 0.01, 0.0]
    monkeypatch.setattr(Patience, "left_s", lambda bound: left_s.pop(0))
    with pytest.raises(TimeoutError):
        async with patience(0.01):
            await asyncio.Event().wait()
    assert not left_s
