"""`make demo`: a mesh on embedded defaults, a dialogue opened and continued, both explained.

The second turn repeats everything said before, so most of its blocks are in
cache already and its first token comes sooner: that is the point.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from kvmesh.cli.generate import Message, RequestFailed, chat, stream
from kvmesh.cli.screen import explanation_table, reason
from kvmesh.cli.supervisor import ProcessFailed, Stopped
from kvmesh.cli.up import running_mesh
from kvmesh.config import MeshConfig
from kvmesh.inference.v1 import inference_pb2 as inference
from kvmesh.redis_url import VARIABLE

DEADLINE_S: Final = 60.0
OUTPUT_TOKENS: Final = 64
SESSION: Final = "demo"

SCENE: Final = (
    "You are the younger sister in a quiet country house, and you answer in the manner of an old novel. "
    "It is an evening late in the autumn. The rain has fallen since noon, the roads are bad, and nobody "
    "is expected before Sunday. Your mother has gone up early with a headache; your father reads in the "
    "library and will not be disturbed. Your elder sister sits at the window with her work in her lap, "
    "but she has not set a stitch for an hour. This morning there came a letter from the north, in a hand "
    "that you both know well, and she has not yet told anybody what is in it. You are fond of her, you "
    "are curious, and you know that she never says at once what she feels. The neighbours have talked of "
    "nothing but the ball at the assembly rooms, where the gentleman danced twice with another lady and "
    "went away before supper without taking leave. Some say that he is engaged; some say that he is proud; "
    "you believe neither, because you saw his face when he went out into the rain."
)
OPENING: Final = (
    "My dear, you are very good to sit with me, and to ask me nothing. I have read the letter three times, "
    "and I am no wiser than before. He writes that he was obliged to go, that he could not explain it then, "
    "and that he hopes to be in the county again before the end of the month. He asks after my mother, after "
    "my father's cough, after the old horse; he even asks after the piano. But of that evening he says not "
    "one word. Tell me honestly what you think of it, and whether I ought to answer him."
)
CONTINUATION: Final = "You may be right. But suppose that he comes on Sunday; what am I to say to him?"


async def demo(console: Console, *, is_redis_named: bool = False) -> int:
    """Run the demonstration; 0 when both turns were answered and everything is stopped.

    `is_redis_named`: the environment names a Redis; the demonstration says that it leaves that one alone.
    """
    if is_redis_named:
        console.print(
            f"The demo starts a Redis of its own; the one of {VARIABLE} is not used.", soft_wrap=True
        )
    try:
        with tempfile.TemporaryDirectory(prefix="kvmesh-demo-") as folder:
            async with running_mesh(MeshConfig(), Path(folder), console) as (supervisor, mesh):
                console.print(f"{len(mesh.processes)} processes are ready.")
                turns = await supervisor.run_while_alive(dialogue(console, mesh.addresses_of("frontend")))
                console.print(explanation_table(turns))
                for title, finished in turns:
                    console.print(
                        f"{title}: {reason(finished)}", markup=False, highlight=False, soft_wrap=True
                    )
    except Stopped:
        return 130
    except (ProcessFailed, RequestFailed) as failed:
        console.print(str(failed), markup=False, highlight=False, soft_wrap=True)
        return 1
    console.print("Everything is stopped.")
    return 0


async def dialogue(console: Console, addresses: Sequence[str]) -> list[tuple[str, inference.Finished]]:
    """Have both turns with the frontends at `addresses`; return their titles and ends. Raises RequestFailed."""
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
    finished = await stream(addresses, request, DEADLINE_S, on_response)
    console.print("\n")
    return "".join(received), finished


def run(console: Console, *, is_redis_named: bool = False) -> int:
    """Run the demonstration in an event loop of its own."""
    return asyncio.run(demo(console, is_redis_named=is_redis_named))
