"""The commands: `python -m bench.gpu measure FILE`, `python -m bench.gpu fit [RECORDING] [--json] [--write PAGE]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, help="Compare the router's estimate of prefill cost with a GPU.")


@app.command()
def measure(file: Annotated[Path, typer.Argument(help="Recording to write, JSON.")]) -> None:
    """Time prefills and decode steps of an 8B model with random weights: minutes, PyTorch and a GPU of 60 GiB."""
    from bench.gpu.measure import NoDeviceError, on_gpu

    try:
        recording = on_gpu()
    except NoDeviceError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    file.write_text(recording.to_json() + "\n", encoding="utf-8")


@app.command()
def fit(
    recording: Annotated[
        Path | None, typer.Argument(help="File that `measure` wrote; without it, published timings.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout instead of the page.")] = False,
    write: Annotated[Path | None, typer.Option(help="Page to write, and its .json beside it.")] = None,
) -> None:
    """Fit the router's form to timings, and let its cost model learn from them."""
    from bench import machine, pages
    from bench.gpu import findings, published
    from bench.gpu.page import page
    from bench.gpu.recording import RecordingError, read

    try:
        recordings = published.operators() if recording is None else [read(recording)]
    except RecordingError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    made = machine.describe()
    named = "" if recording is None else f" {recording.name}"
    run = {
        "command": f"python -m bench.gpu fit{named} --write docs/measurements/gpu.md",
        "date": made["date"],
        "commit": made["commit"],
        "is_published": recording is None,
        "recordings": [findings.of_recording(one) for one in recordings],
    }
    if recording is None:
        whole = published.whole_prefills()
        run["whole_prefills"] = [{"uncached": one.uncached, "seconds": one.seconds} for one in whole]
        run["whole_fits"] = findings.fits(whole)
        run["prefix_attention"] = findings.attention(published.prefix_attention())
    text = page(run, pages.old(write))
    sys.stdout.write(json.dumps(run) + "\n" if as_json else text)
    if write is not None:
        pages.write(write, text, json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    app()
