"""Loss of an engine without load reports, by its answered probes, in virtual time."""

from __future__ import annotations

import asyncio
import selectors
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvmesh.triton import engine as engines
from kvmesh.triton.engine import TritonEngine

START_S = 100.0


class Time(selectors.SelectSelector):
    """A clock that jumps to the next timer instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.at_s = START_S

    def now_s(self) -> float:
        return self.at_s

    def select(self, timeout: float | None = None) -> Any:
        self.at_s += max(0.0, timeout or 0.0)
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    """Runs in the time of `clock`."""

    def __init__(self, clock: Time) -> None:
        self.clock = clock
        super().__init__(clock)

    def time(self) -> float:
        return self.clock.at_s


class Server:
    """Does not answer the probes with numbers in `missed`."""

    address = "engine:1"

    def __init__(self, missed: range) -> None:
        self.missed = missed
        self.probes = 0

    async def is_ready(self, timeout_s: float) -> bool:
        self.probes += 1
        is_missed = self.probes in self.missed
        await asyncio.sleep(timeout_s if is_missed else 0.005)
        return not is_missed

    async def reconnect(self) -> None:
        """There is no channel to replace."""


@pytest.mark.parametrize("first", range(1, 7))
@pytest.mark.parametrize("missed", [0, 1, 2, 1000])
def test_one_missed_probe_is_no_loss(monkeypatch: pytest.MonkeyPatch, first: int, missed: int) -> None:
    """One late answer has no effect. An engine that stops answering is lost within 4 s, once."""
    monkeypatch.setattr(engines, "RequestTensors", lambda *_: None)
    clock, lost_s = Time(), list[float]()
    sink = SimpleNamespace(on_ready=lambda *_: None, on_error=lambda *_: lost_s.append(clock.at_s))
    capabilities = SimpleNamespace(kv_events=False, release_handoff=False)
    facts = SimpleNamespace(
        load_report=False, step_frames=False, stop=False, capabilities=capabilities, inputs={}, vocab_size=0
    )
    server = Server(range(first, first + missed))

    async def run() -> None:
        engine = TritonEngine(cast(Any, server), cast(Any, facts), cast(Any, sink), clock, lambda: None)
        prompt = asyncio.create_task(asyncio.sleep(1e6))
        call = SimpleNamespace(request_id="r-1")
        engine._calls[1] = cast(Any, SimpleNamespace(is_over=False, call=call, task=prompt))
        watching = asyncio.create_task(engine.run())
        await asyncio.sleep(30.0)
        for task in (watching, prompt):
            task.cancel()
        await asyncio.gather(watching, prompt, return_exceptions=True)

    with asyncio.Runner(loop_factory=lambda: Loop(clock)) as runner:
        runner.run(run())
    if missed <= 1:
        assert not lost_s and server.probes > 20
    elif missed == 1000:
        assert len(lost_s) == 1 and lost_s[0] - START_S <= (first - 1) * 1.3 + 4.0
