"""Calls of a check on one step stream, recorded by a sink."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.clock import MonotonicClock
from kvmesh.triton.errors import CallError, EngineStalled
from kvmesh.triton.port import EngineCall, EngineLoad, FirstAnswer
from kvmesh.triton.step_link import StepClient, StepLink
from kvmesh.triton.tensors import RequestTensors


@dataclass(slots=True)
class Framed:
    """What came of one call. `is_over`: it has ended, or was cancelled."""

    tokens: list[int] = field(default_factory=list)
    error: CallError | None = None
    is_over: bool = False


class _Recorder:
    """An EngineSink of calls that are numbered from 0."""

    def __init__(self, count: int) -> None:
        self.calls = [Framed() for _ in range(count)]

    def on_first(self, call_id: int, first: FirstAnswer, now_s: float) -> None:
        """Nothing of a first answer is judged."""

    def on_tokens(
        self,
        call_id: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        now_s: float,
        alternatives: bytes = b"",
    ) -> None:
        self.calls[call_id].tokens.extend(token_ids)

    def on_end(self, call_id: int, now_s: float) -> None:
        self.calls[call_id].is_over = True

    def on_error(self, call_id: int, error: CallError, now_s: float) -> None:
        self.calls[call_id].error, self.calls[call_id].is_over = error, True

    def on_step(self, now_s: float) -> None:
        """Each call is looked at after each event."""

    def on_load(self, load: EngineLoad, now_s: float) -> None:
        """A step stream has no load."""

    def on_ready(self, is_ready: bool, now_s: float) -> None:
        """A step stream tells no readiness."""


async def run(
    client: StepClient,
    tensors: RequestTensors,
    calls: Sequence[EngineCall],
    *,
    cancel_after: int = 0,
    cancel_s: float = 0.0,
    timeout_s: float,
) -> list[Framed]:
    """Run calls at once on a step stream of their own, and return what came.

    `cancel_after`: tokens after which each call is cancelled; 0: none is. A call that is open after `timeout_s`, or
    `cancel_s` after the last cancel, has failed.
    """
    sink, changed = _Recorder(len(calls)), asyncio.Event()
    link = StepLink(
        client,
        tensors,
        sink,
        MonotonicClock(),
        after_event=changed.set,
        on_frame=lambda _: None,
        on_lost=lambda _: None,
        on_replaced=lambda: None,
        release=lambda _: None,
    )
    try:
        async with asyncio.timeout(timeout_s) as bound:
            for number, call in enumerate(calls):
                link.start(number, call)
            while link.open_calls():
                await changed.wait()
                changed.clear()
                for number, framed in enumerate(sink.calls):
                    if cancel_after and not framed.is_over and len(framed.tokens) >= cancel_after:
                        framed.is_over = True
                        link.cancel(number)
                        bound.reschedule(asyncio.get_running_loop().time() + cancel_s)
    except TimeoutError:
        for framed in sink.calls:
            if cancel_after or not framed.is_over:
                waited = f"{cancel_s:g} s of its cancel" if framed.is_over else f"{timeout_s:g} s"
                framed.error = framed.error or EngineStalled(f"no end within {waited}")
    finally:
        await link.close()
    return sink.calls
