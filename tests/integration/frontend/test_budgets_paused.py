"""A real pause of Redis under load: requests continue, the limits hold, and the return of Redis causes no spike.

Scaled: a pause of 4 s for the aim of 30 s. `KVMESH_PAUSE_S=30 pytest --timeout 120` of this file runs the full length;
tests/unit/frontend/budgets always runs it in virtual time.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from kvmesh.buckets.ledger import Ledger
from kvmesh.buckets.operations import Show, Shown
from kvmesh.child import bound_command
from kvmesh.redis_binary import redis_binary, redis_command
from kvmesh.redis_link import RedisLink, RedisUnavailable
from services.frontend.accounts.budgets import local_buckets
from services.frontend.accounts.budgets.ledger_writer import LEASE_S, RENEW_S
from tests.integration.frontend.conftest import until
from tests.patience import patience
from tests.unit.frontend.budgets.twin import account
from tests.unit.frontend.budgets.world import Frontend, Load, admitted, caller, spent

PAUSE_S = float(os.environ.get("KVMESH_PAUSE_S", "4"))
PER_MIN = 360_000
BURST = 12_000
ACCOUNT = account(tokens_per_min=PER_MIN, burst_s=2, requests_per_min=60_000, concurrency=1000)
FRONTENDS = 3
SERVED = 100
"""Requests before and after the pause."""


@pytest.fixture
def redis(free_port: int, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Redis for this test alone, because it is stopped."""
    command = bound_command(redis_command(redis_binary(), free_port, tmp_path))
    with (tmp_path / "redis.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield server
        finally:
            server.kill()
            server.wait()


async def test_redis_paused_is_no_outage_and_no_spike(redis: subprocess.Popen[bytes], free_port: int) -> None:
    """Three frontends with eight times the limit; every settlement reaches Redis once."""
    draw, loop = random.Random(1), asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        links = [RedisLink(f"redis://127.0.0.1:{free_port}/0") for _ in range(FRONTENDS)]
        for link in links:
            stack.push_async_callback(link.close)
        await until_there(links[0])
        frontends = [
            Frontend(f"f{at}", Ledger(link, "mesh"), random.Random(draw.random()), FRONTENDS)
            for at, link in enumerate(links)
        ]
        started_s = loop.time()
        for frontend in frontends:
            frontend.start(Load(40, [caller(ACCOUNT)], seconds_mean=0.5, resumed=0, leave=0.05))
        await until(lambda: sum(len(each.uses) for each in frontends) >= SERVED, "requests are served", 30)
        redis.send_signal(signal.SIGSTOP)
        paused_s = loop.time()
        try:
            await asyncio.sleep(PAUSE_S)
        finally:
            redis.send_signal(signal.SIGCONT)
        back_s = loop.time()
        await until(lambda: not any(each.budgets.is_degraded for each in frontends), "Redis is used again", 5)
        served = sum(len(each.uses) for each in frontends)
        await until(lambda: sum(len(each.uses) for each in frontends) >= served + SERVED, "and again", 30)
        await asyncio.gather(*(frontend.stop() for frontend in frontends))
        await asyncio.gather(*(frontend.close() for frontend in frontends))
        ended_s = loop.time()
        (shown,) = await Ledger(links[0], "mesh").run([Show(ACCOUNT)])
    uses = sorted((use for frontend in frontends for use in frontend.uses), key=lambda use: use.at_s)
    per_s = PER_MIN / 60
    for use in uses:
        allowed = BURST + (use.at_s - started_s) * per_s + local_buckets.SHARE * BURST
        assert spent(uses, use.at_s) <= allowed
    assert admitted(uses, paused_s + 0.5, back_s) >= (PAUSE_S - 0.5) * local_buckets.SHARE * per_s / 2
    for tenth in range(round((ended_s - back_s) * 10)):
        begin_s = back_s + tenth / 10
        taken = admitted(uses, begin_s, begin_s + 1)
        # Demand is eight times the rate: if Redis did not know the usage, this second would consume a full bucket.
        assert taken <= per_s + BURST / 2, f"{taken} from {tenth} tenths after the return"
    for frontend in frontends:
        assert frontend.budgets.outage.total >= 1 and frontend.counts["LOCAL"] > 5, frontend.counts
        assert frontend.budgets.open_count == frontend.budgets.owed_count == 0
    assert isinstance(shown, Shown)
    ledger_totals = shown.ledger_totals
    assert (
        ledger_totals.reserved + ledger_totals.extended
        == ledger_totals.settled + ledger_totals.refunded + ledger_totals.swept
    )
    assert ledger_totals.open_count == 0 and all(use.slots == 0 for use in shown.uses)
    charged = ledger_totals.settled + ledger_totals.overrun + ledger_totals.swept + ledger_totals.spent
    used = sum(use.actual for use in uses)
    # A request that ended during a pause longer than its lease is swept before its settlement: charged at the estimate.
    assert used <= charged <= used + ledger_totals.swept and (
        ledger_totals.swept == 0 or PAUSE_S > LEASE_S - RENEW_S
    )


async def until_there(link: RedisLink) -> None:
    """Wait until Redis responds."""
    async with patience(10):
        while not link.is_connected:
            with suppress(RedisUnavailable):
                await link.execute("PING")
            await asyncio.sleep(0.01)
