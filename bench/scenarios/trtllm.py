"""The model on TensorRT-LLM beside the reference engine: CPU for each token, in tritonserver and the model's process.

TensorRT-LLM is replaced by the recorded surface of the tests. It runs the reference engine's scheduler and hashed
arithmetic. So the difference is the LLM API's queues and this model's own code. The load is this module as a process.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from array import array
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import tritonclient.grpc.aio as triton

from bench import accounting, aims, control, engines
from bench.engines import BLOCK_TOKENS, MODEL_VERSION, Engine, EngineCosts
from bench.processes import LOAD_CORE, TEST_CORE, Fleet, Process, free_port
from bench.results import ScenarioResults
from bench.windows import Case, Pace
from kvmesh.cli import shared_memory
from kvmesh.config import ROOT
from kvmesh.triton import port, tensors

FAKE = ROOT / "tests" / "fakes" / "tensorrt_llm"
CASE = Case(64, 20)
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 4000
"""Longer than any window."""
VOCABULARY = 4096


def run(results: ScenarioResults, pace: Pace) -> None:
    """Measure one repeat: both engines one after the other, each alone on its core."""
    spent: dict[str, float] = {}
    for kind, start in (("reference", _start_reference), ("tensorrt_llm", _start_fake)):
        with Fleet() as fleet:
            engine = start(fleet)
            engines.wait_ready(engine)
            load = fleet.start_ready("load", __name__, LOAD_CORE)
            spent[kind] = _us_per_token(engine, load, pace)
            results.add(str(CASE), f"CPU per token, {kind}", "us", spent[kind])
    results.add(str(CASE), aims.OWN_COST, "us", spent["tensorrt_llm"] - spent["reference"])


def _us_per_token(engine: Engine, load: Process, pace: Pace) -> float:
    load.ask("open", target=engine.address, streams=CASE.streams)
    family = [engine.process.pid, *accounting.descendants(engine.process.pid)]
    time.sleep(pace.warm_s)
    before_ns, first = sum(map(accounting.cpu_ns, family)), load.ask("counters")["tokens"]
    time.sleep(pace.window_s)
    spent_ns, tokens = sum(map(accounting.cpu_ns, family)) - before_ns, load.ask("counters")["tokens"] - first
    load.ask("close")
    return float(spent_ns / 1e3 / max(1, tokens))


def _start_reference(fleet: Fleet) -> Engine:
    return engines.start(fleet, "reference", EngineCosts(step_s=CASE.step_ms / 1000), TEST_CORE)


def _start_fake(fleet: Fleet) -> Engine:
    ports = {kind: free_port() for kind in ("grpc", "http", "metrics")}
    prefix = f"kvmesh_bench_{ports['grpc']}_"
    options = [part for kind, each in ports.items() for part in (f"--{kind}-port", str(each))]
    command = ["env", f"PYTHONPATH={FAKE}", sys.executable, "-m", "engines.tensorrt_llm.serve", *options]
    command += ["--config", str(_write(fleet.folder)), "--shm-prefix", prefix]
    process = fleet.start("tensorrt_llm", [*command, "--work-dir", str(fleet.folder / "work")], TEST_CORE)
    fleet.at_end(lambda: shared_memory.clear(prefix))
    return Engine(process, f"127.0.0.1:{ports['grpc']}")


def _write(folder: Path) -> Path:
    """Write a model folder and llm.yaml, which is JSON, a subset of YAML."""
    model = folder / "model"
    model.mkdir()
    files = {
        "config.json": {"vocab_size": VOCABULARY, "max_position_embeddings": 8192},
        "fake.json": {"step_s": CASE.step_ms / 1000, "salt": MODEL_VERSION},
        "weights.safetensors": {},
    }
    for name, content in files.items():
        (model / name).write_text(json.dumps(content), encoding="utf-8")
    blocks = EngineCosts(0.0).kv_blocks
    arguments = {
        "model": str(model),
        "max_batch_size": 256,
        "max_num_tokens": 4096,
        "kv_cache_config": {"tokens_per_block": BLOCK_TOKENS, "max_tokens": blocks * BLOCK_TOKENS},
        "kvmesh": {"model_version": MODEL_VERSION},
    }
    path = folder / "llm.yaml"
    path.write_text(json.dumps(arguments), encoding="utf-8")
    return path


class Streams:
    """Open streams of one engine, and the tokens that they have got."""

    def __init__(self) -> None:
        self.tokens = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, target: str, streams: int, seed: int = 1) -> None:
        """Start `streams` answers, each on a stream of its own."""
        draw = random.Random(seed)
        inputs = tensors.RequestTensors(
            frozenset(("input_ids", "input_lengths", "request_output_len", "streaming"))
        )
        client = triton.InferenceServerClient(target)
        for number in range(streams):
            prompt = array("i", [draw.randrange(16, VOCABULARY) for _ in range(PROMPT_TOKENS)]).tobytes()
            kind = port.CallKind.CONTEXT_AND_GENERATION
            call = port.EngineCall(kind, str(number), prompt, OUTPUT_TOKENS)
            self._tasks.append(asyncio.create_task(self._read(client, inputs.of_call(call))))

    async def _read(self, client: triton.InferenceServerClient, inputs: list[triton.InferInput]) -> None:
        async def one() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "tensorrt_llm", "inputs": inputs}

        async for result, error in client.stream_infer(one()):
            if error is not None:
                raise RuntimeError(str(error))
            self.tokens += int(result.as_numpy("sequence_length").reshape(-1)[0])

    async def counters(self) -> Mapping[str, Any]:
        """Return the counters."""
        return {"tokens": self.tokens}

    async def close(self) -> None:
        """End all streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def serve() -> None:
    """Serve until stdin ends."""
    streams = Streams()
    await control.serve_commands(streams.open, streams.counters, streams.close)


if __name__ == "__main__":
    control.main(serve, __doc__)
