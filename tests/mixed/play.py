"""Plays conversations against the pools of a mesh, and checks each answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from kvmesh.inference.v1 import inference_pb2 as pb
from tests.integration.generation import token_request
from tests.mixed.conversations import Turn
from tests.mixed.mesh import END_TOKEN

CONCURRENCY: Final = 24
"""Open requests in all pools."""
CONVERSATIONS: Final = 32
"""Conversations that a pool has open. Their blocks are more than its engines hold, so that engines evict."""
TIMEOUT_S: Final = 60.0
WRONG_MAX: Final = 20


@dataclass(slots=True)
class PoolResult:
    """The answers of one pool. Tokens are those of prompts."""

    answers: int = 0
    cancelled: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ended_by_token: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """The first answers with another token than the right one, lost or repeated ones among them."""

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


async def play(
    stub: Any,
    conversations: Sequence[list[Turn]],
    pools: Sequence[str],
    on_answer: Callable[[], None],
) -> dict[str, PoolResult]:
    """Play every conversation in every pool, each turn after the one before. Return what each pool answered."""
    results = {pool: PoolResult() for pool in pools}
    room = asyncio.Semaphore(CONCURRENCY)
    open_ = {pool: asyncio.Semaphore(CONVERSATIONS) for pool in pools}

    async def converse(pool: str, turns: list[Turn]) -> None:
        async with open_[pool]:
            for turn in turns:
                if turn.cancel_after is not None:
                    async with room:
                        await _cancelled(stub, pool, turn, results[pool])
                async with room:
                    await _answered(stub, pool, turn, results[pool])
                on_answer()

    async with asyncio.TaskGroup() as tasks:
        for turns in conversations:
            for pool in pools:
                tasks.create_task(converse(pool, turns))
    return results


def request_of(pool: str, turn: Turn) -> pb.GenerateRequest:
    """Return the request of `turn` to the model of `pool`."""
    request = token_request(
        turn.prompt,
        max_output_tokens=turn.output_tokens_max,
        seed=turn.seed,
        temperature=turn.temperature,
    )
    request.model = pool
    return request


async def _answered(stub: Any, pool: str, turn: Turn, result: PoolResult) -> None:
    ids: list[int] = []
    finished: pb.Finished | None = None
    try:
        async for message in stub.Generate(request_of(pool, turn), timeout=TIMEOUT_S):
            ids += message.tokens.ids
            if message.HasField("finished"):
                finished = message.finished
    except grpc.aio.AioRpcError as error:
        result.errors[f"{error.code().name}: {error.details()}"[:120]] += 1
        return
    result.answers += 1
    result.tokens += len(ids)
    if finished is None:
        _note(result, f"no finish behind {len(ids)} tokens")
        return
    result.prompt_tokens += finished.usage.prompt_token_count
    result.cached_tokens += finished.usage.cached_token_count
    is_end = turn.answer[-1] == END_TOKEN
    result.ended_by_token += is_end
    reason = pb.FINISH_REASON_END_TOKEN if is_end else pb.FINISH_REASON_LENGTH
    if tuple(ids) != turn.answer:
        _note(result, f"got {ids}, right is {list(turn.answer)}")
    elif finished.finish_reason != reason:
        _note(result, f"finish reason {finished.finish_reason}, right is {reason}")
    elif finished.usage.output_token_count != len(ids):
        _note(result, f"usage tells {finished.usage.output_token_count} output tokens of {len(ids)}")


async def _cancelled(stub: Any, pool: str, turn: Turn, result: PoolResult) -> None:
    """Send the turn, and cancel it behind `cancel_after` tokens; its tokens until then must be right."""
    ids: list[int] = []
    call = stub.Generate(request_of(pool, turn), timeout=TIMEOUT_S)
    try:
        async for message in call:
            ids += message.tokens.ids
            if len(ids) >= (turn.cancel_after or 0):
                break
    except grpc.aio.AioRpcError as error:
        result.errors[f"{error.code().name}: {error.details()}"[:120]] += 1
    finally:
        call.cancel()
    result.cancelled += 1
    if tuple(ids) != turn.answer[: len(ids)]:
        _note(result, f"before its cancel: {ids}, right is {list(turn.answer)}")


def _note(result: PoolResult, text: str) -> None:
    if len(result.wrong) < WRONG_MAX:
        result.wrong.append(text)
