"""Concurrent routers: real processes and a real Redis, in front of a replica that keeps its prompts waiting.

The queue that a router expects is in its status. Waiting prompts do not shrink, so all routers must agree.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.harness import Mesh, configure, until
from tests.integration.router.stubs import Caller, Stub, serving

PROMPT_TOKENS = 1024
PREFILL = "prefill-0"
ROUNDING_US = 100
"""Estimates travel in whole microseconds."""


@dataclass
class Routers:
    """Router processes, the replicas that they place on, and a frontend's stream to each."""

    mesh: Mesh
    prefill: Stub
    callers: dict[str, Caller]
    submitted: int = 0

    async def start(self, *names: str) -> None:
        parts = [self.mesh.parts[name] for name in names]
        await self.mesh.launch(parts)
        await asyncio.gather(*(self.mesh.ready(part) for part in parts))
        for name, part in zip(names, parts, strict=True):
            if name not in self.callers:
                self.callers[name] = Caller(self.mesh.config, name, part.address)

    async def submit(self, router: str, count: int = 1) -> None:
        """Submit prompts without a shared prefix, and wait until the replica has them."""
        link = self.callers[router].link
        await until(lambda: link.is_up, 10, f"{router} takes requests")
        wanted = len(self.prefill.prompts) + count
        for _ in range(count):
            start = 100 + self.submitted * PROMPT_TOKENS
            self.submitted += 1
            self.callers[router].submit(range(start, start + PROMPT_TOKENS))
        await until(lambda: len(self.prefill.prompts) >= wanted, 10, f"{wanted} prompts are at {PREFILL}")

    def finish(self, router: str) -> None:
        """Finish a prompt that came through `router`."""
        session = self.prefill.session_by_peer[router]
        prompt = next(one for one in self.prefill.prompts if one.session is session)
        self.prefill.start(prompt)
        self.prefill.finish(prompt)

    async def seen(self, router: str) -> tuple[int, int]:
        """Return the queue (us) and the blocks that `router` expects at the replica."""
        status = await self.mesh.status(router)
        queue_us = {view.replica: view.queue_us for view in status.replicas}.get(PREFILL, 0)
        return queue_us, status.overlay_block_count

    def expected_blocks(self) -> int:
        return len(self.prefill.prompts) * (PROMPT_TOKENS // self.mesh.config.engine.block_tokens)

    async def agree(self) -> bool:
        """Return whether all routers expect the actual queue and blocks."""
        seen = [await self.seen(name) for name in self.mesh.running("router")]
        queues_us = [queue_us for queue_us, _ in seen]
        is_same = max(queues_us) - min(queues_us) <= ROUNDING_US
        return is_same and {blocks for _, blocks in seen} == {self.expected_blocks()}

    async def settle(self, timeout_s: float, what: str) -> float:
        try:
            return await until(self.agree, timeout_s, what)
        except AssertionError as error:
            seen = {name: await self.seen(name) for name in self.mesh.running("router")}
            raise AssertionError(f"{error}: {seen}, {self.expected_blocks()} blocks wait") from None


@asynccontextmanager
async def routers(folder: Path, count: int) -> AsyncIterator[Routers]:
    """Start Redis and the replicas; no router yet."""
    config = configure(
        router={"replicas": count, "dispatch_ahead_s": 60.0, "local_prefill_tokens_max": 0},
        telemetry={"log_level": "info"},
    )
    mesh = Mesh(config, folder)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(mesh.stop)
        redis = mesh.parts["redis"]
        await mesh.launch([redis])
        await mesh.ready(redis)
        url = f"redis://{redis.address}"
        prefill = await stack.enter_async_context(serving(config, url, PREFILL, "prefill"))
        await stack.enter_async_context(serving(config, url, "decode-0", "decode"))
        one = Routers(mesh, prefill, {})
        yield one
        for caller in one.callers.values():
            await caller.close()


async def test_routers_that_join_leave_die_and_come_back_expect_the_same(tmp_path: Path) -> None:
    """A router knows the dispatches of the others from the moment that it serves; those of dead routers are forgotten."""
    async with routers(tmp_path, 4) as all_of:
        await all_of.start("router-0")
        await all_of.submit("router-0", 3)
        await all_of.start("router-1")
        await all_of.settle(2, "a router that joins knows the earlier router's dispatches")
        await all_of.submit("router-1", 2)
        await all_of.settle(5, "dispatches of the newer router are known to the older")
        await all_of.start("router-2", "router-3")
        await all_of.settle(2, "so do two that join together")
        await all_of.submit("router-3", 2)
        all_of.finish("router-0")
        await all_of.settle(5, "a finish is known to all")

        await all_of.mesh.parts["router-3"].end(signal.SIGKILL)
        await until(
            lambda: len(all_of.prefill.prompts) == 4, 10, "the replica forgets what the dead one sent"
        )
        await all_of.settle(5, "no dispatch of the dead router counts, though its lease is valid")
        await all_of.start("router-3")
        await all_of.settle(2, "a restarted router knows the dispatches of its peers")
        await all_of.submit("router-3", 1)
        await all_of.settle(5, "and is heard")

        await all_of.mesh.parts["router-1"].end(signal.SIGKILL)
        await until(
            lambda: len(all_of.prefill.prompts) == 3, 10, "the replica forgets what the dead one sent"
        )
        await all_of.start("router-1")
        await all_of.settle(2, "the old boot is forgotten as soon as the new one is there")
        for name in ("router-0", "router-0", "router-3"):
            all_of.finish(name)
        await all_of.settle(5, "nothing is left")
        assert all_of.expected_blocks() == 0


async def test_a_redis_that_comes_back_empty_is_caught_up_with(tmp_path: Path) -> None:
    """Without Redis each router counts its own dispatches; starts and finishes of that time are known when Redis is
    back.
    """
    async with routers(tmp_path, 2) as both:
        await both.start("router-0", "router-1")
        await both.submit("router-0", 3)
        await both.submit("router-1", 2)
        await both.settle(5, "both routers know all dispatches")
        redis = both.mesh.parts["redis"]
        await redis.end(signal.SIGKILL)

        async def only_own() -> bool:
            blocks = [(await both.seen(name))[1] for name in ("router-0", "router-1")]
            return sum(blocks) == both.expected_blocks() and all(blocks)

        await until(only_own, 10, "each router counts its own dispatches only")
        await both.submit("router-0", 1)
        both.finish("router-1")
        await until(only_own, 5, "own dispatches go on")
        await both.mesh.launch([redis])
        await both.mesh.ready(redis)
        await both.settle(8, "both routers know all dispatches again")
        assert both.expected_blocks() > 0
