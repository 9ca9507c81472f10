"""Two engines in Triton on one host: one for prefill, one for decode."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, Final

from bench.engines import BLOCK_TOKENS, MODEL_VERSION, Engine
from bench.processes import ANY_CORE, Fleet, free_port
from bench.results import BenchError
from kvmesh.cli import shared_memory
from kvmesh.cli.readiness import TRITON_MODEL
from tools.gpu.host import Plan

RUNNING_MAX: Final = 128
QUEUE_MAX: Final = 1024
ROLES: Final = ("prefill", "decode")


def start(fleet: Fleet, plan: Plan) -> dict[str, Engine]:
    """Start both engines without waiting. They are keyed by the name of their replica."""
    sizes = (plan.prefill_blocks, plan.decode_blocks)
    return {
        f"{role}-0": _start(fleet, f"{role}-0-engine", plan, blocks, gpu)
        for role, blocks, gpu in zip(ROLES, sizes, plan.gpus, strict=True)
    }


def wait_ready(engines: dict[str, Engine], until_s: float) -> None:
    """Return when both models are ready. `until_s`: of the monotonic clock. Raises BenchError."""
    import grpc
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    for name, engine in engines.items():
        with grpc.insecure_channel(engine.address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while True:
                with contextlib.suppress(grpc.RpcError):
                    if stub.ModelReady(service_pb2.ModelReadyRequest(name=TRITON_MODEL), timeout=1).ready:
                        break
                if not engine.process.is_running() or time.monotonic() > until_s:
                    state = "is not ready" if engine.process.is_running() else "ended"
                    raise BenchError(f"the engine of {name} {state}: {engine.process.log_tail()}")
                time.sleep(0.1)


def _start(fleet: Fleet, name: str, plan: Plan, blocks: int, gpu: str) -> Engine:
    ports = {kind: free_port() for kind in ("grpc", "http", "metrics", "kv")}
    prefix = f"kvmesh_gpu_{ports['grpc']}_"
    with _visible(gpu):
        process = fleet.module(
            name,
            "engines.reference.serve",
            ANY_CORE,
            **_arithmetic(plan),
            model_version=MODEL_VERSION,
            salt=MODEL_VERSION,
            block_tokens=BLOCK_TOKENS,
            kv_blocks=blocks,
            max_running=RUNNING_MAX,
            queue_max=QUEUE_MAX,
            max_step_tokens=plan.step_tokens,
            max_sequence_tokens=plan.sequence_tokens,
            shm_prefix=prefix,
            work_dir=fleet.folder / name,
            **{f"{kind}_port": port for kind, port in ports.items()},
        )
    fleet.at_end(lambda: shared_memory.clear(prefix))
    return Engine(process, f"127.0.0.1:{ports['grpc']}")


def _arithmetic(plan: Plan) -> dict[str, Any]:
    if plan.arithmetic == "hashed":
        return {
            "arithmetic": "hashed",
            "vocab_size": plan.vocabulary,
            "step_s": 0.01,
            "prefill_s": 0.005,
            "prefill_token_s": 2e-5,
        }
    dtype = "bfloat16" if plan.device == "cuda" else "float32"
    return {"arithmetic": "torch", "torch_shape": plan.shape, "device": plan.device, "dtype": dtype}


@contextlib.contextmanager
def _visible(gpu: str) -> Iterator[None]:
    """Let processes that are started inside see one GPU alone. Empty: all."""
    name, before = "CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpu and before is None:
        os.environ[name] = gpu
    try:
        yield
    finally:
        if gpu and before is None:
            del os.environ[name]
