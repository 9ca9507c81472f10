"""Engines for the bench: the reference engine's `hashed` arithmetic in a real Triton server, its steps on a schedule."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from bench.processes import START_TIMEOUT_S, BenchError, Fleet, Process, free_port

MODEL_VERSION = "kvmesh-1"
MODEL = "tensorrt_llm"
BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """What the engine pretends to take."""

    step_s: float
    prefill_token_s: float = 0.0
    prefill_s: float = 0.0
    prefill_token2_s: float = 0.0
    kv_blocks: int = 60_000
    """KV cache; not a cost, but as large as the engine pretends."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine."""

    process: Process
    address: str
    """Of Triton's gRPC server."""


def start(fleet: Fleet, name: str, costs: EngineCosts, core: int) -> Engine:
    """Start an engine; it is not ready yet (`wait_ready`). Its shared memory is removed with the fleet."""
    ports = {kind: free_port() for kind in ("grpc", "http", "metrics", "kv")}
    prefix = f"kvmesh_bench_{ports['grpc']}_"
    options = {
        "arithmetic": "hashed",
        "model-version": MODEL_VERSION,
        "salt": MODEL_VERSION,
        "block-tokens": BLOCK_TOKENS,
        "kv-blocks": costs.kv_blocks,
        "max-running": 256,
        "queue-max": 1024,
        "max-step-tokens": 4096,
        "max-sequence-tokens": 8192,
        "step-s": costs.step_s,
        "prefill-token-s": costs.prefill_token_s,
        "prefill-s": costs.prefill_s,
        "prefill-token2-s": costs.prefill_token2_s,
        "shm-prefix": prefix,
        "work-dir": fleet.folder / name,
        **{f"{kind}-port": port for kind, port in ports.items()},
    }
    command = [sys.executable, "-m", "engines.reference.serve"]
    for option, value in options.items():
        command += [f"--{option}", str(value)]
    process = fleet.start(name, command, core)

    def remove_shared_memory() -> None:
        for path in Path("/dev/shm").glob(f"{prefix}*"):
            path.unlink(missing_ok=True)

    fleet.at_end(remove_shared_memory)
    return Engine(process, f"127.0.0.1:{ports['grpc']}")


def wait_ready(engine: Engine) -> None:
    """Return when the model answers. Raises BenchError if the engine ends or takes too long."""
    end_s = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(engine.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        while time.monotonic() < end_s:
            if not engine.process.is_running():
                raise BenchError(f"{engine.process.name} ended at start: {engine.process.log_tail()}")
            with contextlib.suppress(grpc.RpcError):
                if stub.ModelReady(service_pb2.ModelReadyRequest(name=MODEL), timeout=1).ready:
                    return
            time.sleep(0.1)
    raise BenchError(f"{engine.process.name} is not ready: {engine.process.log_tail()}")
