"""Streams that run during a fault: sixteen clients, each repeating its request until stopped.

An undisturbed run gives the expected answer of each request. The longest wait of a client for its next token
is measured.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kvmesh.inference.v1 import inference_pb2 as pb
from tests.integration.generation import Answer, generate, generate_all, token_request
from tests.integration.harness import Mesh, until
from tests.patience import quiet_s

STREAMS = 16


@dataclass
class Run:
    """Results of the clients."""

    answers: int = 0
    longest_pause_s: float = 0.0
    attempts: int = 0
    takeovers: int = 0
    recomputed_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    """Requests that ended with an error, or with other tokens."""


def requests(seed: int, output_tokens: int) -> list[pb.GenerateRequest]:
    """Return one request per client, half of them with a shared prefix, greedy and sampled."""
    rng = random.Random(seed)
    shared = [rng.randrange(5, 4096) for _ in range(96)]
    return [
        token_request(
            (shared if index % 2 else []) + [rng.randrange(5, 4096) for _ in range(rng.randint(40, 200))],
            max_output_tokens=output_tokens,
            seed=rng.getrandbits(63),
            temperature=rng.choice((0.0, 1.0)),
            explain=True,
        )
        for index in range(STREAMS)
    ]


async def run_through(
    mesh: Mesh,
    wanted: list[pb.GenerateRequest],
    expected: list[Answer],
    fault: Callable[[], Awaitable[None]],
) -> Run:
    """Inject a fault under running streams; after `fault` returns, let every stream end once more."""
    run = Run()
    progress = [0] * len(wanted)
    is_over = False

    async def client(index: int) -> None:
        while not is_over:
            last_s = quiet_s()

            def on_tokens(_: Answer) -> None:
                nonlocal last_s
                now_s = quiet_s()
                run.longest_pause_s = max(run.longest_pause_s, now_s - last_s)
                last_s = now_s
                progress[index] += 1

            answer = await generate(mesh.client(), wanted[index], on_tokens=on_tokens)
            run.answers += 1
            if answer.error is not None:
                run.wrong.append(f"stream {index}: {answer.error.code()} {answer.error.details()}")
            elif answer.ids != expected[index].ids:
                run.wrong.append(f"stream {index}: other tokens")
            if answer.finished is not None:
                explanation = answer.finished.explanation
                run.attempts += len(explanation.attempts)
                run.takeovers += explanation.adoption_count
                run.recomputed_tokens += answer.finished.usage.recomputed_token_count

    async with asyncio.TaskGroup() as group:
        for index in range(len(wanted)):
            group.create_task(client(index))
        await until(lambda: min(progress) >= 5, 60, "all streams have tokens")
        run.longest_pause_s = 0.0
        await fault()
        is_over = True
    return run


async def undisturbed(mesh: Mesh, wanted: list[pb.GenerateRequest]) -> list[Answer]:
    """Return the answers of the requests without a fault."""
    answers = await generate_all(mesh.client(), wanted, concurrency=STREAMS)
    assert not [answer.error for answer in answers if answer.error is not None]
    return answers
