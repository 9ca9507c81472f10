"""Checks of the load that an engine tells, and of the blocks that cancelled calls leave."""

from __future__ import annotations

import asyncio
from typing import Final

from kvmesh.conformance import engine_state, freeing
from kvmesh.conformance.check import CHECK_S, Check, Need, input_need
from kvmesh.conformance.engine_state import EngineState
from kvmesh.conformance.fallbacks import FALLBACKS
from kvmesh.conformance.judgements import must
from kvmesh.conformance.recording import Recording
from kvmesh.conformance.session import Moment, random_moment
from kvmesh.conformance.trial import Trial
from kvmesh.conformance.verdict import Verdict, failed, passed

HEARTBEAT_S: Final = 3.0
"""A replica takes an engine without a load report for twice this time as lost."""

REPORTS: Final = 3

LEAVE_S: Final = 30.0
"""Longest time until nothing of the random cancels is left, requests of others included."""

CANCEL_S: Final = 0.5
"""Time that one of the random cancels may take, on average."""

_CANCEL_AFTER: Final = 2
"""Responses before the cancel of a single call."""


async def _reports(trial: Trial) -> Verdict:
    async with trial.engine.subscribed("load_report") as messages:
        for count in range(REPORTS):
            report = await messages.get(HEARTBEAT_S)
            if report is None:
                ended = f"; the subscription ended: {messages.error or 'without an error'}"
                seen = f"{count} load reports came, {REPORTS} must come within {HEARTBEAT_S:g} s each"
                return failed(seen + (ended if messages.is_over else ""))
            if fault := engine_state.report_fault(report, trial.offer.kv_blocks):
                return failed(fault)
    return passed("all fields, and a heartbeat")


async def _freed(trial: Trial, moment: Moment) -> Verdict:
    """Cancel one call, and judge when its blocks are free."""

    async def cancel(_: EngineState) -> None:
        answer = await trial.engine.cancelled(trial.prompt(), trial.share.single_tokens, moment)
        must(_cancel_fault(answer))

    return await freeing.freed(trial, "after a cancel", cancel)


async def _cancelled_stream(trial: Trial) -> Verdict:
    return await _freed(trial, Moment(responses=_CANCEL_AFTER))


async def _stopped(trial: Trial) -> Verdict:
    return await _freed(trial, Moment(responses=_CANCEL_AFTER, by_stop=True))


async def _random_cancels(trial: Trial) -> Verdict:
    start = await trial.watched.begin()
    chance, has_stop = trial.prompts.chance(), "stop" in trial.offer.inputs
    faults: list[str] = []
    left = trial.settings.cancels

    async def cancel_some() -> None:
        nonlocal left
        while left and not faults:
            left -= 1
            moment = random_moment(chance, has_stop=has_stop)
            answer = await trial.engine.cancelled(trial.prompt(), trial.share.cancelled_tokens, moment)
            if fault := _cancel_fault(answer):
                faults.append(f"{fault} ({moment})")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(trial.share.concurrency):
            tasks.create_task(cancel_some())
    if faults:
        return failed(faults[0])
    seen = await trial.watched.until_back(start, LEAVE_S)
    return engine_state.freed(f"after {trial.settings.cancels} cancels", seen, LEAVE_S)


def _cancel_fault(answer: Recording) -> str:
    """Return why a cancelled call ended wrongly. A call that has ended before its cancel is right."""
    if answer.error is not None:
        return f"a cancelled call failed: {type(answer.error).__name__}: {answer.error}"
    return ""


def cancels_s(cancels: int) -> float:
    """Return the timeout of the check with random cancels."""
    return CHECK_S + CANCEL_S * cancels


_REPORTS: Final = Need(
    lambda offer: "load_report" in offer.outputs, "output load_report", FALLBACKS["load_report"]
)
_STOP: Final = input_need("stop", FALLBACKS["stop"])

CHECKS: Final = (
    Check("load_report", "shape", _reports, _REPORTS),
    Check("cancel", "a cancelled stream frees its blocks", _cancelled_stream, needs_watch=True),
    Check("cancel", "a stop request frees the blocks of its call", _stopped, _STOP, needs_watch=True),
)


def random_cancels(cancels: int) -> Check:
    """Return the check of calls that are cancelled at random moments."""
    name = f"{cancels:,} cancels at random moments leave nothing"
    return Check("cancel", name, _random_cancels, needs_watch=True, timeout_s=cancels_s(cancels))
