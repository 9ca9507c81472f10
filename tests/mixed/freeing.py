"""Measures how soon an engine frees the KV blocks of a request that the client of the mesh has cancelled."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any, Final

import grpc

from kvmesh.conformance.assembly import Target, opened_trial
from kvmesh.conformance.trial import Settings
from kvmesh.triton.client import TritonClient
from tests.integration.generation import token_request
from tests.mixed.mesh import BLOCK_TOKENS, KV_BLOCKS, MAX_SEQUENCE_TOKENS, VOCAB_SIZE

LIMIT_S: Final = 1.0
PROMPT_TOKENS: Final = 400
OUTPUT_TOKENS: Final = 2000
SIZES: Final = {
    "tokens_per_block": BLOCK_TOKENS,
    "kv_blocks": KV_BLOCKS,
    "max_sequence_tokens": MAX_SEQUENCE_TOKENS,
    "vocab_size": VOCAB_SIZE,
}


async def freed_after_s(
    stub: Any, pool: str, engines: dict[str, tuple[str, str]], cancels: int, seed: int
) -> list[float]:
    """Return, for each of `cancels` cancels, the seconds until no engine of the pool holds anything of it.

    `engines`: addresses of gRPC and of /metrics by replica. Infinite: not freed within LIMIT_S.
    """
    draw = random.Random(f"{seed}/{pool}/cancels")
    taken = []
    async with AsyncExitStack() as stack:
        watches = []
        for name, (address, metrics) in engines.items():
            client = TritonClient(address)
            stack.push_async_callback(client.close)
            target = Target(client=client, metrics=metrics, sizes=SIZES)
            trial = await stack.enter_async_context(opened_trial(target, Settings()))
            assert trial.watch is not None, f"{name} tells no load"
            watches.append(trial.watch)
        for _ in range(cancels):
            starts = [await watch.begin() for watch in watches]
            await _cancelled(stub, pool, draw)
            seen = await asyncio.gather(
                *(watch.until_back(start, LIMIT_S) for watch, start in zip(watches, starts, strict=True))
            )
            taken.append(max(each.seconds if each.is_back else float("inf") for each in seen))
    return taken


async def _cancelled(stub: Any, pool: str, draw: random.Random) -> None:
    """Send a long request and cancel it behind some tokens."""
    prompt = [draw.randrange(5, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
    request = token_request(prompt, max_output_tokens=OUTPUT_TOKENS, seed=draw.getrandbits(32))
    request.sampling.ignore_eos = True
    request.model = pool
    call, wanted, got = stub.Generate(request, timeout=60), draw.randint(1, 30), 0
    try:
        async for message in call:
            got += len(message.tokens.ids)
            if got >= wanted:
                break
    except grpc.aio.AioRpcError as error:
        raise AssertionError(f"{pool}: {error.code().name}: {error.details()}") from error
    finally:
        call.cancel()
