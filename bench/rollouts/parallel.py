"""Runs seeded tasks on at most two processes. The results do not depend on the number of processes."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Final, TypeVar

CONTEXT: Final = multiprocessing.get_context("spawn")
JOBS_MAX: Final = 2

Task = TypeVar("Task")
Result = TypeVar("Result")


def results(
    make: Callable[[], Callable[[Task], Result]], tasks: Sequence[Task], jobs: int
) -> Iterator[Result]:
    """Yield the result of each task in order. Each process calls `make` once, and the worker that it returns per task.

    Raises ValueError if `jobs` is out of range, and RuntimeError if a process ends early.
    """
    if not 1 <= jobs <= JOBS_MAX:
        raise ValueError(f"jobs is {jobs}; 1 to {JOBS_MAX} is allowed")
    if jobs == 1:
        yield from map(make(), tasks)
        return
    started = [_start(make, tasks[first::jobs]) for first in range(jobs)]
    try:
        for number in range(len(tasks)):
            yield _received(started[number % jobs][0])
    finally:
        for connection, process in started:
            process.terminate()
            process.join()
            connection.close()


def _start(
    make: Callable[[], Callable[[Task], Result]], tasks: Sequence[Task]
) -> tuple[Connection, multiprocessing.process.BaseProcess]:
    here, there = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_work, args=(there, make, tasks), daemon=True)
    process.start()
    there.close()
    return here, process


def _received(connection: Connection) -> Result:  # type: ignore[type-var]
    try:
        answer: Result | BaseException = connection.recv()
    except EOFError:
        raise RuntimeError("a process of the bench ended early") from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _work(there: Connection, make: Callable[[], Callable[[Task], Result]], tasks: Sequence[Task]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    try:
        run = make()
        for task in tasks:
            there.send(run(task))
    except Exception as error:  # noqa: BLE001 - it is raised where the task came from
        there.send(error)
