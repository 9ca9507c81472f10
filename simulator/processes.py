"""Spreads the runs of a replay over processes. The figures do not depend on the number of processes.

Each process gets the traces once and then one task at a time.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Final

from simulator.measures import Measures
from simulator.runs import Replay, ReplayRow
from simulator.trace import Trace

CONTEXT: Final = multiprocessing.get_context("spawn")
"""A fork would copy the threads of a progress bar, and their locks."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run."""

    trace: str
    """Key of the traces."""
    row: ReplayRow
    policy: str
    seed: int


OnDone = Callable[[Task, Measures], None]


class Runner:
    """Runs tasks, in this process if `jobs` is 1. The owner calls `close`."""

    def __init__(self, traces: Mapping[str, Trace], jobs: int) -> None:
        self._replays = {name: Replay(trace) for name, trace in traces.items()}
        self._idle: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        for _ in range(jobs if jobs > 1 else 0):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_work, args=(there, dict(traces)), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._idle.append(here)

    def run(self, tasks: Iterable[Task], on_done: OnDone) -> None:
        """Run all `tasks`. `on_done` is called as each ends, in no order. Raises RuntimeError if a process dies."""
        if not self._processes:
            for task in tasks:
                on_done(task, _run(self._replays, task))
            return
        waiting = iter(tasks)
        busy: dict[Connection, Task] = {}
        while True:
            while self._idle and (following := next(waiting, None)) is not None:
                connection = self._idle.pop()
                connection.send(following)
                busy[connection] = following
            if not busy:
                return
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                try:
                    answer = ready.recv()
                except EOFError:
                    raise RuntimeError(f"a process died in {busy[ready]}") from None
                task = busy.pop(ready)
                self._idle.append(ready)
                if isinstance(answer, BaseException):
                    raise RuntimeError(f"{task} failed") from answer
                on_done(task, answer)

    def close(self) -> None:
        """Terminate the processes, whatever they do."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        self._processes.clear()
        self._idle.clear()


def _run(replays: Mapping[str, Replay], task: Task) -> Measures:
    return replays[task.trace].run(task.row, task.policy, task.seed)


def _work(connection: Connection, traces: dict[str, Trace]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    replays = {name: Replay(trace) for name, trace in traces.items()}
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            connection.send(_run(replays, task))
        except Exception as error:  # noqa: BLE001 - it is raised where the task came from
            connection.send(error)
