"""The command: `python -m tests.mixed [--answers 10000] [--cancels 20] [--seed 1] [--json] [--write PAGE]`."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import grpc
import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import machine, pages
from bench.processes import Fleet
from bench.results import BenchError
from kvmesh.inference.v1 import inference_pb2_grpc
from tests.chaos.truth import Truth
from tests.mixed import mesh as mixed
from tests.mixed import page
from tests.mixed.conversations import TURNS, conversations
from tests.mixed.freeing import freed_after_s
from tests.mixed.mesh import MixedMesh
from tests.mixed.page import Outcome
from tests.mixed.play import play

app = typer.Typer(add_completion=False)


@app.command()
def run(
    answers: Annotated[int, typer.Option(help="Answers in all pools together.", min=18)] = 10_000,
    cancels: Annotated[int, typer.Option(help="Cancels whose KV is watched, in each pool.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the conversations.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    write: Annotated[Path | None, typer.Option(help="Page to write.")] = None,
) -> None:
    """Play conversations in pools with and without KV events. Exit status 1: a promise was broken."""
    described, started_s = machine.describe(), time.monotonic()
    with Fleet() as fleet:
        running = mixed.start(fleet)
        outcome = asyncio.run(_measured(running, answers, cancels, seed))
    command = shlex.join(["python", "-m", "tests.mixed", *sys.argv[1:]])
    lines = page.lines(outcome, command, time.monotonic() - started_s, described)
    if as_json:
        sys.stdout.write(msgspec.json.encode(asdict(outcome)).decode() + "\n")
    else:
        sys.stdout.write("\n".join(lines) + "\n")
    if write is not None:
        old = write.read_text(encoding="utf-8") if write.exists() else ""
        write.write_text(pages.with_notes(lines, old), encoding="utf-8")
    raise typer.Exit(bool(outcome.failures()))


async def _measured(running: MixedMesh, answers: int, cancels: int, seed: int) -> Outcome:
    names = [pool.name for pool in mixed.POOLS]
    truth = Truth(
        mixed.SALT,
        mixed.MAX_SEQUENCE_TOKENS,
        vocab_size=mixed.VOCAB_SIZE,
        end_token=mixed.END_TOKEN,
        end_probability=mixed.END_PROBABILITY,
    )
    planned = list(conversations(answers, len(names), seed, truth, mixed.VOCAB_SIZE))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        async with grpc.aio.insecure_channel(running.frontend) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            bar = progress.add_task("answers", total=len(planned) * TURNS * len(names))
            pools = await play(stub, planned, names, lambda: progress.advance(bar))
            wrong_hits = {name: _wrong_hits(running, name) for name in names}
            bar, freed_s = progress.add_task("cancels", total=cancels * len(names)), {}
            for name in names:
                engines = {
                    replica: (engine.address, running.metrics[replica])
                    for replica, engine in running.engines.items()
                    if replica.startswith(f"{name}-")
                }
                freed_s[name] = await freed_after_s(stub, name, engines, cancels, seed)
                progress.advance(bar, cancels)
    return Outcome(pools, freed_s, wrong_hits)


def _wrong_hits(running: MixedMesh, pool: str) -> float:
    """Return the prompt tokens that the pool's router expected in a cache in vain."""
    replicas = [name for name in running.engines if name.startswith(f"{pool}-")]
    found = 0.0
    for name in replicas:
        with contextlib.suppress(BenchError):  # a replica without a placement has no counter
            found += running.routers[pool].metric(f'kvmesh_router_wrong_hit_tokens_total{{replica="{name}"}}')
    return found


def main() -> None:
    """Run the command line and exit."""
    app()
