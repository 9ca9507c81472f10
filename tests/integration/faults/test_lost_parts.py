"""The loss of a part under running streams costs a pause and no token."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable

import pytest

from kvmesh.inference.v1 import inference_pb2 as pb
from tests.integration.generation import Answer, generate, generate_all, token_request
from tests.integration.harness import Mesh, until

pytestmark = pytest.mark.mesh

STREAMS = 16
OUTPUT_TOKENS = 120


def requests(seed: int, *, explain: bool = True) -> list[pb.GenerateRequest]:
    """Return 16 prompts of 40 to 300 tokens, half of them with a shared prefix, greedy and sampled."""
    rng = random.Random(seed)
    shared = [rng.randrange(5, 4096) for _ in range(96)]
    made = []
    for index in range(STREAMS):
        prompt = (shared if index % 2 else []) + [rng.randrange(5, 4096) for _ in range(rng.randint(40, 200))]
        made.append(
            token_request(
                prompt,
                max_output_tokens=OUTPUT_TOKENS,
                seed=rng.getrandbits(63),
                temperature=rng.choice((0.0, 1.0)),
                explain=explain,
            )
        )
    return made


async def broken_run(
    mesh: Mesh, wanted: list[pb.GenerateRequest], fault: Callable[[], Awaitable[None]]
) -> list[Answer]:
    """Send all requests, inject a fault when every stream has some tokens, and return the answers."""
    progress: dict[int, int] = {}

    async def one(index: int) -> Answer:
        return await generate(
            mesh.client(),
            wanted[index],
            on_tokens=lambda answer: progress.__setitem__(index, len(answer.ids)),
        )

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index)) for index in range(len(wanted))]
        await until(
            lambda: sum(count >= 10 for count in progress.values()) == len(wanted),
            60,
            "all streams have 10 tokens",
        )
        assert not any(task.done() for task in tasks), (
            "a stream ended before the fault: the fault would prove nothing"
        )
        await fault()
    return [task.result() for task in tasks]


def assert_equal(answers: list[Answer], expected: list[Answer]) -> None:
    """Assert that all answers are complete and equal, token by token."""
    for index, (answer, want) in enumerate(zip(answers, expected, strict=True)):
        assert answer.error is None, f"stream {index}: {answer.error}"
        assert answer.ids == want.ids, f"stream {index}"


def attempts(answers: list[Answer]) -> int:
    """Return the attempts of all answers together."""
    return sum(len(answer.finished.explanation.attempts) for answer in answers if answer.finished)


def takeovers(answers: list[Answer]) -> int:
    """Return the takeovers of all answers together."""
    return sum(answer.finished.explanation.adoption_count for answer in answers if answer.finished)


def recomputed(answers: list[Answer]) -> int:
    """Return the tokens computed again for all answers together."""
    return sum(answer.finished.usage.recomputed_token_count for answer in answers if answer.finished)


async def undisturbed(mesh: Mesh, wanted: list[pb.GenerateRequest]) -> list[Answer]:
    """Return the answers of the requests without a fault."""
    answers = await generate_all(mesh.client(), wanted, concurrency=STREAMS)
    for answer in answers:
        assert answer.error is None, answer.error
        assert len(answer.ids) == OUTPUT_TOKENS
    assert attempts(answers) == STREAMS and recomputed(answers) == 0
    return answers


@pytest.mark.parametrize("with_engine", [False, True], ids=["service", "service-and-engine"])
async def test_a_killed_decode_replica_costs_no_token(mesh: Mesh, with_engine: bool) -> None:
    """After kill -9 of one of two decode replicas, all 16 streams finish with the same tokens."""
    wanted = requests(1)
    expected = await undisturbed(mesh, wanted)

    async def kill() -> None:
        await mesh.parts["decode-0"].end()
        if with_engine:
            await mesh.parts["decode-0-engine"].end()

    answers = await broken_run(mesh, wanted, kill)
    assert_equal(answers, expected)
    assert attempts(answers) > STREAMS, "no stream ran on the killed replica"
    await mesh.idle(5)


async def test_a_frozen_decode_replica_costs_no_token(mesh: Mesh) -> None:
    """After SIGSTOP of a decode replica's service, its streams resume elsewhere without a lost token.

    SIGSTOP breaks no connection, so pings detect the frozen service. After SIGCONT, the replica holds
    nothing.
    """
    wanted = requests(8)
    expected = await undisturbed(mesh, wanted)
    pid = mesh.parts["decode-0"].pid

    async def freeze() -> None:
        os.kill(pid, signal.SIGSTOP)

    try:
        answers = await broken_run(mesh, wanted, freeze)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert_equal(answers, expected)
    assert attempts(answers) > STREAMS, "no stream ran on the frozen replica"
    await mesh.idle(mesh.config.decode.detached_s + 5)


async def test_a_killed_prefill_replica_costs_no_token(mesh: Mesh) -> None:
    """After kill -9 of a prefill replica and its engine under load, all streams finish with the same tokens."""
    wanted = requests(2)
    expected = await undisturbed(mesh, wanted)
    late = requests(3)
    late_expected = await undisturbed(mesh, late)
    tasks: list[asyncio.Task[list[Answer]]] = []

    async def kill() -> None:
        # New prompts are on their way to prefill at the kill.
        tasks.append(asyncio.create_task(generate_all(mesh.client(), late, concurrency=STREAMS)))
        await asyncio.sleep(0)
        await mesh.parts["prefill-0"].end()
        await mesh.parts["prefill-0-engine"].end()

    answers = await broken_run(mesh, wanted, kill)
    assert_equal(answers, expected)
    assert_equal(await tasks[0], late_expected)
    await mesh.idle(5)


async def test_a_restarted_router_recomputes_nothing(mesh: Mesh) -> None:
    """After kill -9 and restart of the only router, every stream is taken over without prefill."""
    wanted = requests(4)
    expected = await undisturbed(mesh, wanted)
    computed_before: list[int] = []

    async def restart() -> None:
        computed_before.append(await computed(mesh))
        await mesh.parts["router-0"].end()
        await mesh.start("router-0")

    answers = await broken_run(mesh, wanted, restart)
    assert_equal(answers, expected)
    assert takeovers(answers) == STREAMS
    assert attempts(answers) == STREAMS and recomputed(answers) == 0
    assert await computed(mesh) == computed_before[0]
    await mesh.idle(5)


async def test_an_outage_of_redis_costs_no_token(mesh: Mesh) -> None:
    """After kill -9 of Redis and an empty restart, 16 streams lose no token.

    New requests are served, and the index is rebuilt.
    """
    wanted = requests(5)
    expected = await undisturbed(mesh, wanted)

    async def away() -> None:
        await mesh.parts["redis"].end()

        async def noticed() -> bool:
            return not (await mesh.status("router-0")).redis_connected

        await until(noticed, 10, "the router notices that Redis is unavailable")
        fresh = requests(6)
        during = await generate_all(mesh.client(), fresh, concurrency=STREAMS)
        assert [answer.error for answer in during] == [None] * STREAMS
        await mesh.start("redis")

    answers = await broken_run(mesh, wanted, away)
    assert_equal(answers, expected)

    async def whole() -> bool:
        status = await mesh.status("router-0")
        return status.redis_connected and all(
            view.placeable and view.index_block_count for view in status.replicas
        )

    await until(whole, 15, "the index is whole again")
    again = await generate_all(
        mesh.client(), wanted, concurrency=1
    )  # one at a time: no queue diverts a request
    assert_equal(again, expected)
    # A replica that stalls for a moment is passed over although it has the cache. Without an index, half of
    # the requests hit.
    found = [bool(answer.finished and answer.finished.usage.cached_token_count) for answer in again]
    assert sum(found) >= STREAMS - 2, found
    await mesh.idle(5)


async def computed(mesh: Mesh) -> int:
    """Return the prompt tokens the prefill replicas have computed."""
    return sum([(await mesh.status(name)).computed_token_total for name in mesh.running("prefill")])
