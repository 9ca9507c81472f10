"""A load generator of short requests with text: closed loop, a number of callers. Commands come over stdin."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from typing import Any, Final

from bench import control, generation
from kvmesh.config import ROOT
from kvmesh.inference.v1 import inference_pb2 as pb

TIMEOUT_S = 30.0
SOURCE: Final = ROOT / "LICENSE"
"""The text whose words are drawn. It does not change, so figures of two releases can be compared."""


def vocabulary() -> list[str]:
    """Return the words of SOURCE that have letters only."""
    return [word for word in SOURCE.read_text(encoding="utf-8").split() if word.isalpha()]


def request(words: int, vocabulary: list[str], draw: random.Random) -> pb.GenerateRequest:
    """Return a request of `words` random words for one token."""
    return pb.GenerateRequest(
        text=" ".join(draw.choices(vocabulary, k=words)),
        sampling=pb.Sampling(temperature=0.0, ignore_eos=True),
        limits=pb.Limits(max_output_tokens=1),
    )


async def serve(target: str, seed: int = 1) -> None:
    """Serve until stdin ends. `target`: host:port of the frontend."""
    draw, known = random.Random(seed), vocabulary()
    async with generation.channel(target) as stub:

        async def ask(words: int, callers: int, seconds: float) -> Mapping[str, Any]:
            """Send requests for `seconds`. Returns when all have ended: their number, and the first error."""
            end_s, finished, errors = time.monotonic() + seconds, 0, []

            async def call() -> None:
                nonlocal finished
                while time.monotonic() < end_s:
                    answer = await generation.ask(stub, request(words, known, draw), TIMEOUT_S)
                    finished += answer.finished is not None
                    if answer.error:
                        errors.append(answer.error)

            async with asyncio.TaskGroup() as tasks:
                for number in range(callers):
                    tasks.create_task(call(), name=f"caller-{number}")
            return {"finished": finished, "failed": len(errors), "faults": errors[:1]}

        await control.serve_commands(ask)


if __name__ == "__main__":
    control.main(serve, __doc__)
