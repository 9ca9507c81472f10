"""Conversations of users: each turn repeats the prompt before and adds to it. Every answer is checked."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import grpc

from kvmesh.inference.v1 import inference_pb2 as pb
from tests.chaos.plan import Stream
from tests.chaos.truth import Truth
from tests.integration.generation import Answer, token_request
from tests.integration.warmup.warm_mesh import BLOCK, TENANTS, WarmMesh, bearer

OUTPUT_TOKENS = 8
BASE_BLOCKS = 8
TURNS = 3
VOCABULARY = 4096


@dataclass
class Conversations:
    """Users with `clients` conversations at a time."""

    mesh: WarmMesh
    clients: int = 4
    tenants: Sequence[str] = TENANTS
    seed: int = 1
    answers: list[Answer] = field(default_factory=list)
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    """Prompt of each answer."""

    async def turn(self, prompt: Sequence[int], tenant: str, session: str) -> Answer:
        """Send one prompt, and keep its answer."""
        request = token_request(prompt, max_output_tokens=OUTPUT_TOKENS, explain=True)
        request.session_id = session
        answer = await ask(self.mesh, request, tenant)
        self.answers.append(answer)
        self.prompts.append(tuple(prompt))
        return answer

    async def talk(self, number: int) -> None:
        """Run one conversation to its end."""
        chance = random.Random(f"{self.seed}/{number}")
        prompt = tokens(chance, BASE_BLOCKS * BLOCK)
        for _ in range(TURNS):
            answer = await self.turn(prompt, chance.choice(self.tenants), f"session-{self.seed}-{number}")
            prompt = [*prompt, *answer.ids, *tokens(chance, BLOCK)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Conversations]:
        """Talk inside the block, one conversation after the other for each client."""
        numbers, is_over = count(), asyncio.Event()

        async def client() -> None:
            while not is_over.is_set():
                await self.talk(next(numbers))

        async with asyncio.TaskGroup() as group:
            for _ in range(self.clients):
                group.create_task(client())
            try:
                yield self
            finally:
                is_over.set()

    def check(self) -> None:
        """Assert that every request was answered with the right tokens."""
        errors = [answer.error for answer in self.answers if answer.error is not None]
        assert self.answers and not errors, f"{len(errors)} of {len(self.answers)}: {errors[0]}"
        truth = Truth(self.mesh.config.engine.salt, self.mesh.config.engine.max_sequence_tokens)
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            assert answer.ids == right_tokens(truth, prompt)

    def usage(self) -> Counter[str]:
        """Return the tokens of all answers, by the kinds of the ledger."""
        found: Counter[str] = Counter()
        for answer in self.answers:
            assert answer.finished is not None
            usage = answer.finished.usage
            found.update(prompt=usage.prompt_token_count, output=usage.output_token_count)
        return found

    def used(self, replica: str) -> int:
        """Return the attempts that a replica took part in."""
        return sum(
            replica in (attempt.prefill_replica, attempt.decode_replica)
            for answer in self.answers
            if answer.finished is not None
            for attempt in answer.finished.explanation.attempts
        )


def right_tokens(truth: Truth, prompt: Sequence[int]) -> list[int]:
    """Return the tokens of a healthy engine for a prompt."""
    stream = Stream(0, "", 0.0, tuple(prompt), OUTPUT_TOKENS, 1, 0.0, 0, is_plain=False, frontend=0)
    return truth.tokens(stream)


def tokens(chance: random.Random, length: int) -> list[int]:
    """Return random token ids."""
    return [chance.randrange(4, VOCABULARY) for _ in range(length)]


async def ask(mesh: WarmMesh, request: pb.GenerateRequest, tenant: str, timeout_s: float = 30.0) -> Answer:
    """Send a request of a tenant, and return its answer."""
    answer = Answer()
    call = mesh.client().Generate(request, metadata=bearer(tenant), timeout=timeout_s)
    try:
        async for message in call:
            kind = message.WhichOneof("event")
            if kind == "tokens":
                answer.ids += message.tokens.ids
            elif kind == "finished":
                answer.finished = message.finished
    except grpc.aio.AioRpcError as error:
        answer.error = error
    finally:
        call.cancel()
    return answer
