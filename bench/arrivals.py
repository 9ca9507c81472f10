"""A neighbour that replays given arrivals against the mesh's own API, whatever becomes of them, and tells of each request.

Open loop: a slow mesh does not slow the arrivals. Run as `python -m bench.arrivals`, steered over stdin: replay {arrivals:
[[at_s, tenant, prompt tokens, output tokens, deadline_s], ...], keys: {tenant: bearer}} answers, in the order of arrival,
[tenant, milliseconds to the first token or null, reason of the error or "", retry after (s) or null, tokens, ended (s)].
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench import control, generation


class Arrival(NamedTuple):
    """One request, `at_s` seconds after the start."""

    at_s: float
    tenant: str
    prompt_tokens: int
    output_tokens: int
    deadline_s: float


class Seen(NamedTuple):
    """What became of one."""

    tenant: str
    ttft_ms: float | None
    reason: str
    """Of the error; empty: it ended well."""
    retry_after_s: float | None
    tokens: int
    ended_s: float
    """After the start."""


async def replay(
    stub: generation.Stub, arrivals: Sequence[Arrival], keys: Mapping[str, str], draw: random.Random
) -> list[Seen]:
    """Send every request at its time; return when all have ended."""
    start_s = time.monotonic()

    async def send(arrival: Arrival) -> Seen:
        ids = generation.random_ids(arrival.prompt_tokens, draw)
        request = generation.request(ids, arrival.output_tokens)
        answer = await generation.ask(stub, request, arrival.deadline_s, keys.get(arrival.tenant, ""))
        ttft_ms = None if answer.ttft_s is None else answer.ttft_s * 1000
        ended_s = time.monotonic() - start_s
        return Seen(arrival.tenant, ttft_ms, answer.error, answer.retry_after_s, len(answer.ids), ended_s)

    async with asyncio.TaskGroup() as group:
        tasks = []
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, start_s + arrival.at_s - time.monotonic()))
            tasks.append(group.create_task(send(arrival)))
    return [task.result() for task in tasks]


async def serve(target: str, seed: int = 1) -> None:
    """Serve until stdin ends. `target`: host:port of the frontend."""
    draw = random.Random(seed)
    async with generation.channel(target) as stub:

        async def replay_(arrivals: list[list[Any]], keys: Mapping[str, str]) -> Mapping[str, Any]:
            return {"seen": await replay(stub, [Arrival(*one) for one in arrivals], keys, draw)}

        await control.serve_commands(replay_)


if __name__ == "__main__":
    control.main(serve, __doc__)
