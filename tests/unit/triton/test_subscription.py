"""A subscription to an engine that was silent and answers slowly, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvmesh.triton.subscription import Subscription
from tests.unit.frontend.budgets.virtual_time import simulate

WHAT = "load_report"


class Stream:
    """Brings a message `delay_s` after the first read, and one each second from then on."""

    is_sent = True

    def __init__(self, delay_s: float) -> None:
        self._wait_s = delay_s

    async def __anext__(self) -> Any:
        wait_s, self._wait_s = self._wait_s, 1.0
        await asyncio.sleep(wait_s)
        return SimpleNamespace(outputs=[SimpleNamespace(name=WHAT)], raw_output_contents=[b"{}"])

    def cancel(self) -> None:
        """Nothing is open."""


class Engine:
    """A client of an engine whose first message of a stream comes late."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.streams = 0

    def subscription(self, tensors: object, *, parameters: object, request_id: str) -> Stream:
        self.streams += 1
        return Stream(self.delay_s)


def messages(delay_s: float, for_s: float, is_awaited: Callable[[int], bool]) -> tuple[int, int]:
    """Return the messages and the streams of a subscription in `for_s`. `is_awaited` takes the messages so far."""
    engine, taken = Engine(delay_s), list[object]()

    async def run() -> None:
        tensors = SimpleNamespace(of_service=lambda: None)
        subscription = Subscription(cast(Any, engine), cast(Any, tensors), WHAT, taken.append, lambda: None)
        subscription.is_awaited = lambda: is_awaited(len(taken))
        task = asyncio.create_task(subscription.run())
        await asyncio.sleep(for_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    simulate(run())
    return len(taken), engine.streams


@pytest.mark.parametrize(("delay_s", "streams"), [(0.01, 1), (1.4, 1), (1.6, 2), (2.9, 2), (11.0, 4)])
def test_an_engine_that_answers_slowly_is_heard(delay_s: float, streams: int) -> None:
    """After a stream without a message the next one may take longer. Else a busy engine would never be back."""
    heard, opened = messages(delay_s, 60.0, lambda taken: not taken)
    assert heard > 20
    assert opened == streams


def test_a_dead_connection_is_replaced() -> None:
    """A silent stream of a lost engine is opened again within seconds, for as long as it takes."""
    heard, streams = messages(1e6, 120.0, lambda _: True)
    assert not heard and streams == 12


def test_a_silent_stream_of_an_engine_that_is_not_lost_is_kept() -> None:
    """An engine with an empty cache has no KV events for hours."""
    assert messages(1e6, 3600.0, lambda _: False) == (0, 1)
