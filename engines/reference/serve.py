"""Start the reference engine in a real tritonserver: `python -m engines.reference.serve --help`.

Writes a model repository into a private directory, then replaces itself by tritonserver (exec, same process id). The
directory stays until the next start with the same --work-dir.
"""

import argparse
import sys
from pathlib import Path

from engines.contract import tritonserver
from engines.reference import advertise, fault_injector, model_repository
from engines.reference.config import ARITHMETICS, DEVICES, DTYPES, SHAPES, EngineConfig
from engines.reference.cost_model import CostModel
from engines.reference.loading import facts_of
from engines.reference.model_repository import ModelFacts

PACKAGE = "engines.reference"


def main() -> None:
    """Parse the options, write the model repository, exec tritonserver."""
    parsed = parser().parse_args()
    server = tritonserver.options_of(parsed)
    try:
        config = config_of(parsed)
        told = facts_of(config)
    except (OSError, ValueError) as error:
        sys.exit(f"cannot start the reference engine: {error}")
    facts = ModelFacts(
        told.vocab_size, told.max_sequence_tokens, server.http_address, server.pid, told.digest
    )
    tritonserver.become(server, PACKAGE, model_repository.config_pbtxt(config, facts))


def config_of(options: argparse.Namespace) -> EngineConfig:
    """Return the settings in the parsed options. Raises ValueError."""
    kv_host = options.kv_host or options.host
    costs = CostModel(
        step_s=options.step_s,
        prefill_s=options.prefill_s,
        prefill_token_s=options.prefill_token_s,
        prefill_token2_s=options.prefill_token2_s,
        block_transfer_s=options.block_transfer_s,
    )
    return EngineConfig(
        arithmetic=options.arithmetic,
        host=kv_host,
        kv_port=options.kv_port,
        kv_advertise=advertise.kv_address(kv_host, options.kv_port, options.advertise),
        kv_blocks=options.kv_blocks,
        block_tokens=options.block_tokens,
        step_tokens_max=options.max_step_tokens,
        running_max=options.max_running,
        queue_max=options.queue_max,
        prefix_reuse=not options.no_prefix_reuse,
        salt=options.salt,
        model_dir=options.model_dir,
        torch_shape=options.torch_shape,
        torch_seed=options.torch_seed,
        device=options.device,
        dtype=options.dtype,
        vocab_size=options.vocab_size,
        max_sequence_tokens=options.max_sequence_tokens,
        end_token=options.end_token,
        end_probability=options.end_probability,
        hide_end_token=options.hide_end_token,
        seeded_resume=not options.no_seeded_resume,
        step_frames=not options.no_step_frames,
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


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    default, costs = EngineConfig("hashed"), CostModel()
    made = argparse.ArgumentParser(prog="python -m engines.reference.serve", description=__doc__)
    add = made.add_argument
    add("--arithmetic", choices=ARITHMETICS, required=True)
    tritonserver.add_options(made)
    add("--advertise", default="", help=advertise.HELP)
    add("--kv-port", type=int, required=True)
    add("--kv-host", default="", help="address on which the KV port listens; default --host")
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
    add("--model-dir", default=str(Path(__file__).parent / "model"), help="weights of transformer and torch")
    add("--torch-shape", choices=SHAPES, default="", help="torch only: draw the weights of this shape")
    add("--torch-seed", type=int, default=default.torch_seed, help="torch only, of drawn weights")
    add("--device", choices=DEVICES, default=default.device, help="torch only")
    add("--dtype", choices=DTYPES, default=default.dtype, help="torch only, of weights and KV")
    add("--model-version", default=default.model_version)
    add("--vocab-size", type=int, default=default.vocab_size, help="hashed only")
    add("--max-sequence-tokens", type=int, default=default.max_sequence_tokens, help="hashed and torch")
    add("--end-token", type=int, default=default.end_token, help="hashed only")
    add("--end-probability", type=float, default=default.end_probability, help="hashed only, per position")
    add(
        "--hide-end-token",
        action="store_true",
        help="omit end_id from the output, as TensorRT-LLM's C++ backend does",
    )
    add(
        "--no-seeded-resume",
        action="store_true",
        help="do not tell the capability, as an engine whose tokens depend on the batch",
    )
    add(
        "--no-step-frames",
        action="store_true",
        help="do not offer step frames, as an engine of release 0.1.0",
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
    return made


if __name__ == "__main__":
    main()
