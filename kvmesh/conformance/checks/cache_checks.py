"""Checks of the prefix cache: KV events, and reused blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvmesh.conformance.check import Check, Need, capability_need
from kvmesh.conformance.event_log import EventLog
from kvmesh.conformance.fallbacks import FALLBACKS
from kvmesh.conformance.judgements import must
from kvmesh.conformance.session import Messages
from kvmesh.conformance.trial import Trial
from kvmesh.conformance.verdict import Judged, Verdict, failed, judged, not_judged, not_offered, passed

SNAPSHOT_S: Final = 20.0
EVENT_S: Final = 3.0
"""Time within which an event tells a block."""

SEEN: Final = "An earlier run had the same --seed"

KV_EVENTS: Final = "kv_events"


async def _take(messages: Messages, log: EventLog, is_enough: Callable[[], bool], wait_s: float) -> bool:
    """Take messages until `is_enough`. Return False if the time is over, or the stream has ended."""
    ends_s = asyncio.get_running_loop().time() + wait_s
    while not is_enough():
        message = await messages.get(max(0.0, ends_s - asyncio.get_running_loop().time()))
        if message is None:
            if messages.error is not None:
                raise Judged(failed(f"the subscription failed: {messages.error}"))
            return False
        log.add(message)
        must(log.fault)
    return True


async def _snapshot(messages: Messages, log: EventLog) -> None:
    """Take the snapshot. Raises Judged if it does not come."""
    if not await _take(messages, log, lambda: log.is_complete, SNAPSHOT_S):
        raise Judged(failed(f"no whole snapshot came within {SNAPSHOT_S:g} s"))


async def _told(trial: Trial) -> tuple[tuple[int, ...], str, Verdict]:
    """Ask a new prompt. Return it, the position before it, and the verdict on the events about it."""
    log, prompt, width = EventLog(), trial.long_prompt(), trial.block_tokens
    async with trial.engine.subscribed(KV_EVENTS) as messages:
        await _snapshot(messages, log)
        if not log.chain_fault(prompt, width):
            raise Judged(not_judged(f"the blocks were in the cache before. {SEEN}"))
        before = log.position()
        await trial.good(prompt, 2)
        is_told = await _take(messages, log, lambda: not log.chain_fault(prompt, width), EVENT_S)
    fault = "" if is_told else f"{EVENT_S:g} s after the answer, {log.chain_fault(prompt, width)}"
    return prompt, before, judged(fault, f"{len(prompt) // width} blocks with their tokens and parents")


async def _events(trial: Trial) -> Verdict:
    return (await _told(trial))[2]


async def _resumed(trial: Trial) -> Verdict:
    prompt, before, _ = await _told(trial)
    log, width = EventLog(), trial.block_tokens
    log.event_id = int(before.rpartition(":")[2])
    async with trial.engine.subscribed(KV_EVENTS, after=before) as messages:
        is_told = await _take(
            messages, log, lambda: log.has_snapshot or not log.chain_fault(prompt, width), EVENT_S
        )
    if log.has_snapshot:
        return not_offered("a snapshot comes in place of the events behind `after`", FALLBACKS["after"])
    return judged(
        "" if is_told else log.chain_fault(prompt, width), "the events behind `after`, without a gap"
    )


async def _bounded(trial: Trial) -> Verdict:
    log = EventLog()
    async with trial.engine.subscribed(KV_EVENTS, max_bytes="1") as messages:
        await _snapshot(messages, log)
        await trial.good(trial.long_prompt(), 2)
        await _take(messages, log, lambda: messages.is_over, EVENT_S)
        if messages.is_over:
            return passed("the subscription ends behind max_bytes")
    return not_offered("the subscription goes on behind max_bytes", FALLBACKS["max_bytes"])


async def _reused(trial: Trial) -> Verdict:
    prompt = trial.long_prompt()
    first, second = [(await trial.good(prompt, 2)).reused_blocks for _ in range(2)]
    if first is None or second is None:
        return not_offered("responses lack kv_cache_reused_blocks", FALLBACKS["reuse"])
    if first:
        return not_judged(f"{first} blocks were in the cache before. {SEEN}")
    return judged(
        "" if second else "0 blocks were reused the second time", f"{second} blocks the second time"
    )


_METRICS: Final = Need(
    lambda offer: "kv_cache_reused_blocks" in offer.outputs and "return_perf_metrics" in offer.inputs,
    "input return_perf_metrics with output kv_cache_reused_blocks",
    FALLBACKS["reuse"],
)
_EVENTS: Final = capability_need("kv_events", "output kv_events")

CHECKS: Final = (
    Check("reuse", "a long prompt, asked twice", _reused, _METRICS),
    Check("kv_events", "the blocks of a new prompt", _events, _EVENTS),
    Check("kv_events", "after resumes", _resumed, _EVENTS),
    Check("kv_events", "max_bytes ends", _bounded, _EVENTS),
)
