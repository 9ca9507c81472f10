"""Start the impersonated stock backend in a real tritonserver: `python -m tests.fakes.stock_backend.serve --help`."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from engines.contract import tritonserver
from engines.reference.config import EngineConfig
from engines.reference.cost_model import CostModel
from tests.fakes.stock_backend import tensors
from tests.fakes.stock_backend.settings import Handoffs, Settings

PACKAGE = "tests.fakes.stock_backend"


def main() -> None:
    """Parse the options, write the settings and the model repository, exec tritonserver."""
    given = _parser().parse_args()
    server = tritonserver.options_of(given)
    work_dir = server.work_dir or tempfile.mkdtemp(prefix=f"kvmesh-stock-{server.grpc_port}-")
    server = replace(server, work_dir=work_dir)
    engine = EngineConfig(
        arithmetic="hashed",
        host=server.host,
        kv_port=given.kv_port,
        kv_advertise=f"{server.host}:{given.kv_port}",
        kv_blocks=given.kv_blocks,
        block_tokens=given.block_tokens,
        running_max=given.max_running,
        queue_max=given.queue_max,
        salt=given.salt,
        vocab_size=given.vocab_size,
        max_sequence_tokens=given.max_sequence_tokens,
        end_token=given.end_token,
        end_probability=given.end_probability,
        hide_end_token=True,
        faults=given.faults,
        costs=CostModel(step_s=given.step_s, prefill_token_s=given.prefill_token_s),
    )
    Path(work_dir).mkdir(parents=True, exist_ok=True)
    settings = Settings(engine.to_json(), Handoffs(given.handoffs), server.http_address, server.pid)
    settings.write(Path(work_dir))
    parameters = tensors.parameters(given.cancellation_check_ms)
    more = ("--allow-metrics=false",) if given.no_metrics else ()
    tritonserver.become(server, PACKAGE, tensors.config_pbtxt(parameters, given.queue_max), *more)


def _parser() -> argparse.ArgumentParser:
    default, costs = EngineConfig("hashed"), CostModel()
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.stock_backend.serve", description=__doc__)
    add = parser.add_argument
    tritonserver.add_options(parser)
    add("--kv-port", type=int, required=True, help="stands for the MPI world; see --handoffs")
    add(
        "--handoffs",
        choices=[one.value for one in Handoffs],
        default=Handoffs.FAIL.value,
        help="with a handoff of another server: pull it (one MPI world), fail, or hang",
    )
    add("--no-metrics", action="store_true", help="a Triton without /metrics")
    add("--cancellation-check-ms", type=int, default=100)
    add("--kv-blocks", type=int, default=default.kv_blocks)
    add("--block-tokens", type=int, default=default.block_tokens)
    add("--max-running", type=int, default=default.running_max)
    add("--queue-max", type=int, default=default.queue_max)
    add("--salt", default=default.salt)
    add("--vocab-size", type=int, default=default.vocab_size)
    add("--max-sequence-tokens", type=int, default=default.max_sequence_tokens)
    add("--end-token", type=int, default=default.end_token)
    add("--end-probability", type=float, default=default.end_probability)
    add("--faults", default=default.faults)
    add("--step-s", type=float, default=costs.step_s)
    add("--prefill-token-s", type=float, default=costs.prefill_token_s)
    return parser


if __name__ == "__main__":
    main()
