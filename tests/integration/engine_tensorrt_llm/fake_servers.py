"""Real tritonservers with the model on TensorRT-LLM, over the recorded surface of tests/fakes/tensorrt_llm."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import yaml

from bench import llm_surface
from engines.contract import model_repository, tritonserver
from engines.tensorrt_llm import repository
from kvmesh.config import ROOT
from kvmesh.ports import free_ports
from tests.integration.engine.servers import Server
from tests.integration.harness import own_loopback

BLOCKS, BLOCK_TOKENS = 96, 8
VOCABULARY, LONGEST = 4096, 4096
TRANSFER_MS = 1500


def write(directory: Path, fake: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a model folder and an llm.yaml; return the path of the latter.

    `fake`: settings of the fake. `changes`: keys of llm.yaml, "__" between the names of a nested object.
    """
    llm_surface.write_model(directory / "model", VOCABULARY, LONGEST, fake or {})
    given: dict[str, Any] = {
        "model": "./model",
        "max_batch_size": 16,
        "max_num_tokens": 64,
        "kv_cache_config": {"tokens_per_block": BLOCK_TOKENS, "max_tokens": BLOCKS * BLOCK_TOKENS},
        "cache_transceiver_config": {"backend": "UCX", "kv_transfer_timeout_ms": TRANSFER_MS},
        "kvmesh": {"model_version": "fake-1"},
    }
    for path, value in changes.items():
        outer, _, inner = path.rpartition("__")
        (given[outer] if outer else given)[inner] = value
    config = directory / "llm.yaml"
    config.write_text(yaml.safe_dump(given), encoding="utf-8")
    return config


def launch(config: Path, *options: str) -> Server:
    """Start a server of an llm.yaml on free ports."""
    host, directory = own_loopback(), config.parent
    grpc, http, metrics = free_ports(host, 3)
    prefix = f"kvmesh_test_{host}_{grpc}_"
    command = ["env", f"PYTHONPATH={llm_surface.SURFACE}", sys.executable, "-m", "engines.tensorrt_llm.serve"]
    command += [f"--config={config}", f"--host={host}", f"--grpc-port={grpc}", f"--http-port={http}"]
    command += [f"--metrics-port={metrics}", f"--shm-prefix={prefix}", f"--work-dir={directory / 'work'}"]
    return _started(host, (grpc, http, metrics), prefix, directory, [*command, "--die-with-parent", *options])


def _started(
    host: str, ports: tuple[int, int, int], prefix: str, directory: Path, command: list[str]
) -> Server:
    """Start a server. `ports`: of gRPC, HTTP and metrics."""
    grpc, http, metrics = (f"{host}:{port}" for port in ports)
    server = Server(grpc, http, "", prefix, directory / "log", time.monotonic(), command, metrics)
    server.start()
    return server


def requests_of(server: Server) -> list[dict[str, Any]]:
    """Return what the fake of a server was asked, if it records."""
    path = server.log.parent / "model" / "requests.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def launch_by_hand(config: Path, *options: str) -> Server:
    """Start tritonserver on the written model repository of an llm.yaml, as in NVIDIA's container, on free ports."""
    host, directory = own_loopback(), config.parent
    grpc, http, metrics = free_ports(host, 3)
    prefix = f"kvmesh_test_{host}_{grpc}_"
    installation = tritonserver.find_installation()
    repository.write(repository.load(config), directory / "models")
    model_repository.write_backend(directory / "backends", installation)
    # The fake runs the reference engine, which no written repository has.
    code = directory / "models" / "tensorrt_llm" / "1" / "engines" / "reference"
    code.symlink_to(ROOT / "engines" / "reference")
    command = [
        str(installation.server),
        f"--model-repository={directory / 'models'}",
        f"--backend-directory={directory / 'backends'}",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        "--allow-gpu-metrics=false",
        *(f"--{kind}-address={host}" for kind in ("grpc", "http", "metrics")),
        *(f"--grpc-port={grpc}", f"--http-port={http}", f"--metrics-port={metrics}"),
        *options,
    ]
    libraries = sysconfig.get_config_var("LIBDIR") or ""
    path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    setting = [f"PYTHONPATH={llm_surface.SURFACE}", f"LD_LIBRARY_PATH={libraries}", path]
    return _started(host, (grpc, http, metrics), prefix, directory, ["env", *setting, *command])
