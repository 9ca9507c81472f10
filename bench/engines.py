"""Reference engines with `hashed` arithmetic and scheduled steps, each in a real Triton server."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from bench.processes import Fleet, Process, free_port
from kvmesh.cli import shared_memory
from kvmesh.cli.readiness import TRITON_MODEL

MODEL_VERSION = "kvmesh-1"
BLOCK_TOKENS = 32
CONFIG: Final[dict[str, Any]] = {"arithmetic": "hashed", "max_sequence_tokens": 8192, "kv_blocks": 60_000}
"""The section `engine` of the configuration of a mesh with such engines."""


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Times that the engine simulates, and the size of its cache.

    The times are those of engines.reference.cost_model.CostModel: per step, per uncached prompt token, per prefill, and per
    difference of squared positions.
    """

    step_s: float
    prefill_token_s: float = 0.0
    prefill_s: float = 0.0
    prefill_token2_s: float = 0.0
    kv_blocks: int = 60_000
    """Blocks of the KV cache."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine."""

    process: Process
    address: str
    """Address of Triton's gRPC server."""


def start(fleet: Fleet, name: str, costs: EngineCosts, core: int) -> Engine:
    """Start an engine without waiting for it (`wait_ready`). Its shared memory is removed with the fleet."""
    ports = {kind: free_port() for kind in ("grpc", "http", "metrics", "kv")}
    prefix = f"kvmesh_bench_{ports['grpc']}_"
    process = fleet.module(
        name,
        "engines.reference.serve",
        core,
        **asdict(costs),
        arithmetic="hashed",
        model_version=MODEL_VERSION,
        salt=MODEL_VERSION,
        block_tokens=BLOCK_TOKENS,
        max_running=256,
        queue_max=1024,
        max_step_tokens=4096,
        max_sequence_tokens=8192,
        shm_prefix=prefix,
        work_dir=fleet.folder / name,
        **{f"{kind}_port": port for kind, port in ports.items()},
    )
    fleet.at_end(lambda: shared_memory.clear(prefix))
    return Engine(process, f"127.0.0.1:{ports['grpc']}")


def wait_ready(engine: Engine, every_s: float = 0.1) -> None:
    """Return when the model is ready. Raises BenchError if the engine ends or takes too long."""
    with grpc.insecure_channel(engine.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def is_ready() -> bool:
            with contextlib.suppress(grpc.RpcError):
                return bool(
                    stub.ModelReady(service_pb2.ModelReadyRequest(name=TRITON_MODEL), timeout=1).ready
                )
            return False

        engine.process.wait_until(is_ready, "is not ready", every_s)
