"""Runs the checks one after the other, each with a timeout, and ends what each has left open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from kvmesh.conformance.check import Check
from kvmesh.conformance.judgements import told
from kvmesh.conformance.session import Session
from kvmesh.conformance.trial import Trial
from kvmesh.conformance.verdict import Judged, Outcome, Row, Verdict, failed, not_judged, not_offered
from kvmesh.triton.errors import CallError, EngineError, EngineLost, EngineStalled

LOST_S: Final = 5.0
"""Time in which a server must answer behind a check that failed."""

Progress = Callable[[Check, Row | None], None]
"""Is told of each check: before it with None, and then with its row."""

NO_WATCH: Final = "the engine has no load report, and no metrics were given: --metrics HOST:PORT"
NO_PAIR: Final = "--pair HOST:PORT names the engine that decodes"
HOSTILE: Final = "an engine that does not check it may end: --hostile sends it"
LOST: Final = "the engine does not answer any more"


async def run_checks(trial: Trial, checks: Sequence[Check], progress: Progress) -> list[Row]:
    """Return a row for each check. Cancelling the task ends everything that it has started."""
    rows: list[Row] = []
    is_lost = False
    try:
        for check in checks:
            progress(check, None)
            begun_s = asyncio.get_running_loop().time()
            verdict = not_judged(LOST) if is_lost else await _verdict(trial, check)
            row = Row(check.capability, check.name, verdict, asyncio.get_running_loop().time() - begun_s)
            rows.append(row)
            progress(check, row)
            if verdict.outcome is Outcome.FAIL and not is_lost:
                is_lost = not await _serve(trial)
    finally:
        for session in _sessions(trial):
            await session.close()
    return rows


def obstacle(trial: Trial, check: Check) -> Verdict | None:
    """Return the verdict on a check that cannot be run; None: it can."""
    if check.need is not None and not check.need.is_offered(trial.offer):
        return not_offered(f"{check.need.lacks} is missing", check.need.fallback)
    if check.needs_pair and trial.pair is None:
        return not_judged(NO_PAIR)
    if check.needs_watch and trial.watch is None:
        return not_judged(NO_WATCH)
    if check.is_hostile and not trial.settings.is_hostile:
        return not_judged(HOSTILE)
    return None


async def _verdict(trial: Trial, check: Check) -> Verdict:
    if (found := obstacle(trial, check)) is not None:
        return found
    timeout_s = trial.settings.check_s or check.timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            return await check.run(trial)
    except Exception as error:  # noqa: BLE001  # whatever an engine sends, the table has a row
        return _verdict_on(error, timeout_s)
    finally:
        for session in _sessions(trial):
            await session.close()


def _verdict_on(error: Exception, timeout_s: float) -> Verdict:
    """Return the verdict on a check that ended with `error`."""
    if isinstance(error, ExceptionGroup):  # of tasks of the check
        return _verdict_on(error.exceptions[0], timeout_s)
    if isinstance(error, Judged):
        return error.verdict
    if isinstance(error, CallError):
        return failed(told(error))
    if isinstance(error, TimeoutError):
        return failed(f"no end within {timeout_s:g} s")
    return failed(f"the check cannot read what came: {told(error)}")


async def _serve(trial: Trial) -> bool:
    """True if all engines answer a call of one token, with tokens or an error."""
    for session in _sessions(trial):
        if not await session.client.is_ready(LOST_S):
            return False
        try:
            answer = await session.ask(trial.prompt(), 1)
        except EngineError:  # it answers, although what came cannot be read
            continue
        if isinstance(answer.error, EngineLost | EngineStalled):
            return False
    return True


def _sessions(trial: Trial) -> list[Session]:
    return [trial.engine] if trial.pair is None else [trial.engine, trial.pair]
