"""Writes the files of tritonserver: a model repository with one model, and a backend directory with the Python stub."""

from dataclasses import dataclass
from pathlib import Path

from engines.reference.config import EngineConfig
from engines.reference.tensors import GUIDE_INPUTS, INPUTS, MODEL_NAME, OUTPUTS

_MODEL = """\
\"\"\"Generated; the model lives in engines.reference.\"\"\"

from engines.reference.triton_model import TritonPythonModel
"""


@dataclass(frozen=True, slots=True)
class TritonInstallation:
    """The files of a tritonserver in the nvidia-pytriton wheel. `root`: .../pytriton/tritonserver."""

    root: Path
    python_version: str  # "3.11"

    @property
    def server(self) -> Path:
        """The tritonserver binary."""
        return self.root / "bin" / "tritonserver"

    def backend_files(self) -> list[Path]:
        """Return the files of `<backend directory>/python`; Triton finds the stub only beside the backend's library."""
        backend = [path for path in sorted((self.root / "backends" / "python").iterdir()) if path.is_file()]
        stub = self.root / "python_backend_stubs" / self.python_version / "triton_python_backend_stub"
        return [*backend, stub]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Values of the model's configuration that are not in EngineConfig."""

    vocab_size: int
    max_sequence_tokens: int
    http_address: str  # "host:port" of the server that loads the model
    server_pid: int  # process id of that server, which starts the model's process
    digest: str = ""  # of the arithmetic: weights or salt, and vocabulary


def write(
    directory: Path, installation: TritonInstallation, config: EngineConfig, facts: ModelFacts
) -> tuple[Path, Path]:
    """Create the model repository and the backend directory under the empty `directory`; return both paths."""
    repository, backends = directory / "repository", directory / "backends"
    version = repository / MODEL_NAME / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_MODEL)
    text = config_pbtxt(config, facts)
    (repository / MODEL_NAME / "config.pbtxt").write_text(text)
    python = backends / "python"
    python.mkdir(parents=True)
    for path in installation.backend_files():
        (python / path.name).symlink_to(path)
    return repository, backends


def config_pbtxt(config: EngineConfig, facts: ModelFacts) -> str:
    """Return the model's config.pbtxt. Clients derive capabilities and limits from its `parameters`."""
    parameters = {
        "tokens_per_block": config.block_tokens,
        "kv_blocks": config.kv_blocks,
        "max_sequence_tokens": facts.max_sequence_tokens,
        "vocab_size": facts.vocab_size,
        "max_batch_tokens": config.step_tokens_max,
        "max_batch_sequences": config.running_max,
        "max_queue_size": config.queue_max,
        "kv_address": config.kv_address,
        "arithmetic": config.arithmetic,
        "model_version": config.model_version,
        "block_hash_salt": config.salt,
        "seeded_resume": "true",
        "output_start": "true",
        "release_handoff": "true",
        "http_address": facts.http_address,
        "server_pid": facts.server_pid,
        "engine_digest": facts.digest,
        "engine": config.to_json(),
    }
    lines = [
        f'name: "{MODEL_NAME}"',
        'backend: "python"',
        "max_batch_size: 1",
        "model_transaction_policy { decoupled: true }",
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
    ]
    for one in (*INPUTS, *(GUIDE_INPUTS if config.has_guides else ())):
        optional = " optional: true" if one.is_optional else ""
        lines.append(
            f'input {{ name: "{one.name}" data_type: {one.data_type} dims: {list(one.dims)}{optional} }}'
        )
    lines += [
        f'output {{ name: "{one.name}" data_type: {one.data_type} dims: {list(one.dims)} }}'
        for one in OUTPUTS
    ]
    for key, value in parameters.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: {_quoted(str(value))} }} }}')
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = "".join(
        f"\\{byte:03o}" if byte in b'"\\' or not 32 <= byte < 127 else chr(byte) for byte in text.encode()
    )
    return f'"{escaped}"'
