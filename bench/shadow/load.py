"""An open loop of users' requests at the frontends: each is sent when it is due, whatever the others do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from kvmesh.client import Client, GenerateError

PROMPT_WORDS: Final = 40
OUTPUT_TOKENS: Final = 16
DEADLINE_S: Final = 20.0
TURNS: Final = 3
"""Requests of one session."""


@dataclass(slots=True)
class Measured:
    """Result of one stretch of load."""

    latencies_s: list[float] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    errors: int = 0


async def send(
    frontends: Sequence[str],
    rate_per_s: float,
    seconds: float,
    seed: int,
    times_seed: int = 0,
    output_tokens: int = OUTPUT_TOKENS,
) -> Measured:
    """Send requests at times of a Poisson process, and return when all have ended.

    `times_seed`: draws the times. Two blocks of a pair have equal times, and other prompts by their `seed`.
    """
    draw, times, measured = Random(seed), Random(times_seed), Measured()
    async with Client(list(frontends)) as client, asyncio.TaskGroup() as tasks:
        began_s = due_s = time.monotonic()
        number = 0
        while (due_s := due_s + times.expovariate(rate_per_s)) < began_s + seconds:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            words = " ".join(f"w{draw.randrange(1000)}" for _ in range(PROMPT_WORDS))
            session = f"session-{seed}-{number // TURNS}"
            tasks.create_task(_request(client, words, session, due_s, output_tokens, measured))
            number += 1
    return measured


async def _request(
    client: Client, prompt: str, session: str, due_s: float, output_tokens: int, measured: Measured
) -> None:
    first_s = 0.0
    try:
        answer = client.generate(
            prompt, session_id=session, max_output_tokens=output_tokens, deadline_s=DEADLINE_S
        )
        async for _ in answer:
            first_s = first_s or time.monotonic()
    except GenerateError:
        measured.errors += 1
        return
    now_s = time.monotonic()
    measured.latencies_s.append(now_s - due_s)
    measured.first_tokens_s.append((first_s or now_s) - due_s)
