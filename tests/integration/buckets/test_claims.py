"""A large request beside many small ones of the same tenant, on the real script: it is admitted after its Retry-After."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from kvmesh.buckets.ledger import Ledger
from kvmesh.buckets.limits import Account, Limit, Scope
from kvmesh.buckets.operations import (
    Answer,
    Denied,
    Draw,
    Drawn,
    Granted,
    Operation,
    Reserve,
    Show,
    Shown,
)
from kvmesh.redis_link import RedisLink

RATE, BURST = 60_000, 10_000
STEP_MS = 10
RETRY_LATE_MAX = 1.25
"""A client retries up to a fifth later than its Retry-After, and the operation takes time, too."""

ORGANISATION = Scope("organisation:acme", Limit(0, 0, 10 * RATE, 10 * BURST, 0))
MINE = Account("acme", (ORGANISATION, Scope("tenant:search", Limit(0, 0, RATE, BURST, 0))))


@dataclass
class Tenant:
    """Small requests that take every token that flows in, and a quota lease that draws tokens, too."""

    ledger: Ledger
    draw: random.Random
    now_ms: list[int]
    taken: list[tuple[int, int]] = field(default_factory=list)
    """(time, tokens) per admission."""
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    lease_tokens: int = 0
    lease_used: int = 0
    draws: int = 0

    async def one(self, operation: Operation) -> Answer:
        """Run one operation."""
        return (await self.ledger.run([operation]))[0]

    async def reserve(self, tokens: int) -> Answer:
        """Reserve tokens for one request."""
        answer = await self.one(Reserve(MINE, f"r{next(self.numbers)}", tokens, 3600.0))
        if isinstance(answer, Granted):
            self.taken.append((self.now_ms[0], tokens))
        return answer

    async def step(self) -> None:
        """Advance the clock and send small requests."""
        self.now_ms[0] += STEP_MS
        await self.reserve(self.draw.randint(1, 400))
        if self.draw.random() < 0.2:
            self.lease_used += self.lease_tokens
            self.draws += 1
            asked = Draw(MINE, "lease", self.draws, self.lease_used, 0, 500, 0, 0, 3600.0)
            drawn = await self.one(asked)
            assert isinstance(drawn, Drawn)
            self.lease_tokens = drawn.tokens
            if drawn.tokens:
                self.taken.append((self.now_ms[0], drawn.tokens))


@pytest_asyncio.fixture
async def link(redis_url: str) -> AsyncIterator[RedisLink]:
    """A link."""
    link = RedisLink(redis_url)
    yield link
    await link.close()


def tenant(link: RedisLink, seed: int) -> Tenant:
    """A tenant on a clock that the test sets."""
    now_ms = [1_790_000_000_000]
    return Tenant(
        Ledger(link, f"claims-{seed}", test_clock_ms=lambda: now_ms[0]), random.Random(seed), now_ms
    )


@pytest.mark.parametrize("seed", range(2))
async def test_a_large_request_is_admitted_after_its_retry_after(link: RedisLink, seed: int) -> None:
    """For each size above half of the burst, and each delay within the allowed one. No window exceeds the limit, and
    the small requests get a Retry-After for their wait.
    """
    mine = tenant(link, seed)
    for _ in range(300):
        await mine.step()  # the saved tokens are gone
    for _ in range(3):
        large, asked_ms = mine.draw.randint(BURST // 2 + 1, BURST), mine.now_ms[0]
        denied = await mine.reserve(large)
        assert isinstance(denied, Denied) and denied.wait_s is not None and denied.wait_s <= BURST * 60 / RATE
        back_ms = mine.now_ms[0] + denied.wait_s * 1000 * mine.draw.uniform(1.0, RETRY_LATE_MAX)
        while mine.now_ms[0] < back_ms:
            await mine.step()
        small = await mine.reserve(100)
        assert isinstance(small, Denied) and small.is_claimed and small.wait_s is not None
        assert isinstance(await mine.reserve(large), Granted)
        after = await mine.reserve(1)
        assert not (isinstance(after, Denied) and after.is_claimed)
        let_in_ms = mine.now_ms[0]
        while mine.now_ms[0] - let_in_ms < let_in_ms - asked_ms:
            await mine.step()  # as long as they were rejected
    for first, (begin_ms, _) in enumerate(mine.taken):
        tokens = 0
        for at_ms, each in mine.taken[first:]:
            tokens += each
            assert tokens <= BURST + (at_ms - begin_ms) * RATE / 60_000 + 1


@pytest.mark.parametrize("gives_up", [True, False])
async def test_claims_block_small_requests_at_most_half_of_the_time(link: RedisLink, gives_up: bool) -> None:
    """Small requests are rejected at most as long as they are admitted, whether large requests come again or give up."""
    mine = tenant(link, 77)
    for _ in range(150):
        await mine.step()
    held, large, steps = 0, 0, 6300
    for at in range(steps):
        await mine.step()
        if at % 7 == 0:
            shown = await mine.one(Show(MINE))
            assert isinstance(shown, Shown) and shown.uses[-1].tokens is not None
            if not gives_up or shown.uses[-1].tokens < BURST - 1:
                large += isinstance(await mine.reserve(BURST - 1), Granted)
        answer = await mine.reserve(1)
        held += isinstance(answer, Denied) and answer.is_claimed
    assert 0.3 * steps < held < 0.55 * steps and (large == 0) == gives_up


async def test_the_limit_of_an_organisation_cannot_be_claimed(link: RedisLink) -> None:
    """A claim of one tenant on the organisation's limit blocks no other tenant."""
    mine = tenant(link, 78)
    limit = Limit(0, 0, RATE, BURST, 0)
    first, second = (
        Account("acme", (Scope("organisation:acme", limit), Scope(name, Limit(0, 0, 10 * RATE, BURST, 0))))
        for name in ("tenant:search", "tenant:chat")
    )
    assert isinstance(await mine.one(Reserve(first, "all", BURST - 500, 15)), Granted)
    denied = await mine.one(Reserve(first, "much", BURST - 500, 15))
    assert isinstance(denied, Denied) and denied.scope == "organisation:acme"
    assert isinstance(await mine.one(Reserve(second, "little", 100, 15)), Granted)


async def test_a_clock_that_steps_back_ends_a_claim(link: RedisLink) -> None:
    """A clock step of an hour delays no request by an hour."""
    mine = tenant(link, 79)
    await mine.reserve(BURST)
    denied = await mine.reserve(BURST)
    assert isinstance(denied, Denied)
    mine.now_ms[0] += 1000
    held_up = await mine.reserve(1)
    assert isinstance(held_up, Denied) and held_up.is_claimed
    mine.now_ms[0] -= 3_600_000
    await mine.reserve(1)
    mine.now_ms[0] += 1000
    assert isinstance(await mine.reserve(1), Granted)
