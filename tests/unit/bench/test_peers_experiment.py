"""The schedule itself, on a system that answers from memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bench.peers.experiment import Schedule, run
from bench.peers.mesh_system import truth
from bench.peers.streams import Outcome, Stream
from bench.results import BenchError

SCHEDULE = Schedule(streams=8, tokens=24, interval_s=0.01, kill_s=0.3, down_s=0.3, watch_s=0.6)


class FourWorkers:
    """Implements System. Slots take workers in turn; a dead one loses what it serves, and is left alone for a while."""

    def __init__(self, back_after_s: float, ready_after_s: float = 0.0) -> None:
        self.workers = frozenset(f"worker-{index}" for index in range(4))
        self.victim, self.returned = "worker-2", "worker-2-again"
        self.closed_with = -1
        self._back_after_s = back_after_s
        self._ready_after_s = ready_after_s
        self._killed = asyncio.Event()
        self._back_s = float("inf")

    async def start(self) -> None:
        """See System."""

    async def stream(self, slot: int, record: Stream, began_s: float) -> None:
        """See System."""
        now = asyncio.get_running_loop().time
        name = f"worker-{slot % 4}"
        if name == self.victim and self._killed.is_set():
            name = self.returned if now() >= self._back_s else "worker-1"
        record.workers = [name]
        for _ in range(SCHEDULE.tokens):
            record.arrive(now() - began_s, 1)
            await asyncio.sleep(SCHEDULE.interval_s)
            if name == self.victim and self._killed.is_set():
                record.end(now() - began_s, Outcome.LOST, "connection cut")
                return
        record.end(now() - began_s, Outcome.DONE)

    def prepare_kill(self) -> Callable[[], None]:
        """See System."""
        return self._killed.set

    async def start_again(self) -> None:
        """See System."""
        await asyncio.sleep(self._ready_after_s)
        self._back_s = asyncio.get_running_loop().time() + self._back_after_s

    async def close(self, streams: list[Stream]) -> None:
        """See System."""
        self.closed_with = len(streams)


async def test_streams_of_the_dead_worker_are_lost_and_its_return_is_timed() -> None:
    """Two of eight clients are on the victim: two streams are lost; it serves again 0.2 s after it was ready."""
    system = FourWorkers(back_after_s=0.2)
    told = await run(system, SCHEDULE, 0.0, lambda doing: None)
    assert (told.lost, told.hit, told.refused, told.wrong) == (2, 2, 0, 0)
    assert told.details == ("2 x lost: connection cut",)
    assert told.readmitted_s is not None and told.readmitted_s >= 0.2
    assert system.closed_with == told.done + told.lost


async def test_a_run_waits_for_the_returned_worker_until_the_horizon_and_no_longer() -> None:
    """With a horizon the run goes on until the worker served; without one it says how long it looked."""
    told = await run(FourWorkers(back_after_s=5.0), SCHEDULE, 0.0, lambda doing: None)
    assert told.readmitted_s is None and 0.6 <= told.watched_s < 5
    told = await run(FourWorkers(back_after_s=1.0), SCHEDULE, 30.0, lambda doing: None)
    assert told.readmitted_s is not None and told.readmitted_s >= 1.0
    assert told.watched_s < 20


async def test_a_slow_start_is_not_counted_against_the_system() -> None:
    """The way back is timed from the moment the worker could serve, which is told apart."""
    told = await run(FourWorkers(back_after_s=0.0, ready_after_s=0.5), SCHEDULE, 0.0, lambda doing: None)
    assert told.ready_s >= 0.5
    assert told.readmitted_s is not None and told.readmitted_s < told.ready_s


async def test_a_system_without_all_its_workers_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run does not begin before each worker has served."""
    monkeypatch.setattr("bench.peers.experiment.WARM_S_MAX", 0.3)
    system = FourWorkers(0.0)
    system.workers |= {"worker-4"}
    with pytest.raises(BenchError, match="not every worker served"):
        await run(system, SCHEDULE, 0.0, lambda doing: None)


def test_the_right_tokens_depend_on_the_whole_prompt_and_on_all_tokens_before() -> None:
    """The expected answers of kvmesh: longer outputs continue shorter ones, other prompts share nothing."""
    prompt = list(range(400, 440))
    ids = truth(prompt, 32)
    assert truth(prompt, 20) == ids[:20]
    assert truth([*prompt, *ids[:5]], 27) == ids[5:]
    assert truth([401, *prompt[1:]], 32) != ids
    assert truth(prompt, 0) == []
