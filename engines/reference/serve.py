"""Start the reference engine in a real tritonserver: `python -m engines.reference.serve --help`.

Writes a model repository into a private directory, then replaces itself by tritonserver (exec, same process id). The
directory stays until the next start with the same --work-dir.
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
from pathlib import Path

from engines.reference import advertise, fault_injector, model_repository
from engines.reference.config import EngineConfig
from engines.reference.cost_model import CostModel
from engines.reference.loading import load_arithmetic
from engines.reference.model_repository import ModelFacts, TritonInstallation
from engines.reference.tensors import MODEL_NAME

_PROJECT_ROOT = Path(__file__).resolve().parents[2]
_SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1  # prctl(2)
_EXIT_TIMEOUT_S = 5
_PING_EVERY_MS = 2_000
_PING_ANSWER_MS = 3_000


def main() -> None:
    """Parse the options, write the model repository, exec tritonserver."""
    options = _parser().parse_args()
    try:
        config = _config(options)
        arithmetic, digest = load_arithmetic(config)
    except (OSError, ValueError) as error:
        sys.exit(f"cannot start the reference engine: {error}")
    if options.die_with_parent:
        _die_with_parent()
    work_dir = _fresh_directory(options.work_dir, options.grpc_port)
    prefix = options.shm_prefix or f"kvmesh_{options.grpc_port}_"
    _remove_stale_shared_memory(prefix)
    installation = find_installation()
    http_address = f"{options.host}:{options.http_port}"
    pid = os.getpid()  # tritonserver's, too: it replaces this process
    facts = ModelFacts(arithmetic.vocab_size, arithmetic.max_sequence_tokens, http_address, pid, digest)
    models, backends = model_repository.write(work_dir, installation, config, facts)
    command = [
        str(installation.server),
        f"--model-repository={models}",
        f"--backend-directory={backends}",
        f"--http-address={options.host}",
        f"--grpc-address={options.host}",
        f"--metrics-address={options.host}",
        f"--http-port={options.http_port}",
        f"--grpc-port={options.grpc_port}",
        f"--metrics-port={options.metrics_port}",
        "--allow-gpu-metrics=false",
        # The configuration is complete. Without this Triton starts a process of the model to ask for the rest, and ends it,
        # before the process that serves.
        "--disable-auto-complete-config",
        "--model-control-mode=explicit",
        f"--load-model={MODEL_NAME}",
        f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
        # Keepalive: without it tritonserver detects an unreachable client after two hours; its requests run on until then.
        f"--grpc-keepalive-time={_PING_EVERY_MS}",
        f"--grpc-keepalive-timeout={_PING_ANSWER_MS}",
        "--grpc-http2-max-pings-without-data=0",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
    ]
    os.execve(command[0], command, _environment())


def find_installation() -> TritonInstallation:
    """Return the tritonserver of the installed nvidia-pytriton wheel; exit with a message if it is not installed."""
    found = importlib.util.find_spec("pytriton")
    if found is None or not found.submodule_search_locations:
        sys.exit(
            "cannot start the reference engine: the package nvidia-pytriton is not installed; "
            "install the extra (pip install 'kvmesh[local]')"
        )
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
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


def _config(options: argparse.Namespace) -> EngineConfig:
    costs = CostModel(
        step_s=options.step_s,
        prefill_s=options.prefill_s,
        prefill_token_s=options.prefill_token_s,
        prefill_token2_s=options.prefill_token2_s,
        block_transfer_s=options.block_transfer_s,
    )
    return EngineConfig(
        arithmetic=options.arithmetic,
        host=options.host,
        kv_port=options.kv_port,
        kv_advertise=advertise.kv_address(options.host, options.kv_port, options.advertise),
        kv_blocks=options.kv_blocks,
        block_tokens=options.block_tokens,
        step_tokens_max=options.max_step_tokens,
        running_max=options.max_running,
        queue_max=options.queue_max,
        prefix_reuse=not options.no_prefix_reuse,
        salt=options.salt,
        model_dir=options.model_dir,
        vocab_size=options.vocab_size,
        max_sequence_tokens=options.max_sequence_tokens,
        end_token=options.end_token,
        end_probability=options.end_probability,
        hide_end_token=options.hide_end_token,
        model_version=options.model_version,
        handoff_timeout_s=options.handoff_timeout_s,
        pull_timeout_s=options.pull_timeout_s,
        cancellation_check_s=options.cancellation_check_s,
        lie=options.lie,
        lie_after=options.lie_after,
        faults=fault_injector.absolute_option(options.faults),
        costs=costs,
        cold_s=options.cold_s,
        cold_runs=options.cold_runs,
    )


def _parser() -> argparse.ArgumentParser:
    default, costs = EngineConfig("hashed"), CostModel()
    parser = argparse.ArgumentParser(prog="python -m engines.reference.serve", description=__doc__)
    add = parser.add_argument
    add("--arithmetic", choices=("transformer", "hashed"), required=True)
    add("--host", default=default.host, help="address on which all ports listen")
    add("--advertise", default="", help=advertise.HELP)
    for port in ("grpc", "http", "metrics", "kv"):
        add(f"--{port}-port", type=int, required=True)
    add("--kv-blocks", type=int, default=default.kv_blocks, help="capacity of the KV cache in blocks")
    add("--block-tokens", type=int, default=default.block_tokens)
    add("--max-step-tokens", type=int, default=default.step_tokens_max, help="rows that one step computes")
    add("--max-running", type=int, default=default.running_max)
    add("--queue-max", type=int, default=default.queue_max)
    add("--no-prefix-reuse", action="store_true", help="disable the prefix cache and its KV events")
    add(
        "--salt",
        default=default.salt,
        help="salt of block hashes; with the hashed arithmetic also the model version",
    )
    add("--model-dir", default=str(Path(__file__).parent / "model"), help="weights of the transformer")
    add("--model-version", default=default.model_version)
    add("--vocab-size", type=int, default=default.vocab_size, help="hashed only")
    add("--max-sequence-tokens", type=int, default=default.max_sequence_tokens, help="hashed only")
    add("--end-token", type=int, default=default.end_token, help="hashed only")
    add("--end-probability", type=float, default=default.end_probability, help="hashed only, per position")
    add(
        "--hide-end-token",
        action="store_true",
        help="omit end_id from the output, as TensorRT-LLM's C++ backend does",
    )
    add("--handoff-timeout-s", type=float, default=default.handoff_timeout_s)
    add("--pull-timeout-s", type=float, default=default.pull_timeout_s)
    add(
        "--lie",
        choices=("tokens", "refuse"),
        default=default.lie,
        help="fault injection: token ids outside the vocabulary, or requests failed as invalid",
    )
    add(
        "--lie-after",
        type=int,
        default=default.lie_after,
        help="correct tokens of a request before the fault",
    )
    add(
        "--faults",
        default=default.faults,
        metavar="TEXT",
        help="hashed only: injected faults, as errors=0.05,slow=1.3; @PATH reads them from a file (README.md)",
    )
    add("--cancellation-check-s", type=float, default=default.cancellation_check_s)
    add("--step-s", type=float, default=costs.step_s, help="seconds per step")
    add("--prefill-s", type=float, default=costs.prefill_s, help="seconds per prefill, once")
    add("--prefill-token-s", type=float, default=costs.prefill_token_s, help="seconds per uncached token")
    add("--prefill-token2-s", type=float, default=costs.prefill_token2_s, help="seconds per squared position")
    add("--block-transfer-s", type=float, default=costs.block_transfer_s, help="seconds per pulled block")
    add("--cold-s", type=float, default=default.cold_s, help="hashed only: extra seconds of a cold step")
    add(
        "--cold-runs", type=int, default=default.cold_runs, help="runs of each shape after boot that are cold"
    )
    add("--shm-prefix", help="prefix of this server's files in /dev/shm; default kvmesh_<grpc port>_")
    add("--work-dir", help="directory of the model repository; default a new directory in /tmp")
    add(
        "--die-with-parent",
        action="store_true",
        help="be killed when the thread that started this process ends (Linux)",
    )
    return parser


if __name__ == "__main__":
    main()
