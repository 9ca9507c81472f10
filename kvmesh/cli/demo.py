"""`make demo`: a mesh on embedded defaults, a dialogue of two turns, the explanation of both, and two kills.

The second turn repeats all messages before it. Most of its blocks are prefix
cache hits, so its TTFT (time to first token) is shorter.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from kvmesh.cli.demo_faults import undisturbed_and_killed
from kvmesh.cli.generate import Message, RequestFailed, chat, stream
from kvmesh.cli.screen import ExplanationTable, reason
from kvmesh.cli.supervisor import ProcessFailed, Stopped
from kvmesh.cli.up import running_mesh
from kvmesh.client import GenerateError
from kvmesh.config import build
from kvmesh.inference.v1 import inference_pb2 as inference
from kvmesh.redis_url import VARIABLE

CONFIG: Final = build({"frontend": {"replicas": 2}})
"""Two frontends, so that the stream goes on at the other one."""
DEADLINE_S: Final = 60.0
OUTPUT_TOKENS: Final = 64
SESSION: Final = "demo"

SCENE: Final = (
    "You are the younger sister in a quiet country house, and you answer in the manner of an old novel. "
    "It is an evening late in the autumn. The rain has fallen since noon, the roads are bad, and no visitor "
    "is expected before Sunday. Your mother has gone up early with a headache. Your father reads in the "
    "library and will not be disturbed. Your elder sister sits at the window with a piece of needlework, "
    "but has not set a stitch for an hour. This morning there came a letter from the north, in a hand "
    "that you both know well. Its contents are still a secret. You are fond of your sister, you "
    "are curious, and you know that a question will not be answered at once. All the town has talked of "
    "nothing but the ball at the assembly rooms. There the gentleman danced twice with another lady and "
    "went away before supper without taking leave. Some say that the gentleman is engaged, and some say "
    "that the gentleman is proud. You believe neither, because you saw that face go out into the rain."
)
OPENING: Final = (
    "My dear, you are very good to sit with me, and to ask me nothing. I have read the letter three times, "
    "and I am no wiser than before. It speaks of a duty that could not wait and could not be explained. "
    "It speaks of a hope to be in the county again before the end of the month. It asks after my mother, "
    "after my father's cough, after the old horse, and even after the piano. But on that evening it has not "
    "one word. Tell me honestly what you think of it, and whether I ought to answer."
)
CONTINUATION: Final = "You may be right. But suppose that there is a visit on Sunday; what am I to say?"


async def demo(console: Console, *, is_redis_named: bool = False) -> int:
    """Run the demonstration; return 0 if both turns were answered and all processes are stopped.

    `is_redis_named`: the environment names a Redis. The demonstration then prints that it does not use this Redis.
    """
    if is_redis_named:
        console.print(f"The demo starts its own Redis; the Redis of {VARIABLE} is not used.", soft_wrap=True)
    news: list[str] = []
    """Deaths and restarts, kept for the end: the answer goes on meanwhile."""
    try:
        with tempfile.TemporaryDirectory(prefix="kvmesh-demo-") as folder:
            made = running_mesh(CONFIG, Path(folder), console, restarts=True, news=news.append)
            async with made as (supervisor, mesh), _telling(console):
                console.print(f"{len(mesh.processes)} processes are ready.")
                turns = await supervisor.run_while_alive(dialogue(console, mesh.addresses_of("frontend")))
                console.print(ExplanationTable(turns))
                for title, finished in turns:
                    text = f"{title}: {reason(finished)}"
                    console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)
                is_same = await supervisor.run_while_alive(undisturbed_and_killed(console, mesh))
                for each in news:
                    console.print(each, markup=False, highlight=False, soft_wrap=True)
    except Stopped:
        console.print("Everything is stopped.")
        return 130
    except (ProcessFailed, RequestFailed, GenerateError) as failed:
        console.print(str(failed), markup=False, highlight=False, soft_wrap=True)
        return 1
    console.print("Everything is stopped.")
    return 0 if is_same else 1


@asynccontextmanager
async def _telling(console: Console) -> AsyncIterator[None]:
    """Say at once that an interrupt was heard: the end of the processes takes seconds."""
    try:
        yield
    except Stopped:
        console.print("\nInterrupted: the processes are being stopped.")
        raise


async def dialogue(console: Console, addresses: Sequence[str]) -> list[tuple[str, inference.Finished]]:
    """Send both turns to the frontends at `addresses`; return titles and `finished` messages. Raises RequestFailed."""
    messages: list[Message] = [
        (inference.ChatMessage.ROLE_SYSTEM, SCENE),
        (inference.ChatMessage.ROLE_USER, OPENING),
    ]
    answer, opened = await _turn(console, addresses, messages)
    messages += [
        (inference.ChatMessage.ROLE_ASSISTANT, answer),
        (inference.ChatMessage.ROLE_USER, CONTINUATION),
    ]
    _, continued = await _turn(console, addresses, messages)
    return [("opened", opened), ("continued", continued)]


async def _turn(
    console: Console, addresses: Sequence[str], messages: list[Message]
) -> tuple[str, inference.Finished]:
    console.print(Text(f"\n{messages[-1][1]}\n", style="cyan"))
    received: list[str] = []

    def on_response(response: inference.GenerateResponse) -> None:
        if response.HasField("tokens"):
            received.append(response.tokens.text)
            console.print(response.tokens.text, end="", markup=False, highlight=False, soft_wrap=True)

    request = inference.GenerateRequest(
        chat=chat(messages),
        sampling=inference.Sampling(temperature=0.7, top_p=0.9, seed=7),
        limits=inference.Limits(max_output_tokens=OUTPUT_TOKENS),
        session_id=SESSION,
        options=inference.GenerateOptions(explain=True),
    )
    answer = await stream(addresses, request, DEADLINE_S, on_response)
    console.print("\n")
    return "".join(received), answer.finished


def run(console: Console, *, is_redis_named: bool = False) -> int:
    """Run the demonstration in an event loop of its own."""
    return asyncio.run(demo(console, is_redis_named=is_redis_named))
