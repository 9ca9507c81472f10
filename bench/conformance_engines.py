"""The engines of the conformance page. To add one, add an entry: the module that starts it, and its options."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml

from bench import llm_surface
from kvmesh.roles import ENGINE_KINDS, REFERENCE, TENSORRT_LLM


@dataclass(frozen=True, slots=True)
class CheckedEngine:
    """One engine, or a pair of equal ones."""

    name: str
    what: str
    """The engine in a sentence."""
    module: str
    """Module that starts it and takes `--PORT-port` for each of `ports`."""
    options: dict[str, object] = field(default_factory=dict)
    prepare: Callable[[Path], Sequence[str]] | None = None
    """Writes files into a new folder, and returns further words of the command."""
    python_path: Path | None = None
    """Folder with packages of the engine alone."""
    ports: tuple[str, ...] = ("grpc", "http", "metrics")
    has_pair: bool = True
    """Two of them are started, and one decodes what the other has prefilled."""
    has_metrics: bool = False
    """Its load comes from Triton's metrics."""
    checks: tuple[str, ...] = ()
    """Further options of `kvmesh conformance`."""
    needs: str = ""
    """Module that must be installed; empty: none."""

    def obstacle(self) -> str:
        """Return why the engine cannot be started here; empty: it can."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"the package {self.needs} is not installed"
        return ""


FAKE_VOCABULARY: Final = 4096


def _llm_yaml(folder: Path) -> Sequence[str]:
    """Write a model folder and its llm.yaml for the recorded surface."""
    llm_surface.write_model(folder / "model", FAKE_VOCABULARY, 4096, {})
    keys = {
        "model": "./model",
        "max_batch_size": 16,
        "max_num_tokens": 512,
        "kv_cache_config": {"tokens_per_block": 32, "max_tokens": 65536, "event_buffer_max_size": 4096},
        "cache_transceiver_config": {"backend": "UCX"},
        "kvmesh": {"model_version": "fake-1"},
    }
    (folder / "llm.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    return [f"--config={folder / 'llm.yaml'}"]


_REFERENCE: Final = ENGINE_KINDS[REFERENCE]
_TENSORRT_LLM: Final = ENGINE_KINDS[TENSORRT_LLM]

ENGINES: Final = (
    CheckedEngine(
        "hashed",
        "The reference engine with hashed arithmetic, which tests of the mesh use.",
        _REFERENCE.module,
        {"arithmetic": "hashed", "step_s": 0.002},
        ports=_REFERENCE.ports,
    ),
    CheckedEngine(
        "transformer",
        "The reference engine with its small transformer on the CPU, in float64.",
        _REFERENCE.module,
        {"arithmetic": "transformer"},
        ports=_REFERENCE.ports,
        checks=("--end-id", "1"),
    ),
    CheckedEngine(
        "torch",
        "The reference engine with a Llama-shaped model of random weights in torch, on the CPU.",
        _REFERENCE.module,
        {"arithmetic": "torch", "torch_shape": "test", "device": "cpu"},
        ports=_REFERENCE.ports,
        needs="torch",
    ),
    CheckedEngine(
        "fake-backed",
        "The model of `engines/tensorrt_llm` over a recorded surface of the LLM API, with hashed arithmetic.",
        _TENSORRT_LLM.module,
        prepare=_llm_yaml,
        python_path=llm_surface.SURFACE,
        ports=_TENSORRT_LLM.ports,
    ),
    CheckedEngine(
        "impersonated",
        "The tensors and habits of TensorRT-LLM's C++ backend, with hashed arithmetic, in two MPI worlds.",
        "tests.fakes.stock_backend.serve",
        {"step_s": 0.002},
        ports=("grpc", "http", "metrics", "kv"),
        has_metrics=True,
        checks=("--vocab-size", "4096", "--max-sequence-tokens", "4096"),
    ),
)


def names() -> Iterator[str]:
    """Yield the names of all engines."""
    return (engine.name for engine in ENGINES)
