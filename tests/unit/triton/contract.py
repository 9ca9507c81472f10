"""The contract of every EnginePort: checks for the fake of the unit tests and for the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmesh.attach import frames
from kvmesh.triton.errors import CallError, HandoffLost
from kvmesh.triton.port import CallKind, EngineCall, EngineLoad, EnginePort, FirstAnswer
from tests.patience import patience

PROMPT = tuple(range(1, 60))


@dataclass
class Heard:
    """The events of one call in order: "first", "tokens", "end" or "error"."""

    events: list[str] = field(default_factory=list)
    first: FirstAnswer | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    error: CallError | None = None

    def is_over(self) -> bool:
        """True if the call has its last event."""
        return bool(self.events) and self.events[-1] in ("end", "error")


class Recorder:
    """An EngineSink that records all events."""

    def __init__(self) -> None:
        self.calls: dict[int, Heard] = {}
        self.load: EngineLoad | None = None
        self.is_ready = False
        self.steps = 0

    def heard(self, call_id: int) -> Heard:
        """Return the events of a call."""
        return self.calls.setdefault(call_id, Heard())

    def on_first(self, call_id: int, first: FirstAnswer, now_s: float) -> None:
        self._note(call_id, "first").first = first

    def on_tokens(
        self,
        call_id: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        now_s: float,
        alternatives: bytes = b"",
    ) -> None:
        heard = self._note(call_id, "tokens")
        assert token_ids, "an answer without tokens"
        heard.ids.extend(token_ids)
        heard.logprobs.extend(logprobs)

    def on_end(self, call_id: int, now_s: float) -> None:
        self._note(call_id, "end")

    def on_error(self, call_id: int, error: CallError, now_s: float) -> None:
        self._note(call_id, "error").error = error

    def on_step(self, now_s: float) -> None:
        self.steps += 1

    def on_load(self, load: EngineLoad, now_s: float) -> None:
        self.load = load

    def on_ready(self, is_ready: bool, now_s: float) -> None:
        self.is_ready = is_ready

    def _note(self, call_id: int, event: str) -> Heard:
        heard = self.heard(call_id)
        assert not heard.is_over(), f"{event} after the end of call {call_id}"
        heard.events.append(event)
        return heard


@dataclass
class Rig:
    """An engine, its sink, and a function that lets it work. `kv_peer`: address of its KV blocks; empty: none."""

    engine: EnginePort
    sink: Recorder
    work: Callable[[], None]
    kv_peer: str = ""
    timeout_s: float = 15.0

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Let the engine work until `is_true`."""
        async with patience(self.timeout_s):
            while not is_true():
                self.work()
                await asyncio.sleep(0.002)

    async def run(self, call_id: int, call: EngineCall) -> Heard:
        """Start a call and return all of its events."""
        self.engine.start(call_id, call)
        heard = self.sink.heard(call_id)
        assert not heard.events, "the sink was called from inside start"
        await self.until(heard.is_over)
        return heard


def call(kind: CallKind = CallKind.CONTEXT_AND_GENERATION, name: str = "r", **changes: object) -> EngineCall:
    """Return a call of eight tokens."""
    settings: dict[str, object] = {"max_output_tokens": 8, "temperature": 0.7, "seed": 5, **changes}
    return EngineCall(kind, name, frames.pack_ids(PROMPT), **settings)  # type: ignore[arg-type]  # fields by name


async def check_whole(rig: Rig) -> None:
    """One first event, tokens, one end: as many tokens as requested, and log-probabilities only on request."""
    heard = await rig.run(1, call())
    assert heard.events[0] == "first" and heard.events[-1] == "end"
    assert set(heard.events[1:-1]) == {"tokens"} and len(heard.ids) == 8 and not heard.logprobs
    asked = await rig.run(2, call(name="s", logprobs=True))
    assert asked.ids == heard.ids and len(asked.logprobs) == 8 and max(asked.logprobs) <= 0


async def check_handoff(rig: Rig) -> None:
    """context_only makes one token and a handoff. generation_only repeats the token and continues as a whole call would."""
    whole = await rig.run(11, call())
    context = await rig.run(12, call(CallKind.CONTEXT_ONLY, "c"))
    assert context.events == ["first", "tokens", "end"] and context.first is not None
    handoff = context.first.context_phase_params
    assert context.ids == whole.ids[:1] and handoff
    generation = call(CallKind.GENERATION_ONLY, "g", context_phase_params=handoff, kv_peer=rig.kv_peer)
    heard = await rig.run(13, generation)
    assert heard.ids == whole.ids and heard.events[-1] == "end"


async def check_release(rig: Rig) -> None:
    """A released handoff is lost for a later call. A second release is no error."""

    async def held(count: int) -> None:
        """Wait until the engine reports `count` handoffs, if it reports load. A release has no answer of its own."""
        await rig.until(lambda: rig.sink.load is None or rig.sink.load.handoffs_held == count)

    await held(0)
    context = await rig.run(21, call(CallKind.CONTEXT_ONLY, "c"))
    assert context.first is not None
    handoff = context.first.context_phase_params
    await held(1)
    for _ in range(2):
        rig.engine.release(handoff)
    await held(0)
    generation = call(CallKind.GENERATION_ONLY, "g", context_phase_params=handoff, kv_peer=rig.kv_peer)
    heard = await rig.run(22, generation)
    assert heard.events == ["error"] and isinstance(heard.error, HandoffLost)


async def check_cancel(rig: Rig) -> None:
    """A cancelled call has no more events and leaves no state, at any time of the cancel. Unknown ids are ignored."""
    for number, kind in enumerate((CallKind.CONTEXT_ONLY, CallKind.CONTEXT_AND_GENERATION) * 5):
        call_id = 31 + number
        rig.engine.start(call_id, call(kind, f"x{number}", max_output_tokens=60))
        for _ in range(number):
            rig.work()
            await asyncio.sleep(0.002)
        heard = list(rig.sink.heard(call_id).events)
        rig.engine.cancel(call_id)
        rig.engine.cancel(call_id)
        if heard and heard[-1] == "end" and kind is CallKind.CONTEXT_ONLY:
            first = rig.sink.heard(call_id).first
            assert first is not None
            rig.engine.release(first.context_phase_params)
        await asyncio.sleep(0.01)
        assert rig.sink.heard(call_id).events == heard
    rig.engine.cancel(999)
    await rig.until(lambda: rig.engine.open_calls() == 0)
    await rig.until(
        lambda: (
            rig.sink.load is None
            or (
                rig.sink.load.blocks_free == rig.sink.load.blocks_total
                and not rig.sink.load.handoffs_held
                and not rig.sink.load.sequences_running
            )
        )
    )


CHECKS = (check_whole, check_handoff, check_release, check_cancel)
