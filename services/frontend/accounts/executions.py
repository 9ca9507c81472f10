"""Numbers the executions of a request by compare-and-set in Redis, and announces higher ones (fencing tokens).

`{mesh}:exec:<request id>` is a hash that expires. It is created for a request that is resumed or has an idempotency key,
and at the settlement. A request with neither can have no other execution and starts without asking Redis. A request also
starts if Redis is unavailable, slow or lost its data: decode fences by attempt numbers (decision 0010).

All claims of a process share one connection. Claims that arrive while one batch is in flight form the next batch. When a
frontend dies, the claims of its streams arrive all at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeAlias

from kvmesh.clock import Clock
from kvmesh.errors import MeshError, Violation, invalid
from kvmesh.redis_link import RedisLink, RedisUnavailable, key
from kvmesh.redis_script import Call, Script
from kvmesh.tasks import end, persist
from services.frontend.accounts.budgets.batcher import ANSWER_S
from services.frontend.requests import faults
from services.frontend.requests.request_spec import EarlierExecution
from services.frontend.requests.resume_token import EPOCH_MAX

log = logging.getLogger(__name__)

_BEGIN: Final = Script.beside(__file__, "begin_execution.lua")

PAUSE_S: Final = 1.0
"""Time after a timeout or a lost connection in which requests start without asking Redis (open circuit)."""

AGAIN_MAX: Final = 3
"""Executions of a request after its good end, because the client may have lost its answer."""

BATCH_MAX: Final = 128

SLACK_S: Final = 60.0
"""Time for which the record of a request outlives its longest runtime."""


ANY_POOL: Final = "*"
"""Stands for every pool in `Claim.replaced_pool`. No pool has this name."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim to execute a request."""

    request_id: str
    digest: int
    """Digest of all that shapes the output: two requests with one id must be equal."""
    seed: int
    is_seed_asked: bool
    """True if the client gave the seed."""
    epoch: int
    """Least number of the execution."""
    owner: str
    inherited: int = 0
    """Output tokens of the predecessor, which pays for them."""
    predecessor: int = -1
    """Epoch of the predecessor by the client's token; -1: the client has no token."""
    age_s: float = 0.0
    """Age of the client's resume token, in seconds; infinite if the token has no time of issue, 0 without a token."""
    pool: str = ""
    """Pool that the execution claims for the request; empty: the mesh has one pool."""
    stable_pool: str = ""
    """Pool of a record without a pool: release 0.1.0 made it."""
    replaced_pool: str = ""
    """Claimed pool that `pool` replaces, because it cannot place. ANY_POOL: whichever it is."""
    asked: str = ""
    """Digest of the request before its tokenizing. It names the request where another pool has another tokenizer.

    Empty: the claim has a resume token, which proves the request."""
    is_continued: bool = False
    """True: the client has the beginning of the output, so the request must have a record."""


@dataclass(frozen=True, slots=True)
class Execution:
    """One execution of a request."""

    epoch: int
    seed: int
    is_fenced: bool
    """True if Redis gave the number (fencing): no other execution has it, and earlier ones were notified."""
    earlier: tuple[EarlierExecution, ...] = ()
    """Executions without a report, from the predecessor on."""
    is_shown: bool = True
    """False if the client's token is older than the record, and thus proves no output of the predecessor."""


class PoolClaimed(Exception):
    """An earlier execution of the request claimed another pool. No execution began."""

    def __init__(self, pool: str) -> None:
        super().__init__(pool)
        self.pool = pool


Answer: TypeAlias = list[Any] | None
"""Answer of Redis to a claim; None without one."""


def key_reused() -> MeshError:
    """Return the error of a request whose idempotency key another request has."""
    what = "used by another request within the last minutes"
    return invalid("IDEMPOTENCY_KEY_REUSED", [Violation("idempotency_key", what, "one key for one request")])


class Executions:
    """Numbers executions. `on_news(request_id, epoch, owner)` is called for every announced execution (epoch > 0).

    Announcements of this frontend's own executions arrive too. An execution with a claim that was answered too late gets
    its number from its own announcement.
    """

    def __init__(
        self,
        redis: RedisLink,
        mesh: str,
        boot_id: str,
        clock: Clock,
        runtime_max_s: float,
        on_news: Callable[[str, int, str], None],
        *,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.unfenced_total = 0
        """Requests that started without a number from Redis."""
        self._redis = redis
        self._mesh = mesh
        self._boot_id = boot_id
        self._clock = clock
        self._ttl_ms = ttl_ms(runtime_max_s)
        self._on_news = on_news
        self._answer_s = answer_s
        self._channel = key(mesh, "exec-news")
        self._numbers = itertools.count(1)
        self._waiting: dict[str, tuple[Claim, asyncio.Future[Answer]]] = {}
        """Claims to send, by owner; also those of requests that stopped waiting."""
        self._sending: asyncio.Task[None] | None = None
        self._answered_total = 0
        """Claims that Redis answered."""
        self._pause_until_s = float("-inf")

    def new_owner(self) -> str:
        """Return a unique name for an execution."""
        return f"{self._boot_id}-{next(self._numbers)}"

    async def begin(self, claim: Claim) -> Execution:
        """Return a new execution with its number; earlier executions of the request end at their frontends.

        Without an answer of Redis in time, the number is the claim's, and not fenced. Raises MeshError if another request
        has the name (IDEMPOTENCY_KEY_REUSED), if the request has used up its repeated executions (ALREADY_FINISHED), or
        if it must have a record and has none (RESUME_NOT_EXACT).
        Raises PoolClaimed if the claim names another pool than an earlier execution.
        """
        answer = await self._ask(claim)
        if answer is None:
            self.unfenced_total += 1
            return Execution(claim.epoch, claim.seed, is_fenced=False, is_shown=not self._is_old(claim))
        word = bytes(answer[0])
        if word == b"POOL":
            raise PoolClaimed(bytes(answer[1]).decode(errors="replace"))
        if word == b"DIFFERS":
            raise key_reused()
        if word == b"UNKNOWN":
            raise faults.not_exact("no earlier execution of its idempotency key is known")
        if word == b"ENDED":
            raise MeshError(
                "ALREADY_FINISHED", f"the request has ended well and was executed again {AGAIN_MAX} times"
            )
        rest, is_shown = answer[3:], word != b"UNSHOWN"
        earlier = tuple(
            EarlierExecution(
                bytes(owner).decode(),
                int(inherited),
                is_shown and int(epoch) == claim.predecessor,
                int(given or 0),
            )
            for owner, epoch, inherited, given in zip(*(rest[at::4] for at in range(4)), strict=True)
        )
        return Execution(int(answer[1]), int(answer[2]), is_fenced=True, earlier=earlier, is_shown=is_shown)

    def _is_old(self, claim: Claim) -> bool:
        """True if the claim's token is older than the life of a record: the executions of its time are over."""
        return claim.age_s * 1000 > self._ttl_ms

    def forget(self, owner: str) -> None:
        """Drop the unsent claim of the execution `owner`, which is over and must not end a later one."""
        self._waiting.pop(owner, None)

    async def run(self) -> None:
        """Follow the announcements of executions until cancelled. No answer of Redis ends it."""
        try:
            await persist(self._follow, "news of executions", pause_s=0.25)
        finally:
            if self._sending is not None:
                await end((self._sending,))

    async def _ask(self, claim: Claim) -> Answer:
        if self._clock.now_s() < self._pause_until_s:
            return None
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[claim.owner] = claim, answer
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send(), name="executions-begin")
        before = -1
        try:
            while not answer.done() and before != self._answered_total:
                before = self._answered_total
                await asyncio.wait((answer,), timeout=self._answer_s)
        except asyncio.CancelledError:
            self.forget(claim.owner)
            raise
        if not answer.done() or (answer.result() is None and not self._redis.is_connected):
            self._pause_until_s = self._clock.now_s() + PAUSE_S
        return answer.result() if answer.done() else None

    async def _send(self) -> None:
        """Send all waiting claims, batch by batch, over one connection."""
        while self._waiting:
            batch = list(islice(self._waiting.values(), BATCH_MAX))
            for claim, _ in batch:
                del self._waiting[claim.owner]
            answers: list[Answer] = [None] * len(batch)
            try:
                answers = await self._answers([claim for claim, _ in batch])
                self._answered_total += sum(each is not None for each in answers)
            finally:
                for (_, waiter), answer in zip(batch, answers, strict=True):
                    if not waiter.done():
                        waiter.set_result(answer)

    async def _answers(self, claims: list[Claim]) -> list[Answer]:
        try:
            return await self._redis.scripts(_BEGIN, [self._call(each) for each in claims])
        except RedisUnavailable:
            if not self._redis.is_connected or len(claims) == 1:
                return [None] * len(claims)
        # Redis rejects at least one claim. The others may get a second number, which does no harm.
        return [(await self._answers([each]))[0] for each in claims]

    def _call(self, claim: Claim) -> Call:
        return (execution_key(self._mesh, claim.request_id),), (
            claim.epoch,
            f"{claim.digest:016x}",
            claim.seed,
            int(claim.is_seed_asked),
            claim.owner,
            EPOCH_MAX,
            self._ttl_ms,
            self._channel,
            claim.request_id,
            claim.inherited,
            claim.predecessor,
            int(self._is_old(claim)),
            claim.pool,
            claim.stable_pool,
            claim.replaced_pool,
            claim.asked,
            int(claim.is_continued),
        )

    async def _follow(self) -> None:
        subscription = self._redis.subscription()
        try:
            await self._redis.guarded(subscription.subscribe(self._channel))
            while True:
                news = await self._redis.guarded(subscription.get_message(timeout=1.0))
                data = news.get("data") if news else None
                if isinstance(data, bytes):
                    self._take(data)
        finally:
            with suppress(Exception):  # errors of a broken connection are known
                await subscription.aclose()

    def _take(self, data: bytes) -> None:
        request_id, epoch, owner, *_ = (*data.decode(errors="replace").split(" "), "", "")
        if epoch.isdecimal():
            self._on_news(request_id, int(epoch), owner)
        else:
            log.warning("news of executions cannot be read: %.80r", data)


def execution_key(mesh: str, request_id: str) -> str:
    """Return the Redis key of a request's executions."""
    return key(mesh, "exec", request_id)


def ttl_ms(runtime_max_s: float) -> int:
    """Return the life of a request's record, in milliseconds."""
    return round((runtime_max_s + SLACK_S) * 1000)
