"""The command `kvmesh conformance`: its options on the command line."""

from __future__ import annotations

import secrets
from typing import Annotated, Final

import typer

from kvmesh.advertise import peer
from kvmesh.bad_option import BadOption
from kvmesh.cli.options import refuse_outside

UINT63_MAX: Final = (1 << 63) - 1
CANCELS_MAX: Final = 100_000
CONCURRENCY_MAX: Final = 64
INT32_MAX: Final = (1 << 31) - 1


def conformance(
    triton: Annotated[str, typer.Option(help="gRPC address of the Triton server, host:port.")],
    pair: Annotated[
        str, typer.Option(help="gRPC address of the server that decodes what --triton has prefilled.")
    ] = "",
    model: Annotated[str, typer.Option(help="Name of the model.")] = "tensorrt_llm",
    metrics: Annotated[
        str,
        typer.Option(
            help="Address of the metrics of --triton, host:port, for an engine without load report."
        ),
    ] = "",
    vocab_size: Annotated[
        int | None, typer.Option(help="Size of the vocabulary, if the model lacks it.")
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a KV block, if the model lacks it.")
    ] = None,
    max_sequence_tokens: Annotated[
        int | None, typer.Option(help="Longest sequence, if the model lacks it.")
    ] = None,
    end_id: Annotated[
        list[int] | None, typer.Option(help="End token of the model, which prompts avoid; may be repeated.")
    ] = None,
    cancels: Annotated[int, typer.Option(help="Calls to cancel at random moments; 0: none.")] = 1000,
    concurrency: Annotated[
        int | None,
        typer.Option(
            help="Most calls at once.", show_default="4, but at most a quarter of what the engine runs"
        ),
    ] = None,
    only: Annotated[str, typer.Option(help="Capabilities to check, with commas, as in the table.")] = "",
    hostile: Annotated[
        bool,
        typer.Option(
            "--hostile", help="Also send input that may end an engine without checks: not to one that serves."
        ),
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of prompts and moments; --json tells it.", show_default="a random one"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check what kvmesh can use of a Triton model. Exit status 1: a check failed, 2: the model was not reached.

    Safe on a serving engine without --hostile: few calls at once, short outputs, a small share of its KV blocks.
    """
    from kvmesh.cli import conformance as command
    from kvmesh.cli.generate import run_interruptible
    from kvmesh.conformance.trial import Settings

    for option, address in (("--triton", triton), ("--pair", pair), ("--metrics", metrics)):
        if address or option == "--triton":
            peer(address, option)
    if pair == triton:
        raise BadOption(f'--pair = "{pair}" is the address of --triton: allowed is another engine.')
    refuse_outside("--vocab-size", vocab_size, 64, INT32_MAX, " tokens")
    refuse_outside("--block-tokens", block_tokens, 1, 1024, " tokens")
    refuse_outside("--max-sequence-tokens", max_sequence_tokens, 1, INT32_MAX, " tokens")
    refuse_outside("--cancels", cancels, 0, CANCELS_MAX)
    refuse_outside("--concurrency", concurrency, 1, CONCURRENCY_MAX, " calls")
    refuse_outside("--seed", seed, 0, UINT63_MAX)
    for each in end_id or ():
        refuse_outside("--end-id", each, 0, INT32_MAX)
    sizes = {
        "vocab_size": vocab_size or 0,
        "tokens_per_block": block_tokens or 0,
        "max_sequence_tokens": max_sequence_tokens or 0,
    }
    settings = Settings(
        cancels=cancels,
        seed=secrets.randbits(32) if seed is None else seed,
        concurrency=concurrency or 0,
        end_ids=tuple(end_id or ()),
        is_hostile=hostile,
    )
    run = command.Run(
        triton=triton,
        pair=pair,
        model=model,
        metrics=metrics,
        sizes=sizes,
        settings=settings,
        only=[name.strip() for name in only.split(",") if name.strip()],
    )
    raise typer.Exit(run_interruptible(command.conformance(run, as_json=as_json)))
