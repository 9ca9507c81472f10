"""Times of tests: seconds of a quiet machine, and an end for a wait that hangs on a busy one."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests import patience as patience_module
from tests.patience import SHARE, Patience, Pressure, patience, quiet_s, wait_for

PRESSURE = (
    "some avg10=0.00 avg60=1.26 avg300=28.02 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
)


class Machine:
    """A machine with a clock, and with the time in which its processes waited for a processor."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told = folder / "cpu"
        self._now_s = 100.0
        self._stalled_s = 7.0
        self.run(0.0)
        monkeypatch.setattr(patience_module, "_pressure", Pressure(self.told))
        monkeypatch.setattr(time, "monotonic", lambda: self._now_s)

    def run(self, seconds: float, busy: float = 0.0) -> None:
        """Let time pass. `busy`: share of it in which a process waited."""
        self._now_s += seconds
        self._stalled_s += busy * seconds
        self.told.write_text(PRESSURE.format(round(1e6 * self._stalled_s)))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_bound_is_seconds_of_a_quiet_machine(machine: Machine) -> None:
    """All of them count."""
    bound = Patience(5)
    machine.run(4.9)
    assert not bound.is_over and bound.left_s == pytest.approx(0.1)
    machine.run(0.2)
    assert bound.is_over


def test_seconds_of_a_busy_machine_count_a_share(machine: Machine) -> None:
    """The wait still ends."""
    bound = Patience(5)
    machine.run(5 / SHARE - 0.1, busy=1.0)
    assert not bound.is_over
    machine.run(0.2, busy=1.0)
    assert bound.is_over


@pytest.mark.parametrize("text", [None, "", "some\n"])
def test_a_machine_without_the_counter_is_never_busy(tmp_path: Path, text: str | None) -> None:
    """All seconds count."""
    told = tmp_path / "cpu"
    if text is not None:
        told.write_text(text)
    assert Pressure(told).stalled_s() == 0.0


def test_the_counter_is_read_while_no_file_can_be_opened(machine: Machine) -> None:
    """A reading without it would be hours away from the others."""
    before_s = quiet_s()
    machine.told.rename(machine.told.with_name("away"))
    assert quiet_s() == before_s


async def test_a_block_ends_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a block that takes longer raises. Its bound is looked at again as long as seconds are left."""
    async with patience(60):
        await asyncio.sleep(0)
    assert await wait_for(asyncio.sleep(0, "done"), 60) == "done"
    with pytest.raises(TimeoutError):
        await wait_for(asyncio.Event().wait(), 0.01)
    with pytest.raises(TimeoutError):
        async with patience(0.01):
            await asyncio.Event().wait()
    left_s = [0.01, 0.01, 0.01, 0.01, 0.0]
    monkeypatch.setattr(Patience, "left_s", property(lambda bound: left_s.pop(0)))
    with pytest.raises(TimeoutError):
        async with patience(0.01):
            await asyncio.Event().wait()
    assert not left_s
