"""The engines of `kvmesh up`: one launcher for each engine kind, with the options that the kind's module takes.

To add a kind, add it to `kvmesh.roles.ENGINE_KINDS`, and its options here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvmesh.cli.planned_process import Process
from kvmesh.cli.readiness import ModelReady
from kvmesh.cli.shared_memory import prefix_of
from kvmesh.config import ConfigError, MeshConfig
from kvmesh.config_keys import Mistakes
from kvmesh.config_sections import Engine
from kvmesh.models.folder import ModelFolderError
from kvmesh.models.tokenizer import ModelTokenizer
from kvmesh.pool_sections import COLD, COSTS
from kvmesh.pools import PoolSettings, VersionSettings
from kvmesh.roles import ENGINE_KINDS, EXTERNAL, REFERENCE, TENSORRT_LLM, engine_command

GPUS: Final = "CUDA_VISIBLE_DEVICES"

START_S: Final[Mapping[str, float]] = {TENSORRT_LLM: 1800.0}
"""Longest start of an engine kind that loads weights and captures CUDA graphs."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The engine of one replica: the address of its gRPC server, and its process, unless it is external."""

    address: str
    processes: tuple[Process, ...] = ()


class EngineLauncher:
    """Plans the engine of each replica, in the order of the replicas.

    `pools`: all pools. Raises ConfigError for a model folder, an llm.yaml or GPUs that cannot serve.
    """

    def __init__(self, config: MeshConfig, pools: Iterable[PoolSettings], data_dir: Path) -> None:
        pools = tuple(pools)
        self._config = config
        self._data_dir = data_dir
        self._kind = config.engine.kind
        self._vocabularies = vocabularies(config, (pool.version for pool in pools))
        self._external = {
            (pool.name, role): iter(addresses) for pool in pools for role, addresses in pool.external.items()
        }
        self._gpus = iter(config.engine.gpus)
        count = sum(pool.prefill + pool.decode for pool in pools)
        if config.engine.gpus and len(config.engine.gpus) != count:
            raise ConfigError(
                f"engine.gpus has {len(config.engine.gpus)} entries: allowed are {count}, one for each engine, or none."
            )
        for pool in pools:
            self._check_llm_config(pool.version)
        if self._kind == TENSORRT_LLM and importlib.util.find_spec("tensorrt_llm") is None:
            raise ConfigError(
                f'engine.kind = "{TENSORRT_LLM}" needs the package tensorrt_llm, which is not installed here: '
                'run kvmesh up in NVIDIA\'s container, or start the engines there and use "external".'
            )

    @property
    def ports(self) -> tuple[str, ...]:
        """Kinds of the ports of one engine; none for external engines."""
        return () if self._kind == EXTERNAL else ENGINE_KINDS[self._kind].ports

    def launch(self, pool: PoolSettings, role: str, name: str, ports: Iterator[int]) -> Launch:
        """Return the engine of the replica `name`. Takes its ports from `ports`."""
        if self._kind == EXTERNAL:
            return Launch(next(self._external[pool.name, role]))
        host, name = self._config.mesh.host, f"{name}-engine"
        own = {kind: next(ports) for kind in self.ports}
        prefix = prefix_of(name, self._data_dir)
        options = (
            *OPTIONS[self._kind](self, pool.version, role),
            *("--shm-prefix", prefix, "--work-dir", str(self._data_dir / "engines" / name)),
        )
        gpus = next(self._gpus, "")
        process = Process(
            name,
            "engine",
            tuple(engine_command(self._kind, host, own, more=options)),
            (),
            ModelReady(f"{host}:{own['grpc']}", f"{host}:{own['metrics']}"),
            environment=((GPUS, gpus),) if gpus else (),
            shared_memory=prefix,
            start_s=START_S.get(self._kind, 0.0),
        )
        return Launch(f"{host}:{own['grpc']}", (process,))

    def vocabulary_of(self, version: VersionSettings) -> int:
        """Return the vocabulary of a hashed engine; 0 for an engine that has its own."""
        return self._vocabularies.get(version.model_path, 0)

    def _check_llm_config(self, version: VersionSettings) -> None:
        if self._kind != TENSORRT_LLM:
            return
        if not version.llm_config_path.is_file():
            raise ConfigError(
                f'llm_config = "{version.engine.llm_config}" of version {version.name} is not a file: '
                "allowed is an llm.yaml."
            )


def _reference_options(launcher: EngineLauncher, version: VersionSettings, role: str) -> Iterator[str]:
    engine, vocabulary = version.engine, launcher.vocabulary_of(version)
    blocks = engine.blocks_of_prefill if role == "prefill" else engine.kv_blocks
    yield from ("--arithmetic", engine.arithmetic, "--kv-blocks", str(blocks))
    yield from ("--block-tokens", str(engine.block_tokens))
    yield from ("--salt", version.salt, "--model-version", version.name)
    yield from ("--handoff-timeout-s", str(engine.handoff_timeout_s))
    yield from ("--model-dir", str(version.model_path))
    yield from ("--max-sequence-tokens", str(engine.max_sequence_tokens))
    if vocabulary:
        yield from ("--vocab-size", str(vocabulary))
    yield from _costs(engine)
    if version.faults:
        yield from ("--faults", version.faults)


def _tensorrt_llm_options(_launcher: EngineLauncher, version: VersionSettings, _role: str) -> Iterator[str]:
    yield from ("--config", str(version.llm_config_path), "--model-version", version.name)


OPTIONS: Final[Mapping[str, Callable[[EngineLauncher, VersionSettings, str], Iterator[str]]]] = {
    REFERENCE: _reference_options,
    TENSORRT_LLM: _tensorrt_llm_options,
}
"""The options of each engine kind, for the engine of a replica of a role."""


def vocabularies(config: MeshConfig, versions: Iterable[VersionSettings]) -> dict[Path, int]:
    """Return the vocabulary of the hashed engines by folder, that of its tokenizer. Raises ConfigError for a bad folder."""
    found: dict[Path, int] = {}
    mistakes = Mistakes()
    for version in versions:
        is_hashed = version.engine.kind == REFERENCE and version.engine.arithmetic == "hashed"
        if not is_hashed or version.model_path in found:
            continue
        with mistakes.noted():
            try:
                tokenizer = ModelTokenizer.load(
                    version.model_path, text_max=config.frontend.message_bytes_max
                )
            except ModelFolderError as error:
                raise ConfigError(f"The model of version {version.name} cannot be served. {error}") from None
            found[version.model_path] = tokenizer.vocab_size
    mistakes.refuse()
    return found


def _costs(engine: Engine) -> Iterator[str]:
    if engine.arithmetic == "hashed":
        for key in (*COSTS, *(COLD if engine.cold_s else ())):
            yield f"--{key.replace('_', '-')}"
            yield str(getattr(engine, key))
