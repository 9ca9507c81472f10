"""A load generator of the client API: many Generate calls of one process. Commands come over stdin (see `load`)."""

from __future__ import annotations

import asyncio
import random
import time

import grpc

from bench import control, generation
from bench.load import LoadCounters, serve_load
from kvmesh.inference.v1 import inference_pb2 as pb
from kvmesh.inference.v1 import inference_pb2_grpc

DEADLINE_S = 600.0


class GenerateClient:
    """Reads many Generate streams. Implements Load."""

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceAsyncStub, seed: int) -> None:
        self.counters = LoadCounters()
        self._stub = stub
        self._draw = random.Random(seed)
        self._calls: set[asyncio.Task[None]] = set()

    def begin(self, prompt_tokens: int, output_tokens: int) -> None:
        """See Load."""
        # An engine with drawn weights emits every id now and then, an end token too.
        ids = generation.random_ids(prompt_tokens, self._draw)
        request = generation.request(ids, output_tokens, ignore_eos=True)
        self.counters.started += 1
        task = asyncio.create_task(self._read(request, output_tokens), name="generate")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def close(self) -> None:
        """See Load."""
        calls = list(self._calls)
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _read(self, request: pb.GenerateRequest, output_tokens: int) -> None:
        counters = self.counters
        started_s = time.monotonic()
        position = 0
        call = self._stub.Generate(request, timeout=DEADLINE_S)
        try:
            async for message in call:
                counters.messages += 1
                match message.WhichOneof("event"):
                    case "tokens":
                        if message.tokens.position != position:
                            counters.fault(f"position {message.tokens.position}, expected {position}")
                        if position == 0:
                            counters.first_tokens += 1
                            counters.ttft_ms.append((time.monotonic() - started_s) * 1000)
                        position += len(message.tokens.ids)
                        counters.tokens += len(message.tokens.ids)
                        counters.frames += 1
                        counters.rows += 1
                    case "finished":
                        if position == output_tokens:
                            counters.finished += 1
                        else:
                            counters.fault(f"{position} of {output_tokens} tokens")
                    case _:
                        pass
        except grpc.aio.AioRpcError as error:
            counters.fault(f"{error.code().name}: {error.details()}")
        finally:
            call.cancel()


async def serve(target: str, seed: int = 1) -> None:
    """Serve until stdin ends. `target`: host:port of the frontend."""
    async with generation.channel(target) as stub:
        await serve_load(GenerateClient(stub, seed), seed)


if __name__ == "__main__":
    control.main(serve, __doc__)
