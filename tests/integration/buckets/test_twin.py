"""The script does what its slow twin does, whatever arrives, twice or never, and whatever the clock and the limits do."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from kvmesh.buckets.ledger import Ledger
from kvmesh.buckets.operations import Show
from kvmesh.buckets.wire import keys
from kvmesh.redis_link import RedisLink
from tests.integration.buckets.schedules import ACCOUNTS, ORGANISATION, Loss, Step, schedules
from tests.integration.buckets.twin import Twin

BEGIN_MS = 1_790_000_000_000


class Bench:
    """A ledger on a real Redis and a clock that the test moves."""

    def __init__(self, url: str) -> None:
        self.runner = asyncio.Runner()
        self.link = RedisLink(url)
        self.meshes = itertools.count()

    def close(self) -> None:
        """Close the connection and the loop."""
        self.runner.run(self.link.close())
        self.runner.close()

    def compare(self, steps: list[Step]) -> None:
        """Live through `steps` in Redis and in the twin; every answer and every number must be the same."""
        self.runner.run(self._compare(steps))

    async def _compare(self, steps: list[Step]) -> None:
        mesh, twin, now_ms = f"mesh-{next(self.meshes)}", Twin(), BEGIN_MS
        ledger = Ledger(self.link, mesh, test_clock_ms=lambda: now_ms)
        try:
            for step in steps:
                now_ms += step.pass_ms
                if step.lose:
                    await self._lose(mesh, twin, step.lose)
                shows = [Show(account) for account in ACCOUNTS[:3]]
                answers = await ledger.run([*step.operations, *shows])
                expected = [twin.run(each, now_ms) for each in (*step.operations, *shows)]
                for operation, answer, right in zip(
                    (*step.operations, *shows), answers, expected, strict=True
                ):
                    assert answer == right, f"at {now_ms - BEGIN_MS} ms: {operation}"
                assert expected[-1].book.held == twin.held()  # type: ignore[union-attr]
        finally:
            await self.link.execute("DEL", *keys(mesh, ORGANISATION))

    async def _lose(self, mesh: str, twin: Twin, what: Loss) -> None:
        if what == "script":
            await self.link.execute("SCRIPT", "FLUSH")
            return
        names = dict(zip(("levels", "open", "leases"), keys(mesh, ORGANISATION), strict=True))
        lost = list(names.values()) if what == "all" else [names[what]]
        await self.link.execute("DEL", *lost)
        has_rows = bool(twin.rows)
        twin.lose(
            levels=what in ("levels", "all"),
            reservations=what in ("open", "all") or (what == "leases" and has_rows),
        )


@pytest.fixture
def bench(redis_url: str) -> Iterator[Bench]:
    """One bench for all examples of a test: connecting anew for each would cost more than they do."""
    bench = Bench(redis_url)
    yield bench
    bench.close()


@given(steps=schedules())
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_the_script_is_its_twin(bench: Bench, steps: list[Step]) -> None:
    """Every answer, level, slot and number of the ledger is the twin's, after every step."""
    bench.compare(steps)
