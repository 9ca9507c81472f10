"""Reads the responses of all running requests, and hands the outputs of one iteration over in one call.

TensorRT-LLM puts the responses of an iteration into the queues of their requests. Then it wakes all of them in one turn of
the event loop (utils.py@03dd9bb8, _SyncQueue.notify_many). To wake a task for each request takes more time than to read its
response. Requests of one batch go in step, so one of them, the leader, waits with a task. When it wakes, its followers'
responses are there, too.

    alone     waits with a task
    leader    waits with a task; its followers had responses in the same turn
    follower  has no task; is read when its leader wakes, and is alone again if it then has no response

INVARIANT: each open reading waits, or follows one that waits. A follower whose leader gets no response (a paused request)
is found by `sweep`. Without `aqueue.empty` of the results every reading stays alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engines.contract.outputs import RequestOutput

_log = logging.getLogger(__name__)


class BadAnswer(Exception):
    """A response could not be read or translated, which concerns its request alone."""


@dataclass(slots=True, eq=False)
class Reading:
    """One request that is read. `result`: TensorRT-LLM's RequestOutput (result.py@a678b91a).

    `on_response` is called after each response. `on_end` is called once, after the last one, with the error if there is
    one. `is_empty` tells whether no response waits; None: TensorRT-LLM cannot tell it.
    """

    result: Any
    on_response: Callable[[], None]
    on_end: Callable[[Exception | None], None]
    followers: list[Reading] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    is_over: bool = False
    is_empty: Callable[[], bool] | None = field(init=False)

    def __post_init__(self) -> None:
        # utils.py@03dd9bb8: AsyncQueue.empty. With Ray the queue is an actor without it.
        self.is_empty = getattr(self.result.aqueue, "empty", None)


@dataclass(slots=True)
class StepReader:
    """The open readings, and the outputs of this turn. Used in the thread of `loop` only."""

    loop: asyncio.AbstractEventLoop
    put: Callable[[list[tuple[int, RequestOutput]]], None]
    _waiting: set[Reading] = field(default_factory=set)
    _woken: list[Reading] = field(default_factory=list)
    _outputs: list[tuple[int, RequestOutput]] = field(default_factory=list)
    _is_scheduled: bool = False

    def start(self, reading: Reading) -> None:
        """Read `reading` until its end."""
        self._wait(reading)

    def add(self, key: int, output: RequestOutput) -> None:
        """Hand `output` over at the end of this turn."""
        self._outputs.append((key, output))
        self._schedule()

    def flush(self) -> None:
        """Hand over what was gathered."""
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self.put(outputs)

    def sweep(self) -> None:
        """Find followers with responses whose leader has none: they are alone again."""
        for leader in [each for each in self._waiting if each.followers]:
            if _is_empty(leader) and not all(map(_is_empty, leader.followers)):
                followers, leader.followers = leader.followers, []
                for each in followers:
                    self._wait(each)

    async def close(self) -> None:
        """End all readings without their callbacks."""
        tasks = [each.task for each in self._waiting if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._waiting.clear()

    def assert_consistent(self, readings: list[Reading]) -> None:
        """Raise AssertionError if one of `readings`, all open ones, neither waits nor follows."""
        following = [each for leader in self._waiting for each in leader.followers]
        woken = [each for leader in self._woken for each in (leader, *leader.followers)]
        known = [*self._waiting, *following, *woken]
        assert len(known) == len(set(known)), "a reading is in two places"
        assert set(readings) <= set(known), "a reading is in no place"

    def _schedule(self) -> None:
        """Run `_gather` after the tasks that are ready in this turn."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self.loop.call_soon(self._gather)

    def _wait(self, reading: Reading) -> None:
        self._waiting.add(reading)
        reading.task = self.loop.create_task(self._await(reading))

    async def _await(self, reading: Reading) -> None:
        try:
            await reading.result.__anext__()
        except (StopAsyncIteration, Exception) as error:  # noqa: BLE001  # any error ends the request
            self._end(reading, error)
        else:
            self._told(reading)
        self._waiting.discard(reading)
        self._woken.append(reading)
        self._schedule()

    def _gather(self) -> None:
        """Read all followers of the readings that woke in this turn, and form one group of those that had a response."""
        self._is_scheduled = False
        woken, self._woken = self._woken, []
        in_step: list[Reading] = []
        for leader in woken:
            followers, leader.followers = leader.followers, []
            if not leader.is_over:
                in_step.append(leader)
            for each in followers:
                if _is_empty(each):
                    self._wait(each)
                    continue
                self._read(each)
                if not each.is_over:
                    in_step.append(each)
        leader_now: Reading | None = None
        for each in in_step:
            if leader_now is not None and each.is_empty is not None and each.is_empty():
                leader_now.followers.append(each)
            else:  # also one with a further response, which it then reads at once
                self._wait(each)
                leader_now = leader_now or (each if each.is_empty is not None else None)
        self.flush()

    def _read(self, reading: Reading) -> None:
        """Read a response that is there."""
        step = reading.result.__anext__()
        try:
            step.send(None)
        except StopIteration:
            self._told(reading)
        except (StopAsyncIteration, Exception) as error:  # noqa: BLE001  # any error ends the request
            self._end(reading, error)
        else:  # TensorRT-LLM waits although a response is there
            step.close()
            _log.error("a response could not be read; the request ends")
            self._end(reading, BadAnswer("a response could not be read"))

    def _told(self, reading: Reading) -> None:
        try:
            reading.on_response()
        except Exception as error:  # noqa: BLE001  # a bug in one answer must not end the others
            _log.exception("a response could not be translated; the request ends")
            self._end(reading, BadAnswer(f"{type(error).__name__} in an answer"))
            return
        if reading.result.finished:
            self._end(reading, None)

    def _end(self, reading: Reading, error: BaseException | None) -> None:
        if not reading.is_over:
            reading.is_over = True
            reading.on_end(
                error if isinstance(error, Exception) and not isinstance(error, StopAsyncIteration) else None
            )


def _is_empty(reading: Reading) -> bool:
    return reading.is_empty is None or bool(reading.is_empty())
