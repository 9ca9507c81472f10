"""Holds a process back from serving until its start conditions hold: health reason, log line, metrics.

`StartConditions` decides. Router and frontend state their conditions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

from kvmesh.clock import Clock
from kvmesh.metrics import Metrics
from kvmesh.start_conditions import StartConditions

log = logging.getLogger(__name__)

POLL_S: Final = 0.01


def export_start(conditions: StartConditions, metrics: Metrics) -> None:
    """Export each condition: its seconds, and whether the process serves without it."""

    def is_missed(name: str) -> float:
        return float(conditions.is_over and name in conditions.unmet)

    for name in conditions.names:
        label = name.replace(" ", "_")
        text = "Seconds from the start until the condition held; 0 if it does not hold."
        metrics.gauge("start_condition_seconds", text, partial(conditions.seconds, name), condition=label)
        text = "1 if the start ended without the condition, else 0."
        metrics.gauge("start_condition_missed", text, partial(is_missed, name), condition=label)


async def wait_for_start(
    conditions: StartConditions,
    holds: Callable[[float], Mapping[str, bool]],
    clock: Clock,
    tell: Callable[[str], Awaitable[None]],
) -> None:
    """Return once the start is over. `holds(now_s)` returns the present state of each condition.

    `tell` takes the reason why the process does not serve yet, after each change.
    """
    told = ""
    while not conditions.check(now_s := clock.now_s(), holds(now_s)):
        if conditions.reason() != told:
            told = conditions.reason()
            await tell(told)
        await asyncio.sleep(POLL_S)
    about = {"seconds": conditions.durations()}
    if conditions.unmet:
        log.warning("start timed out: serving without %s", ", ".join(conditions.unmet), extra=about)
    else:
        log.info("start conditions hold", extra=about)
