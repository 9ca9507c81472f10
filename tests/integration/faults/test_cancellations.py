"""A cancel by the client, or a deadline, leaves nothing behind in any phase of a request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import pytest

from tests.integration.generation import Answer, generate, token_request
from tests.integration.harness import Mesh, configure, running_mesh, until
from tests.integration.lent_mesh import LentMesh, lent_mesh

pytestmark = pytest.mark.mesh

BACK_S = 1.0
"""Time within which all resources of a request must be free, in seconds."""

LINK_TASKS = 4
"""Tasks of one Attach stream at the process that serves it: its handler, reader, writer and watch."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LentMesh]:
    """One prefill and one decode replica, slow enough to hit every phase; every prompt goes through prefill."""
    config = configure(
        engine={
            "arithmetic": "hashed",
            "kv_blocks": 1024,
            "prefill_kv_blocks": 1024,
            "max_sequence_tokens": 4096,
            "step_s": 0.02,
            "prefill_token_s": 0.002,
            "block_transfer_s": 0.05,
        },
        prefill={"replicas": 1, "engine_concurrency": 1},
        decode={"replicas": 1, "detached_s": 1.0},
        router={"local_prefill_tokens_max": 0, "dispatch_ahead_s": 3.0},
    )
    # Steps of 128 tokens take 0.26 s: a cancelled sequence leaves at the end of its step.
    with lent_mesh(config, tmp_path_factory.mktemp("slow"), ("--max-step-tokens", "128")) as made:
        yield made


@pytest.fixture
async def slow_mesh(slow: LentMesh) -> AsyncIterator[Mesh]:
    """The module's mesh, complete and idle."""
    async with slow.lease() as mesh:
        yield mesh


async def queued_at_router(mesh: Mesh) -> bool:
    return bool((await mesh.status("router-0")).queued_request_count > 0)


async def reserved_at_decode(mesh: Mesh) -> bool:
    return bool((await mesh.status("decode-0")).pending_slot_count > 0)


async def queued_at_prefill(mesh: Mesh) -> bool:
    return bool((await mesh.status("prefill-0")).load_report.queued_request_count > 0)


async def in_prefill(mesh: Mesh) -> bool:
    return bool((await mesh.status("prefill-0")).load_report.running_request_count > 0)


async def handoff_pending(mesh: Mesh) -> bool:
    return bool((await mesh.status("prefill-0")).load_report.held_handoff_count > 0)


async def in_decode(mesh: Mesh) -> bool:
    status = await mesh.status("decode-0")
    return bool(status.engine_call_count > 0 and status.log_bytes > 0)


PHASES: dict[str, tuple[int, float, Callable[[Mesh], Awaitable[bool]]]] = {
    # name: the number of requests needed to reach the phase, a deadline within the phase, and a check for it
    "queued-at-router": (12, 0.9, queued_at_router),
    "reserved-at-decode": (2, 0.9, reserved_at_decode),
    "queued-at-prefill": (2, 0.9, queued_at_prefill),
    "in-prefill": (1, 0.9, in_prefill),
    "handoff-pending": (1, 2.3, handoff_pending),
    "in-decode": (1, 4.5, in_decode),
}


def prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts of 800 tokens without shared prefixes: each takes 1.6 s of prefill and 1.25 s of
    transfer.
    """
    rng = random.Random(seed)
    return [[rng.randrange(5, 4096) for _ in range(800)] for _ in range(count)]


async def test_cancel_and_deadline_in_every_phase_leave_nothing(slow_mesh: Mesh) -> None:
    """In each phase, a cancel and a deadline free all resources within 1 s, at prefill and decode."""
    mesh = slow_mesh
    await warm(mesh)
    for number, (phase, (count, deadline_s, shows)) in enumerate(PHASES.items()):
        for how in ("cancel", "deadline"):
            calls = [
                mesh.client().Generate(
                    token_request(prompt, max_output_tokens=2000),
                    timeout=60 if how == "cancel" else deadline_s,
                )
                for prompt in prompts(count, 100 * number + (how == "deadline"))
            ]
            readers = [asyncio.create_task(drain(call)) for call in calls]
            await until(lambda shows=shows: shows(mesh), 10, f"a request {phase}")
            if how == "cancel":
                for call in calls:
                    call.cancel()
            codes = await asyncio.gather(*readers)
            expected = grpc.StatusCode.CANCELLED if how == "cancel" else grpc.StatusCode.DEADLINE_EXCEEDED
            assert set(codes) == {expected}, f"{phase}, {how}: {codes}"
            took_s = await mesh.idle(BACK_S)
            print(f"{phase}, {how}: all back after {took_s:.2f} s")


async def test_a_detached_stream_without_a_takeover_is_cancelled_in_time(slow_mesh: Mesh) -> None:
    """Without a takeover, a detached stream is cancelled after the detached time and all is freed.

    The router dies and the clients leave.
    """
    mesh = slow_mesh
    await warm(mesh)
    calls = [
        mesh.client().Generate(token_request(prompt, max_output_tokens=3000)) for prompt in prompts(4, 7)
    ]
    readers = [asyncio.create_task(drain(call)) for call in calls]

    async def all_run() -> bool:
        status = await mesh.status("decode-0")
        return bool(status.engine_call_count == 4 and status.pending_slot_count == 0)

    await until(all_run, 20, "all four decode")
    await mesh.parts["router-0"].end()

    async def orphaned() -> bool:
        return bool((await mesh.status("decode-0")).orphan_count == 4)

    await until(orphaned, 5, "four orphans")
    for call in calls:
        call.cancel()
    await asyncio.gather(*readers)
    await mesh.idle(mesh.config.decode.detached_s + BACK_S)


async def test_a_thousand_random_cancels_leak_nothing(tmp_path: Path) -> None:
    """1,000 requests cancelled at a random token or time leak no blocks, slots, reservations or tasks."""
    config = configure(
        engine={
            "arithmetic": "hashed",
            "kv_blocks": 512,
            "prefill_kv_blocks": 256,
            "max_sequence_tokens": 4096,
        },
        router={"local_prefill_tokens_max": 32},
    )
    seed = 11
    rng = random.Random(seed)
    async with running_mesh(config, tmp_path) as mesh:
        await warm(mesh)
        tasks_before = await mesh.tasks()
        gate = asyncio.Semaphore(32)
        shared = prompts(4, seed)

        async def one() -> None:
            async with gate:
                prompt = rng.choice(shared)[: rng.randint(1, 400)] + [
                    rng.randrange(5, 4096) for _ in range(rng.randint(0, 60))
                ]
                request = token_request(
                    prompt, max_output_tokens=rng.randint(1, 200), temperature=1.0, seed=rng.getrandbits(60)
                )
                stop_at = rng.choice((0, 1, 2, rng.randint(1, 60)))
                if rng.random() < 0.3:
                    await generate(mesh.client(), request, timeout_s=rng.uniform(0.001, 0.2))
                    return
                call = mesh.client().Generate(request)
                count = 0
                try:
                    async for message in call:
                        count += len(message.tokens.ids)
                        if count >= stop_at:
                            break
                finally:
                    call.cancel()

        await asyncio.gather(*(one() for _ in range(1000)))
        await mesh.idle(5)

        # Streams between processes stay open, and one may have opened meanwhile; tasks of requests must end.
        async def tasks_back() -> bool:
            return all(
                count <= tasks_before[name] + LINK_TASKS for name, count in (await mesh.tasks()).items()
            )

        await until(tasks_back, 5, f"tasks as before: {tasks_before}, seed={seed}")
        answer = await generate(mesh.client(), token_request(shared[0], max_output_tokens=5))
        assert answer.error is None, answer.error


async def drain(call: grpc.aio.UnaryStreamCall) -> grpc.StatusCode:  # type: ignore[type-arg]
    """Read `call` to its end and return its status."""
    try:
        async for _ in call:
            pass
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    return await call.code()


async def warm(mesh: Mesh) -> Answer:
    """Send one request, so that every stream between the processes is open."""
    answer = await generate(mesh.client(), token_request([9] * 50, max_output_tokens=3))
    assert answer.error is None, answer.error
    await mesh.idle(5)
    return answer
