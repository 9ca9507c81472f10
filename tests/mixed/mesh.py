"""A mesh with three pools of the same model version: engines with KV events, engines without, and a disaggregated pair.

The engines compute hashed arithmetic with one salt, so that every pool has the same right answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from bench import engines
from bench.engines import Engine
from bench.processes import ANY_CORE, Fleet, Process, free_port
from kvmesh.cli import shared_memory

SALT: Final = "mixed"
VOCAB_SIZE: Final = 4096
END_TOKEN: Final = 1
END_PROBABILITY: Final = 0.02
BLOCK_TOKENS: Final = 16
KV_BLOCKS: Final = 320
MAX_SEQUENCE_TOKENS: Final = 4096
STEP_S: Final = 0.004

REFERENCE: Final = "engines.reference.serve"
STOCK: Final = "tests.fakes.stock_backend.serve"


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool: its model's name for clients, the module of its engines, and its replicas by role."""

    name: str
    module: str
    replicas: tuple[str, ...]
    about: str


POOLS: Final = (
    Pool("events", REFERENCE, ("decode", "decode"), "two reference engines, aggregated, with KV events"),
    Pool("silent", STOCK, ("decode", "decode"), "two impersonated stock backends, without KV events"),
    Pool("pair", REFERENCE, ("prefill", "decode"), "a prefill and a decode replica, reference engines"),
)


@dataclass(slots=True)
class MixedMesh:
    """The running mesh. `engines` and their metrics addresses are keyed by replica."""

    frontend: str
    engines: dict[str, Engine] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    routers: dict[str, Process] = field(default_factory=dict)
    """Router of each pool."""


def start(fleet: Fleet) -> MixedMesh:
    """Start everything, and return when the frontend serves."""
    fleet.configure(_tables())
    mesh = MixedMesh("")
    for pool in POOLS:
        for number, role in enumerate(pool.replicas):
            name = f"{pool.name}-{role}-{number}"
            mesh.engines[name], mesh.metrics[name] = _engine(fleet, pool, f"{name}-engine")
    for engine in mesh.engines.values():
        engines.wait_ready(engine)
    services = []
    for pool in POOLS:
        mesh.routers[pool.name] = fleet.start_service("router", f"{pool.name}-router", "--pool", pool.name)
        services.append(mesh.routers[pool.name])
        for number, role in enumerate(pool.replicas):
            name = f"{pool.name}-{role}-{number}"
            options = ("--pool", pool.name, "--engine", mesh.engines[name].address)
            services.append(fleet.start_service(role, name, *options, "--engine-metrics", mesh.metrics[name]))
    for service in services:
        service.wait_ready()
    frontend = fleet.start_service("frontend", "frontend-0")
    frontend.wait_ready()
    mesh.frontend = frontend.address
    return mesh


def _tables() -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = {
        "engine": {
            "arithmetic": "hashed",
            "block_tokens": BLOCK_TOKENS,
            "vocab_size": VOCAB_SIZE,
            "max_sequence_tokens": MAX_SEQUENCE_TOKENS,
        },
        "frontend": {"max_output_tokens_default": 64},
    }
    for pool in POOLS:
        tables[f"versions.{pool.name}"] = {"salt": SALT, "model": pool.name}
        tables[f"pools.{pool.name}"] = {"version": pool.name}
    return tables


def _engine(fleet: Fleet, pool: Pool, name: str) -> tuple[Engine, str]:
    ports = {kind: free_port() for kind in ("grpc", "http", "metrics", "kv")}
    prefix = f"kvmesh_mixed_{ports['grpc']}_"
    options: dict[str, object] = {
        "salt": SALT,
        "vocab_size": VOCAB_SIZE,
        "end_token": END_TOKEN,
        "end_probability": END_PROBABILITY,
        "block_tokens": BLOCK_TOKENS,
        "kv_blocks": KV_BLOCKS,
        "max_sequence_tokens": MAX_SEQUENCE_TOKENS,
        "max_running": 32,
        "step_s": STEP_S,
        "shm_prefix": prefix,
        "work_dir": fleet.folder / name,
    }
    if pool.module == REFERENCE:
        options |= {"arithmetic": "hashed", "model_version": pool.name}
    process = fleet.module(
        name, pool.module, ANY_CORE, **options, **{f"{kind}_port": port for kind, port in ports.items()}
    )
    fleet.at_end(lambda: shared_memory.clear(prefix))
    return Engine(process, f"127.0.0.1:{ports['grpc']}"), f"127.0.0.1:{ports['metrics']}"
