"""The launcher of tritonserver: writes its files into a private directory, then replaces this process by it (exec).

The process id stays the same. The directory stays until the next start with the same --work-dir.
"""

import argparse
import ctypes
import importlib.util
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from engines.contract import model_repository
from engines.contract.model_repository import TritonInstallation
from engines.contract.tensors import MODEL_NAME

_PROJECT_ROOT = Path(__file__).resolve().parents[2]
_SHARED_MEMORY = Path("/dev/shm")
_CONTAINER = Path("/opt/tritonserver")  # in NVIDIA's containers
_PR_SET_PDEATHSIG = 1  # prctl(2)
_EXIT_TIMEOUT_S = 5
_PING_EVERY_MS = 2_000
_PING_ANSWER_MS = 3_000


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of a tritonserver. See `add_options`."""

    host: str
    grpc_port: int
    http_port: int
    metrics_port: int
    shm_prefix: str = ""
    work_dir: str | None = None
    die_with_parent: bool = False

    @property
    def http_address(self) -> str:
        """The "host:port" of the server's HTTP service."""
        return f"{self.host}:{self.http_port}"

    @property
    def pid(self) -> int:
        """The process id of tritonserver, which replaces this process."""
        return os.getpid()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ServerOptions, which each launcher of an engine has."""
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address on which all ports listen")
    for port in ("grpc", "http", "metrics"):
        add(f"--{port}-port", type=int, required=True)
    add("--shm-prefix", help="prefix of this server's files in /dev/shm; default kvmesh_<grpc port>_")
    add("--work-dir", help="directory of the model repository; default a new directory in /tmp")
    add(
        "--die-with-parent",
        action="store_true",
        help="be killed when the thread that started this process ends (Linux)",
    )


def options_of(parsed: argparse.Namespace) -> ServerOptions:
    """Return the server's options among the parsed ones."""
    return ServerOptions(
        host=parsed.host,
        grpc_port=parsed.grpc_port,
        http_port=parsed.http_port,
        metrics_port=parsed.metrics_port,
        shm_prefix=parsed.shm_prefix or f"kvmesh_{parsed.grpc_port}_",
        work_dir=parsed.work_dir,
        die_with_parent=parsed.die_with_parent,
    )


def become(
    options: ServerOptions, package: str, config: str, *more: str, files: Mapping[str, bytes] | None = None
) -> NoReturn:
    """Write the files of the model of `package`, with config.pbtxt `config`, and exec tritonserver.

    `more`: further options of tritonserver. `files`: see model_repository.write_model. Exits with a message if the
    nvidia-pytriton wheel is not installed.
    """
    if options.die_with_parent:
        _die_with_parent()
    installation = find_installation()
    work_dir = _fresh_directory(options.work_dir, options.grpc_port)
    _remove_stale_shared_memory(options.shm_prefix)
    model_repository.write_model(work_dir / "repository", package, config, files)
    model_repository.write_backend(work_dir / "backends", installation)
    command = [str(installation.server), *_arguments(options, work_dir), *more]
    os.execve(command[0], command, _environment())


def _arguments(options: ServerOptions, work_dir: Path) -> Iterator[str]:
    yield f"--model-repository={work_dir / 'repository'}"
    yield f"--backend-directory={work_dir / 'backends'}"
    for port in ("http", "grpc", "metrics"):
        yield f"--{port}-address={options.host}"
        yield f"--{port}-port={getattr(options, f'{port}_port')}"
    yield "--allow-gpu-metrics=false"
    # The configuration is complete. Without this Triton starts a process of the model to ask for the rest, and ends it,
    # before the process that serves.
    yield "--disable-auto-complete-config"
    yield "--model-control-mode=explicit"
    yield f"--load-model={MODEL_NAME}"
    yield f"--exit-timeout-secs={_EXIT_TIMEOUT_S}"
    # Keepalive: without it tritonserver detects an unreachable client after two hours; its requests run on until then.
    yield f"--grpc-keepalive-time={_PING_EVERY_MS}"
    yield f"--grpc-keepalive-timeout={_PING_ANSWER_MS}"
    yield "--grpc-http2-max-pings-without-data=0"
    yield f"--backend-config=python,shm-region-prefix-name={options.shm_prefix}"


def find_installation(container: Path = _CONTAINER) -> TritonInstallation:
    """Return the tritonserver of NVIDIA's container, else that of the nvidia-pytriton wheel; exit if there is neither."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if (container / "bin" / "tritonserver").is_file():
        return TritonInstallation(container, version)
    found = importlib.util.find_spec("pytriton")
    if found is None or not found.submodule_search_locations:
        sys.exit(
            "cannot start tritonserver: the package nvidia-pytriton is not installed; "
            "install the extra (pip install 'kvmesh[local]')"
        )
    return TritonInstallation(Path(found.submodule_search_locations[0]) / "tritonserver", version)


def _environment() -> dict[str, str]:
    """Return this process's environment with the paths that Triton's Python stub needs.

    They are libpython, `python3` on PATH (for its packages), and this project. OpenBLAS gets one thread.
    """
    environment = dict(os.environ)
    before = {
        "LD_LIBRARY_PATH": sysconfig.get_config_var("LIBDIR") or "",
        "PATH": str(Path(sys.executable).parent),
        "PYTHONPATH": str(_PROJECT_ROOT),
    }
    for name, first in before.items():
        environment[name] = os.pathsep.join(part for part in (first, environment.get(name, "")) if part)
    environment["OPENBLAS_NUM_THREADS"] = "1"
    return environment


def _fresh_directory(work_dir: str | None, grpc_port: int) -> Path:
    if work_dir is None:
        return Path(tempfile.mkdtemp(prefix=f"kvmesh-engine-{grpc_port}-"))
    directory = Path(work_dir).resolve()
    for name in ("repository", "backends"):
        shutil.rmtree(directory / name, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _remove_stale_shared_memory(prefix: str) -> None:
    """Remove the shared-memory files of a killed server with the same prefix."""
    for path in _SHARED_MEMORY.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends. The setting survives the exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
