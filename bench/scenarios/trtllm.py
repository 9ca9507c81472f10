"""The engine on TensorRT-LLM beside the reference engine: CPU for each token, without tritonserver.

TensorRT-LLM is replaced by the recorded surface of the tests. It runs the reference engine's scheduler and hashed
arithmetic. The process under test is this module as a process, with one of three engines:

    reference     the reference engine
    api           the LLM API alone: a task for each request iterates its result, and drops it
    tensorrt_llm  the engine of engines.tensorrt_llm on the LLM API

The engine's own cost is that of the third above the second: what an operator pays above TensorRT-LLM itself.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import aims, control, llm_surface
from bench.processes import TEST_CORE, Fleet
from bench.results import ScenarioResults
from bench.windows import Case, Pace
from engines.contract.output_queue import OutputQueue
from engines.contract.outputs import RequestOutput
from engines.contract.request import EngineRequest, RequestKind
from engines.reference.config import EngineConfig
from engines.reference.cost_model import CostModel
from engines.reference.engine import ReferenceEngine
from engines.reference.loading import load_arithmetic
from engines.tensorrt_llm import model_folder, settings
from engines.tensorrt_llm.engine import TensorRtLlmEngine

CASE: Final = Case(64, 20)
PROMPT_TOKENS: Final = 32
OUTPUT_TOKENS: Final = 4000
"""Longer than any window."""
VOCABULARY: Final = 256
"""Small, so that the arithmetic, which all engines share, takes little of the time."""

BLOCK_TOKENS: Final = 32
BLOCKS: Final = 16_384
KINDS: Final = ("reference", "api", "tensorrt_llm")
REPEATS: Final = 3
"""Windows of each engine in a repeat, in turn. The cheapest counts: disturbances only add."""


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat."""
    spent = {kind: float("inf") for kind in KINDS}
    for _ in range(REPEATS):
        for kind in KINDS:
            with Fleet() as fleet:
                probe = fleet.start_ready("engine", __name__, TEST_CORE)
                told = probe.ask("measure", kind=kind, warm_s=pace.warm_s, window_s=pace.window_s)
                spent[kind] = min(spent[kind], told["us"])
    for kind in KINDS:
        results.add(str(CASE), f"CPU per token, {kind}", "us", spent[kind])
    results.add(str(CASE), aims.OWN_COST, "us", spent["tensorrt_llm"] - spent["api"])
    results.add(
        str(CASE),
        "CPU per token above the reference engine",
        "us",
        spent["tensorrt_llm"] - spent["reference"],
    )


class _Count:
    """The stream of a request: counts its tokens."""

    is_streaming = True
    tokens = 0

    def send(self, output: RequestOutput) -> None:
        assert output.error is None, output.error
        self.tokens += len(output.tokens)

    def is_cancelled(self) -> bool:
        return False


async def measure(kind: str, warm_s: float, window_s: float) -> Mapping[str, Any]:
    """Run 64 requests on an engine. Return `us` of this process's CPU for each token of a window."""
    with _running(kind) as tokens:
        await asyncio.sleep(warm_s)
        spent_s, first = time.process_time(), tokens()
        await asyncio.sleep(window_s)
        spent_s, made = time.process_time() - spent_s, tokens() - first
    assert made, f"{kind} made no token"
    return {"us": spent_s / made * 1e6}


@contextmanager
def _running(kind: str) -> Iterator[Callable[[], int]]:
    """Start an engine with 64 requests. Yield a function that returns the number of its tokens."""
    if kind == "reference":
        config = EngineConfig(
            "hashed",
            kv_blocks=BLOCKS,
            block_tokens=BLOCK_TOKENS,
            step_tokens_max=4096,
            running_max=256,
            vocab_size=VOCABULARY,
            max_sequence_tokens=8192,
            costs=CostModel(step_s=CASE.step_ms / 1000),
        )
        queue = OutputQueue()
        reference = ReferenceEngine(config, *load_arithmetic(config), queue)
        reference.start()
        with _submitted(reference, queue) as tokens:
            yield tokens
        return
    sys.path.insert(0, str(llm_surface.SURFACE))
    api = importlib.import_module("engines.tensorrt_llm.api")
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
        given = _llm_file(Path(folder))
        written = settings.complete(given, model_folder.read(given["model"]))
        if kind == "api":
            llm, count = api.open_llm(written.llm), _Count()
            tasks = [asyncio.create_task(_iterate(api, llm, each, count)) for each in _requests()]
            yield lambda: count.tokens
            for task in tasks:
                task.cancel()
            llm.shutdown()
            return
        queue = OutputQueue()
        engine = TensorRtLlmEngine(written, api, queue, os.abort)
        engine.start()
        with _submitted(engine, queue) as tokens:
            yield tokens


@contextmanager
def _submitted(engine: Any, queue: OutputQueue) -> Iterator[Callable[[], int]]:
    queue.start()
    streams = []
    for request in _requests():
        stream = _Count()
        streams.append(stream)
        queue.open(request.key, stream)
        engine.submit(request)
    yield lambda: sum(stream.tokens for stream in streams)
    engine.close()
    queue.close()


async def _iterate(api: Any, llm: Any, request: EngineRequest, count: _Count) -> None:
    async for result in api.generate(llm, request, None, {}):
        count.tokens += len(result.outputs[0].token_ids_diff)


def _requests() -> list[EngineRequest]:
    draw = random.Random(1)
    kind = RequestKind.CONTEXT_AND_GENERATION
    return [
        EngineRequest(
            key=number + 1,
            request_id=str(number),
            kind=kind,
            prompt=np.array([draw.randrange(16, VOCABULARY) for _ in range(PROMPT_TOKENS)], dtype=np.int32),
            output_tokens_max=OUTPUT_TOKENS,
        )
        for number in range(CASE.streams)
    ]


def _llm_file(folder: Path) -> dict[str, Any]:
    """Write a model folder, and return the llm.yaml for it."""
    model = folder / "model"
    llm_surface.write_model(model, VOCABULARY, 8192, {"step_s": CASE.step_ms / 1000})
    return {
        "model": str(model),
        "max_batch_size": 256,
        "max_num_tokens": 4096,
        "kv_cache_config": {"tokens_per_block": BLOCK_TOKENS, "max_tokens": BLOCKS * BLOCK_TOKENS},
        "kvmesh": {"model_version": "bench"},
    }


async def serve() -> None:
    """Serve until stdin ends."""
    await control.serve_commands(measure)


if __name__ == "__main__":
    control.main(serve, __doc__)
