"""Timings of an engine through Triton alone: prompts, decode steps, and the move of KV blocks between two engines."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient

from bench.engines import BLOCK_TOKENS
from bench.generation import random_ids
from bench.gpu.recording import Prefill, Step
from bench.results import BenchError
from kvmesh.cli.readiness import TRITON_MODEL

TIMEOUT_S: Final = 60.0
STEPS_TIMED: Final = 40
"""Steps of every stream that are timed."""
STEPS_WARM: Final = 10


@dataclass(slots=True)
class Answered:
    """An answer of an engine."""

    first_s: float = 0.0
    """From the request to the first response."""
    engine_s: float = 0.0
    """From the admission to the first token, by the engine's clock."""
    tokens: int = 0
    handoff: bytes = b""
    arrivals_s: list[float] = field(default_factory=list)


class Probe:
    """A client of one engine."""

    def __init__(self, address: str, seed: int) -> None:
        self._address = address
        self.draw = random.Random(seed)

    async def __aenter__(self) -> Probe:
        self._client = InferenceServerClient(self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(self, prompt: Sequence[int], output: int, kind: str = "", handoff: bytes = b"") -> Answered:
        """Send a greedy request and read its answer. Raises BenchError for an error of the engine."""
        inputs = [
            _tensor("input_ids", "INT32", np.array([prompt], dtype=np.int32)),
            _tensor("input_lengths", "INT32", np.array([[len(prompt)]], dtype=np.int32)),
            _tensor("request_output_len", "INT32", np.array([[output]], dtype=np.int32)),
            _tensor("streaming", "BOOL", np.array([[True]])),
            _tensor("return_perf_metrics", "BOOL", np.array([[True]])),
        ]
        if handoff:
            blob = np.frombuffer(handoff, np.uint8).reshape(1, -1)
            inputs.append(_tensor("context_phase_params", "UINT8", blob))
        body: dict[str, Any] = {"model_name": TRITON_MODEL, "inputs": inputs}
        if kind:
            body["parameters"] = {"request_type": kind}
        answer, began_s = Answered(), time.monotonic()
        async for result, error in self._client.stream_infer(_one(body), stream_timeout=TIMEOUT_S):
            if error is not None:
                raise BenchError(f"the engine at {self._address} refused: {error.message()}")
            self._take(answer, result, began_s)
        return answer

    def _take(self, answer: Answered, result: Any, began_s: float) -> None:
        tensors = {one.name: result.as_numpy(one.name) for one in result.get_response().outputs}
        ids = tensors.get("output_ids")
        if ids is None or not ids.size:
            return
        now_s = time.monotonic()
        if not answer.tokens:
            answer.first_s = now_s - began_s
            if "first_token_time_ns" in tensors:
                first, admitted = (
                    int(tensors[name].reshape(-1)[0])
                    for name in ("first_token_time_ns", "first_scheduled_time_ns")
                )
                answer.engine_s = (first - admitted) / 1e9
        answer.tokens += ids.size
        answer.arrivals_s.append(now_s)
        blob = tensors.get("context_phase_params")
        if blob is not None:
            answer.handoff = blob.tobytes()

    async def load(self) -> dict[str, Any]:
        """Return the engine's load report."""
        inputs = [
            _tensor(name, "INT32", np.array([[1]], dtype=np.int32))
            for name in ("input_ids", "input_lengths", "request_output_len")
        ]
        body = {"model_name": TRITON_MODEL, "inputs": inputs, "parameters": {"request_type": "load_report"}}
        call = self._client.stream_infer(_one(body), stream_timeout=TIMEOUT_S)
        try:
            async for result, error in call:
                if error is not None:
                    raise BenchError(f"the engine at {self._address} tells no load: {error.message()}")
                told: dict[str, Any] = json.loads(result.as_numpy("load_report").tobytes())
                return told
        finally:
            call.cancel()
        raise BenchError(f"the engine at {self._address} tells no load")


async def prefills(
    address: str, sizes: Sequence[tuple[int, int]], repeats: int, found: list[Prefill]
) -> None:
    """Time prompts alone in the engine, by its own clock; append each size as it is measured.

    The first run of a size warms the kernels up.
    """
    async with Probe(address, 11) as probe:
        for cached, uncached in sizes:
            seconds = []
            for repeat in range(repeats + 1):
                head = random_ids(cached, probe.draw)
                if head:
                    await probe.ask(head, 1)
                answer = await probe.ask([*head, *random_ids(uncached, probe.draw)], 1)
                if repeat:
                    seconds.append(answer.engine_s)
            found.append(Prefill(cached, uncached, tuple(seconds)))


async def transfers(
    source: str,
    target: str,
    sizes: Sequence[int],
    repeats: int,
    found: list[dict[str, Any]],
    block_bytes: int,
) -> None:
    """Time how long a decode engine takes to pull the blocks of a prompt, from the request to the first token."""
    async with Probe(source, 12) as prefill, Probe(target, 13) as decode:
        for size in sizes:
            seconds = []
            for repeat in range(repeats + 1):
                prompt = random_ids(size, prefill.draw)
                made = await prefill.ask(prompt, 2, "context_only")
                pulled = await decode.ask(prompt, 2, "generation_only", made.handoff)
                if repeat:
                    seconds.append(pulled.first_s)
            moved = -(-size // BLOCK_TOKENS) * block_bytes
            found.append({"tokens": size, "bytes": moved, "seconds": seconds})


async def steps(address: str, batches: Sequence[int], context: int, found: list[Step]) -> None:
    """Time decode steps of several streams: the median gap between two tokens of a stream, for three streams at most."""
    async with Probe(address, 14) as probe:
        for batch in batches:
            output = STEPS_WARM + STEPS_TIMED + batch  # streams begin one after the other
            asked = [probe.ask(random_ids(context, probe.draw), output) for _ in range(batch)]
            answers = await asyncio.gather(*asked)
            begin_s = max(answer.arrivals_s[0] for answer in answers)
            end_s = min(answer.arrivals_s[-1] for answer in answers)
            gaps = [
                after - before
                for answer in answers[:3]
                for before, after in zip(answer.arrivals_s, answer.arrivals_s[1:], strict=False)
                if begin_s <= before and after <= end_s
            ]
            if not gaps:
                raise BenchError(f"{batch} streams were never open together for a step")
            found.append(Step(batch, context + output // 2, (statistics.median(gaps),)))


async def _one(body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield body


def _tensor(name: str, datatype: str, values: np.ndarray[Any, Any]) -> InferInput:
    tensor = InferInput(name, list(values.shape), datatype)
    tensor.set_data_from_numpy(values)
    return tensor
