"""The command: `python -m tests.kubernetes`."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import signal
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.markdown import Markdown

from bench import options, pages
from bench.progress import Progress
from tests.chaos import machine
from tests.kubernetes import page
from tests.kubernetes.kubectl import Kubectl, KubectlError, in_context
from tests.kubernetes.overlay import IMAGES
from tests.kubernetes.record import Record, Trial
from tests.kubernetes.stage import Refused, cluster
from tests.kubernetes.trial import perform
from tools.manifests import kubectl as programs

T = TypeVar("T")

RUNS_MAX: Final = 20

app = typer.Typer(add_completion=False, help="Tries deploy/kubernetes on a cluster.")


@app.command()
def run(
    kubeconfig: Annotated[str, typer.Option(help="File of kubectl; empty: as kubectl finds it.")] = "",
    context: Annotated[
        str, typer.Option(help="Context of that file; empty: the one that is current at the start.")
    ] = "",
    namespace: Annotated[
        str, typer.Option(help="Namespace that is made and deleted; it must not exist yet.")
    ] = "kvmesh-trial",
    image_tag: Annotated[
        str, typer.Option(help="Tag of the images, as built by `make images`. The nodes must have them.")
    ] = "dev",
    registry: Annotated[
        str, typer.Option(help="Registry of the images, as registry.example/team; empty: none.")
    ] = "",
    runs: Annotated[int, typer.Option(help="Trials, one after the other.", min=1, max=RUNS_MAX)] = 1,
    as_json: options.Json = False,
    write: options.Write = None,
) -> None:
    """Try deploy/kubernetes on a cluster of yours, under streams whose tokens are compared with the expected ones.

    A temporary overlay of overlays/laptop with engines on the CPU serves in a namespace of its own (2 cores and 6 GiB are
    enough). Then every role is restarted, all roles are restarted at once, pods are evicted and lost, and the namespace is
    deleted. The pods' addresses must be reachable from here. A trial takes some 10 minutes.

    Status 1 if a stream was lost, no stream completed in a step, a container was killed or had another exit status than 0,
    a pod ended too late, or a disruption budget did not hold.
    Status 2 without kubectl, a cluster, its images, or a route to its pods. SIGINT and SIGTERM delete the namespace, too.
    """
    logging.basicConfig(level=logging.ERROR)
    began, began_s = dt.datetime.now(dt.UTC), time.monotonic()
    try:
        client = asyncio.run(in_context(programs.fetch(), kubeconfig, context, namespace))
        typer.echo(f"Context {client.context}, namespace {namespace}.", err=True)
        about = asyncio.run(cluster(client))
        trials = _trials(client, image_tag, registry, runs)
    except (programs.NoKubectl, Refused, KubectlError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    except asyncio.CancelledError as error:
        typer.echo("Ended by SIGTERM.", err=True)
        raise typer.Exit(128 + signal.SIGTERM) from error
    place = f"{registry.rstrip('/')}/" if registry else ""
    record = Record(
        command=options.command_line("tests.kubernetes"),
        began=began.isoformat(timespec="seconds"),
        commit=machine.commit(),
        machine=machine.about(),
        cluster=about,
        images=", ".join(f"{place}{name}:{image_tag}" for name in IMAGES),
        seconds=time.monotonic() - began_s,
        trials=trials,
    )
    text = msgspec.json.format(msgspec.json.encode(record), indent=1).decode() + "\n"
    if as_json:
        typer.echo(text, nl=False)
    else:
        Console().print(Markdown("\n".join(page.lines(record))))
    if write is not None:
        pages.write(write, pages.with_notes(page.page(record), pages.old(write)), text)
    raise typer.Exit(1 if record.violations else 0)


def _trials(client: Kubectl, tag: str, registry: str, runs: int) -> list[Trial]:
    """Make all trials. Raises Refused, KubectlError, or CancelledError after a SIGTERM."""
    console, made = Console(stderr=True), []
    for number in range(runs):
        with (
            Progress(console, f"trial {number + 1} of {runs}") as progress,
            tempfile.TemporaryDirectory() as folder,
        ):
            work = perform(client, Path(folder).resolve(), tag, registry, progress.say)
            trial = asyncio.run(cancelled_by_sigterm(work))
            for violation in trial.violations:
                progress.end(violation)
            made.append(trial)
    return made


async def cancelled_by_sigterm(work: Awaitable[T]) -> T:
    """Return the result of `work`; SIGTERM cancels it, as SIGINT does under asyncio.run."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await work
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def main() -> None:
    """Run the command."""
    app()
