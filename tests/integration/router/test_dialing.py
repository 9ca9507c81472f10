"""What is registered in Redis makes a process dial: no more than its budget, and only inside its networks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from kvmesh.attach.dial_budget import BURST, RATE_PER_S
from kvmesh.attach.dialing import Dialer, DialRefused
from kvmesh.clock import MonotonicClock
from kvmesh.trust.networks import Networks
from tests.integration.router.test_links import linked, member, replica, until

CLOCK = MonotonicClock()


class Listener:
    """Takes connections and says nothing."""

    def __init__(self) -> None:
        self.address = ""
        self.accepted: list[float] = []

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted.append(CLOCK.now_s())
        try:
            await reader.read()
        finally:
            writer.close()


@asynccontextmanager
async def listening() -> AsyncIterator[Listener]:
    made = Listener()
    server = await asyncio.start_server(made.take, "127.0.0.1", 0, backlog=1024)
    made.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()


async def test_a_thousand_forged_members_are_dialled_at_the_rate_of_the_budget() -> None:
    """They lead to a listener that never speaks; a replica that registers after them does not wait for their retries."""
    async with listening() as listener, linked() as (links, relay), replica("decode-0", "A") as (_, real):
        forged = [member(f"forged-{number}", listener.address, "x") for number in range(1000)]
        began_s = CLOCK.now_s()
        links.update(forged[:60])
        await until(lambda: len(listener.accepted) >= 120)
        links.update([*forged[:60], real])
        await until(lambda: "decode-0" in relay.replicas and relay.replicas["decode-0"].is_up)
        links.update([*forged, real])
        await until(lambda: len(listener.accepted) > BURST + 2 * RATE_PER_S)
        for number, at_s in enumerate(listener.accepted, 1):
            assert number <= BURST + RATE_PER_S * (at_s - began_s) + 1, (
                f"{number} after {at_s - began_s:.2f} s"
            )


async def test_a_mesh_of_64_replicas_is_attached_within_one_burst() -> None:
    """No attempt waits: the bucket of a process that starts holds two connections for each."""
    async with AsyncExitStack() as stack:
        members = []
        for number in range(64):
            _, one = await stack.enter_async_context(replica(f"decode-{number}", f"boot-{number}"))
            members.append(one)
        links, relay = await stack.enter_async_context(linked())
        random.Random(1).shuffle(members)
        links.update(members)
        await until(
            lambda: len(relay.replicas) == 64 and all(each.is_up for each in relay.replicas.values()), 30
        )


async def test_a_name_is_resolved_and_judged_before_it_is_dialled() -> None:
    """The address inside is dialled, not the name; none inside, or no answer, is refused with what was found."""
    inside, outside = Dialer(CLOCK, Networks(["127.0.0.0/8"])), Dialer(CLOCK, Networks(["10.0.0.0/8"]))
    assert await inside.resolve("localhost:7") == "127.0.0.1:7"
    assert await Dialer(CLOCK).resolve("localhost:7") == "localhost:7"
    with pytest.raises(DialRefused, match=r"localhost:7 resolves to .*127\.0\.0\.1.*inside trust\.networks"):
        await outside.resolve("localhost:7")
    with pytest.raises(DialRefused, match=r"nowhere\.invalid:7 resolves to nothing"):
        await inside.resolve("nowhere.invalid:7")
    with pytest.raises(DialRefused, match=r"127\.0\.0\.1:7 is outside trust\.networks"):
        await outside.resolve("127.0.0.1:7")
    assert (inside.refused_total, outside.refused_total) == (1, 1)


async def test_a_cancelled_attempt_gives_its_turn_to_the_next() -> None:
    """A link that is closed while it waits holds nobody up."""
    dialer = Dialer(CLOCK)
    waiting = [asyncio.create_task(dialer.turn(0)) for _ in range(70)]
    await until(lambda: sum(task.done() for task in waiting) >= 64)
    late = [task for task in waiting if not task.done()]
    for task in late[:-1]:
        task.cancel()
    await asyncio.wait_for(waiting[-1], 10)
    assert dialer.waiting_count == 0
