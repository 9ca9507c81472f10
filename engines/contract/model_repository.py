"""Writes the files of tritonserver: a model repository with one model, and a backend directory with the Python stub."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from engines.contract.tensors import MODEL_NAME, Input, Output

IMPORT_PATH = """\
# Triton's Python stub ignores PYTHONPATH (seen with 2.51 and Python 3.11).
sys.path[:0] = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each not in sys.path]
"""
"""Statements of a model.py that needs PYTHONPATH."""

_MODEL = (
    """\
\"\"\"Generated; the model lives in {package}.\"\"\"

import os
import sys

"""
    + IMPORT_PATH
    + """
from {package}.triton_model import TritonPythonModel  # noqa: E402
"""
)


@dataclass(frozen=True, slots=True)
class TritonInstallation:
    """The files of a tritonserver. `root`: .../pytriton/tritonserver of the nvidia-pytriton wheel, or /opt/tritonserver."""

    root: Path
    python_version: str  # "3.11"

    @property
    def server(self) -> Path:
        """The tritonserver binary."""
        return self.root / "bin" / "tritonserver"

    def backend_files(self) -> list[Path]:
        """Return the files of `<backend directory>/python`; Triton finds the stub only beside the backend's library."""
        backend = [path for path in sorted((self.root / "backends" / "python").iterdir()) if path.is_file()]
        stubs = self.root / "python_backend_stubs"
        if not stubs.is_dir():  # NVIDIA's containers have one stub, beside the library
            return backend
        return [*backend, stubs / self.python_version / "triton_python_backend_stub"]


def write_model(directory: Path, package: str, config: str, files: Mapping[str, bytes] | None = None) -> Path:
    """Create the model repository `directory` with the model of `package`; return the folder of its version.

    `package`: an importable package with the module `triton_model`. `config`: the text of config.pbtxt. `files`: further
    files by their path in the model's folder; one of them may replace `1/model.py`.
    """
    model = directory / MODEL_NAME
    version = model / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_MODEL.format(package=package))
    (model / "config.pbtxt").write_text(config)
    for name, content in (files or {}).items():
        path = model / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return version


def write_backend(directory: Path, installation: TritonInstallation) -> None:
    """Create the backend directory `directory` with the Python backend and its stub."""
    python = directory / "python"
    python.mkdir(parents=True)
    for path in installation.backend_files():
        (python / path.name).symlink_to(path)


def config_pbtxt(
    inputs: Iterable[Input], outputs: Iterable[Output], parameters: Mapping[str, object], warmup: str = ""
) -> str:
    """Return a model's config.pbtxt. Clients derive capabilities and limits from its `parameters`.

    `warmup`: further text, of `model_warmup`.
    """
    lines = [
        f'name: "{MODEL_NAME}"',
        'backend: "python"',
        "max_batch_size: 1",
        "model_transaction_policy { decoupled: true }",
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
    ]
    for one in inputs:
        optional = " optional: true" if one.is_optional else ""
        lines.append(
            f'input {{ name: "{one.name}" data_type: {one.data_type} dims: {list(one.dims)}{optional} }}'
        )
    lines += [
        f'output {{ name: "{one.name}" data_type: {one.data_type} dims: {list(one.dims)} }}'
        for one in outputs
    ]
    for key, value in parameters.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: {_quoted(str(value))} }} }}')
    if warmup:
        lines.append(warmup)
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = "".join(
        f"\\{byte:03o}" if byte in b'"\\' or not 32 <= byte < 127 else chr(byte) for byte in text.encode()
    )
    return f'"{escaped}"'
