"""Runs an action after which an engine must hold no more than before, and judges its way back.

A single request of another client may look like what the action has left. So an action that seems to fail is repeated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from kvmesh.conformance import engine_state
from kvmesh.conformance.engine_state import EngineState
from kvmesh.conformance.trial import Trial
from kvmesh.conformance.verdict import Outcome, Verdict, not_judged

ATTEMPTS: Final = 3
WATCH_S: Final = 5.0
"""Time for which blocks that are not back are watched."""

REPEAT_S: Final = 10.0
"""Longest wait for a quiet engine before the action is repeated."""


async def freed(trial: Trial, what: str, act: Callable[[EngineState], Awaitable[None]]) -> Verdict:
    """Judge whether the engine is back at its state within `free_s` after `act`, in one of some attempts.

    `act` gets the state before it. `what`: beginning of the sentence of a fail.
    """
    watch = trial.watched
    bound_s = trial.settings.free_s + watch.source.look_s
    verdict = not_judged("other requests ran")
    for attempt in range(ATTEMPTS):
        start = await watch.begin(REPEAT_S) if attempt else await watch.begin()
        if attempt and not watch.was_quiet:
            break
        await act(start)
        verdict = engine_state.freed(what, await watch.until_back(start, WATCH_S), bound_s)
        if verdict.outcome is Outcome.PASS:
            break
    return verdict
