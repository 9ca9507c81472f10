"""What a request is charged: every token once, whichever frontends executed it, and however often.

A shell. Each execution that ends for its client reports what the client was given of the whole request; Redis keeps the
highest that was settled and charges what lies above it. So a request that went through three frontends is charged once;
one that was given up, or that a later execution has superseded, is charged what was streamed; an execution that died
charges nothing. Recomputed tokens are counted and never charged.

Reports wait in memory while Redis is away or takes none, WAITING_MAX of them; the oldest are dropped, which charges the
client less. So is a report that Redis calls wrong.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from kvmesh.redis_link import Command, RedisAway, RedisLink
from kvmesh.tasks import persist
from services.frontend.executions import AGAIN_MAX, execution_key, ttl_ms

log = logging.getLogger(__name__)

WAITING_MAX: Final = 65_536
BATCH_MAX: Final = 128

GATHER_S: Final = 0.05
"""A frontend that is killed charges nothing for what ended in its last moments."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one execution gave its client, counted from the request's beginning."""

    request_id: str
    epoch: int
    owner: str
    """Name of the execution: the same report sent twice counts once."""
    prompt_tokens: int
    output_tokens: int
    recomputed_tokens: int
    is_complete: bool
    """True if the request ended well."""


@dataclass(frozen=True, slots=True)
class Charge:
    """What a report added to what was settled before."""

    prompt_tokens: int
    output_tokens: int
    recomputed_tokens: int
    """Told apart; not charged."""
    is_superseded: bool
    """True if a later execution is known: that one decides whether the request has ended well."""


class Settlements:
    """Takes reports at any time and settles them in Redis while `run` runs. `on_charge` hears of each, once."""

    def __init__(
        self, redis: RedisLink, mesh: str, runtime_max_s: float, on_charge: Callable[[Charge], None]
    ) -> None:
        self.dropped_total = 0
        """Reports that were never settled."""
        self._redis = redis
        self._mesh = mesh
        self._ttl_ms = ttl_ms(runtime_max_s)
        self._on_charge = on_charge
        self._waiting: deque[Report] = deque()
        self._ready = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, report: Report) -> None:
        """Settle `report` as soon as Redis takes it."""
        if len(self._waiting) >= WAITING_MAX:
            self._waiting.popleft()
            self.dropped_total += 1
        self._waiting.append(report)
        self._empty.clear()
        self._ready.set()

    async def run(self) -> None:
        """Settle what waits, until cancelled. No answer of Redis ends it."""
        await persist(self._settle, "settlement", pause_s=0.25)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits, at most `timeout_s`; return whether that is so."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def _settle(self) -> None:
        while True:
            if not self._waiting:
                self._ready.clear()
                self._empty.set()
                await self._ready.wait()
                await asyncio.sleep(GATHER_S)  # what ends together is settled in one round trip
            batch = list(islice(self._waiting, BATCH_MAX))
            try:
                answers = await self._redis.pipeline([self._command(each) for each in batch])
            except RedisAway as away:
                if away.may_pass:
                    raise
                answers = [await self._alone(each) for each in batch]
            for report, answer in zip(batch, answers, strict=True):
                if self._waiting and self._waiting[0] is report:  # else it was dropped meanwhile
                    self._waiting.popleft()
                if answer is not None:
                    self._take(report, answer)

    async def _alone(self, report: Report) -> Any:
        """Settle one report of a batch in which Redis refused something."""
        try:
            return await self._redis.execute(*self._command(report))
        except RedisAway as away:
            if away.may_pass:
                raise
            self.dropped_total += 1
            return None

    def _command(self, report: Report) -> Command:
        return (
            "EVAL",
            _SETTLE,
            1,
            execution_key(self._mesh, report.request_id),
            report.epoch,
            report.owner,
            report.prompt_tokens,
            report.output_tokens,
            AGAIN_MAX if report.is_complete else "",
            self._ttl_ms,
        )

    def _take(self, report: Report, answer: Any) -> None:
        word, prompt, output = answer
        is_superseded = bytes(word) == b"SUPERSEDED"
        self._on_charge(Charge(int(prompt), int(output), report.recomputed_tokens, is_superseded))


_SETTLE: Final = """
local known = redis.call('HMGET', KEYS[1], 'epoch', 'owner', 'settler', 'prompt', 'output', 'prompt_last', 'output_last')
local epoch, word = tonumber(ARGV[1]), 'SETTLED'
if known[1] and tonumber(known[1]) > epoch and known[2] ~= ARGV[2] then word = 'SUPERSEDED' end
if known[3] == ARGV[2] then return {word, tonumber(known[6]), tonumber(known[7])} end
local prompt, output = tonumber(known[4] or '0'), tonumber(known[5] or '0')
local prompt_more = math.max(0, tonumber(ARGV[3]) - prompt)
local output_more = math.max(0, tonumber(ARGV[4]) - output)
redis.call('HSET', KEYS[1], 'epoch', math.max(epoch, tonumber(known[1] or '0')), 'settler', ARGV[2],
  'prompt', prompt + prompt_more, 'output', output + output_more,
  'prompt_last', prompt_more, 'output_last', output_more)
if ARGV[5] ~= '' and word == 'SETTLED' then redis.call('HSETNX', KEYS[1], 'again', ARGV[5]) end
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return {word, prompt_more, output_more}
"""
"""KEYS: the request. ARGV: epoch, owner, tokens of the prompt, of the output, executions it may have after its good end or
nothing, life in ms. Returns whether it counts, and the tokens of prompt and output that were charged for it."""
