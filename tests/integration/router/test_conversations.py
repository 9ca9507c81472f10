"""Session affinity on a whole mesh of processes: conversations keep their replica while every router is killed and
restarted.
"""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from tests.integration.generation import Answer, generate, token_request
from tests.integration.harness import configure, running_mesh

pytestmark = pytest.mark.mesh

CONVERSATIONS = 8
TURNS = 3
SYSTEM_TOKENS = 128
FIRST_TOKENS = 512
TURN_TOKENS = 64
OUTPUT_TOKENS = 8
BLOCK = 32


async def test_conversations_keep_their_replica_over_a_restart_of_every_router(tmp_path: Path) -> None:
    """Each turn finds all full blocks of the turn before in the prefix cache, for any router that places it, new or
    old.
    """
    config = configure(
        engine={
            "arithmetic": "hashed",
            "block_tokens": BLOCK,
            "kv_blocks": 4096,
            "prefill_kv_blocks": 4096,
            "max_sequence_tokens": 4096,
            "step_s": 0.002,
            "prefill_token_s": 0.0005,
        },
        prefill={"replicas": 2},
        decode={"replicas": 1},
        router={"replicas": 2, "snapshot_interval_s": 2.0, "local_prefill_tokens_max": 0},
        frontend={"replicas": 1},
    )
    rng = random.Random(7)
    system = [rng.randrange(5, 250) for _ in range(SYSTEM_TOKENS)]
    histories = [system + [rng.randrange(5, 250) for _ in range(FIRST_TOKENS)] for _ in range(CONVERSATIONS)]
    async with running_mesh(config, tmp_path) as mesh:
        stub = mesh.client()

        async def turn(number: int) -> Answer:
            histories[number] += [rng.randrange(5, 250) for _ in range(TURN_TOKENS)]
            prompt = list(histories[number])
            answer = await generate(
                stub, token_request(prompt, max_output_tokens=OUTPUT_TOKENS, explain=True)
            )
            assert answer.error is None, answer.error
            histories[number] += answer.ids
            return answer

        places: list[str] = []
        for round_ in range(TURNS):
            for name in mesh.running("router") if round_ == TURNS - 1 else ():
                await mesh.parts[name].end(signal.SIGKILL)
                await mesh.start(name)
            known = [len(history) - OUTPUT_TOKENS for history in histories]
            if round_:  # one by one: with a queue a router may choose another replica
                answers = [await turn(number) for number in range(CONVERSATIONS)]
            else:
                answers = await asyncio.gather(*(turn(number) for number in range(CONVERSATIONS)))
            moved, queued, now = list[str](), list[str](), list[str]()
            for number, answer in enumerate(answers):
                assert answer.finished is not None
                (attempt,) = answer.finished.explanation.attempts
                now.append(attempt.prefill_replica)
                assert attempt.candidates[0].replica == attempt.prefill_replica and attempt.reason
                if round_ and answer.finished.usage.cached_token_count < known[number] // BLOCK * BLOCK:
                    warmest = max(attempt.candidates, key=lambda each: each.matched_block_count)
                    is_known = warmest.matched_block_count >= known[number] // BLOCK
                    is_queued = is_known and warmest.queue.ToNanoseconds() > 0
                    (queued if is_queued else moved).append(f"turn {round_} of {number}: {attempt.reason}")
            # A busy machine may stall a replica, which then reports a queue for a moment. Only this moves a turn, and
            # its router knows the cached blocks.
            assert not moved and len(queued) <= CONVERSATIONS // 2, (moved, queued)
            if not round_:
                places = now
        assert set(places) == {"prefill-0", "prefill-1"}, "all are at one replica"
