"""The commands of `python -m bench.rollouts`: power, run and redraw."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.markdown import Markdown

from bench import machine, options, pages
from bench.progress import Progress
from bench.results import BenchError
from bench.rollouts import load as loading
from bench.rollouts import page, running
from bench.rollouts import power as detection
from bench.rollouts import redraw as redrawing
from bench.rollouts.cases import BY_NAME, Case, planned
from bench.rollouts.parallel import JOBS_MAX
from bench.rollouts.recording import BLOCK_S, RecordingError, read_all
from bench.rollouts.records import Record, Records
from bench.run_records import RecordError
from controlplane.rollouts.judge.settings import JudgeSettings

app = typer.Typer(add_completion=False, help="Measure the judge of rollouts.")

Seed = Annotated[int, typer.Option(help="Seed of all runs.")]
Jobs = Annotated[int, typer.Option(help="Processes.", min=1, max=JOBS_MAX)]

_MARKS: Final = (
    (detection.BEGIN, detection.END),
    (page.BEGIN, page.END),
    (redrawing.BEGIN, redrawing.END),
    (loading.BEGIN, loading.END),
)
NEW_PAGE: Final = "# Rollouts\n" + "".join(f"\n{begin}\n{end}\n" for begin, end in _MARKS)
TRIES: Final = 2
RESULTS: Final = Path(".kvmesh/rollouts/runs.jsonl")
Rate = Annotated[float, typer.Option("--rate", help="Sessions per second.", min=0.1, max=100.0)]


@app.command()
def power(
    runs: Annotated[int, typer.Option(help="Simulated canaries per row.", min=10, max=100_000)] = 1_000,
    seed: Seed = 1,
    jobs: Jobs = 2,
    as_json: options.Json = False,
    write: options.Write = None,
) -> None:
    """Count how many canaries with a fault the judge finds, by canary sessions, beside the design's figures."""
    started_s = time.monotonic()
    rows = list(detection.measure(detection.CASES, runs, seed, jobs))
    made = machine.describe()
    command = f"python -m bench.rollouts power --runs {runs} --seed {seed}"
    record = json.dumps({"command": command, **_made(made), "rows": detection.as_json(rows)}, indent=1) + "\n"
    lines = _power_lines(rows, command, time.monotonic() - started_s, made["commit"])
    if as_json:
        sys.stdout.write(record)
    else:
        Console().print(Markdown("\n".join(lines)))
    if write is not None:
        text = pages.put(pages.old(write) or NEW_PAGE, lines, detection.BEGIN, detection.END)
        pages.write(write, text, record, tag="-power")


@app.command()
def load(
    rollouts: Annotated[int, typer.Option(help="Rollouts per row.", min=1, max=100_000)] = 200,
    seed: Seed = 1,
    jobs: Jobs = 2,
    as_json: options.Json = False,
    write: options.Write = None,
) -> None:
    """Count how many versions the judge takes back while sessions wait for each other, by the load of the pools."""
    started_s = time.monotonic()
    rows = list(loading.measure(loading.CASES, rollouts, seed, jobs))
    made = machine.describe()
    command = f"python -m bench.rollouts load --rollouts {rollouts} --seed {seed}"
    record = json.dumps({"command": command, **_made(made), "rows": loading.as_json(rows)}, indent=1) + "\n"
    lines = _load_lines(rows, command, time.monotonic() - started_s, made["commit"])
    if as_json:
        sys.stdout.write(record)
    else:
        Console().print(Markdown("\n".join(lines)))
    if write is not None:
        text = pages.put(pages.old(write) or NEW_PAGE, lines, loading.BEGIN, loading.END)
        pages.write(write, text, record, tag="-load")


@app.command()
def run(
    only: Annotated[str, typer.Option(help="Cases, by commas; empty: all.", metavar="NAMES")] = "",
    runs: Annotated[int, typer.Option(help="Runs of each case; 0: 5, and 10 of aa.", min=0, max=1_000)] = 0,
    rate: Rate = 8.0,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out runs that have a record.")] = False,
    results: Annotated[Path, typer.Option(help="File with a JSON line per run.")] = RESULTS,
    as_json: options.Json = False,
    write: options.Write = None,
) -> None:
    """Run rollouts of good and faulty versions on a mesh of this machine, five of each case, and ten of A/A."""
    names = options.selected(only, BY_NAME) if only else list(BY_NAME)
    records, console = Records(results), Console(stderr=True)
    if not resume:
        records.put_aside()
    try:
        todo = records.missing(planned(names, runs))
        failed = _run_all(todo, records, running.Load(rate), console)
        found = records.read()
    except RecordError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    if found:
        _show(found, as_json=as_json, write=write)
    raise typer.Exit(1 if failed or not all(each.is_as_wanted for each in found) else 0)


@app.command()
def redraw(
    files: Annotated[
        list[Path],
        typer.Argument(help="Recordings that `run --only aa` made: observations.jsonl.", exists=True),
    ],
    rollouts: Annotated[int, typer.Option(help="Rollouts to redraw.", min=1, max=1_000_000)] = 2_000,
    seed: Seed = 1,
    jobs: Jobs = 2,
    steps: Annotated[str, typer.Option(help="Weights in percent, by commas.")] = "10,25,50,100",
    step_blocks: Annotated[int, typer.Option(help="Blocks of 30 s in each step.", min=1, max=1_000)] = 10,
    alpha: Annotated[
        float, typer.Option(help="Error probability of a gate at a look.")
    ] = JudgeSettings().alpha,
    as_json: options.Json = False,
    write: options.Write = None,
) -> None:
    """Count false rollbacks in rollouts that are redrawn from a recording of one version."""
    started_s = time.monotonic()
    try:
        plan = redrawing.RedrawPlan(_weights(steps), step_blocks, settings=JudgeSettings(alpha=alpha))
        minutes = len(read_all(files)) * BLOCK_S / 60.0
        found = redrawing.figures(list(redrawing.redraw(files, plan, rollouts, seed, jobs)))
    except (RecordingError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from error
    told = {
        "seed": seed,
        "recorded_minutes": minutes,
        "seconds": time.monotonic() - started_s,
        **asdict(found),
    }
    record = json.dumps(told, indent=1) + "\n"
    sentences = _redraw_lines(found, seed, minutes)
    if as_json:
        sys.stdout.write(record)
    else:
        typer.echo(f"{sentences[0]} {time.monotonic() - started_s:.0f} s.")
        for line in sentences[1:]:
            typer.echo(line)
    if write is not None:
        about = f"Written by `{options.command_line('bench.rollouts')}`. {sentences[0]}"
        lines = ["", *pages.paragraph(about), "", *sentences[1:], *([""] if sentences[1:] else [])]
        text = pages.put(pages.old(write) or NEW_PAGE, lines, redrawing.BEGIN, redrawing.END)
        pages.write(write, text, record, tag="-redraw")


def _run_all(todo: list[tuple[Case, int]], records: Records, load: running.Load, console: Console) -> int:
    """Do all runs and append their records. Return the number of those that could not be made."""
    failed, folder = 0, records.path.parent
    for number, (case, at) in enumerate(todo, start=1):
        with Progress(console, f"[{number}/{len(todo)}] {case.name}, run {at}") as progress:
            made = _try(case, at, load, progress, folder / f"{case.name}-{at}")
            if made is None:
                failed += 1
                continue
            records.append(made)
            progress.end(page.summary(made))
    return failed


def _try(case: Case, at: int, load: running.Load, progress: Progress, evidence: Path) -> Record | None:
    """Return the record of a run; None if it could not be made TRIES times. An engine may fail at its start."""
    for _ in range(TRIES):
        try:
            return running.perform(case, at, load, progress.say, evidence)
        except BenchError as error:
            progress.end(f"not made: {error}")
    return None


def _show(found: list[Record], *, as_json: bool, write: Path | None) -> None:
    made, command = machine.describe(), options.command_line("bench.rollouts")
    rows = [msgspec.to_builtins(each) for each in found]
    text = json.dumps({"command": command, **_made(made), "runs": rows}, indent=1) + "\n"
    if as_json:
        sys.stdout.write(text)
    else:
        Console().print(Markdown("\n".join(page.lines(found, command, made))))
    if write is not None:
        put = pages.put(pages.old(write) or NEW_PAGE, page.lines(found, command, made), page.BEGIN, page.END)
        pages.write(write, put, text, tag="-runs")


def _redraw_lines(found: redrawing.RedrawFigures, seed: int, minutes: float) -> list[str]:
    """Return one sentence, and an item per gate that failed."""
    share = found.false_rollbacks / found.rollouts
    sentence = (
        f"{found.false_rollbacks} of {found.rollouts} rollouts rolled back ({share:.2%}), upper 95 % bound "
        f"{found.upper_bound:.2%} (aim: at most {redrawing.FALSE_MAX:.0%}). The seed is {seed}, and {minutes:.1f} minutes "
        f"are recorded. A rollout has {found.looks_mean:.1f} looks, and {found.inconclusive_share:.1%} of the steps are "
        "inconclusive."
    )
    return [sentence, *pages.items(f"{gate}: {number}" for gate, number in sorted(found.by_gate.items()))]


def _power_lines(rows: list[detection.PowerRow], command: str, seconds: float, commit: str) -> list[str]:
    about = (
        f"Written by `{command}` at commit {commit}, {seconds / 60:.1f} minutes. Canaries are simulated, with "
        f"{detection.STABLE_RATIO} stable sessions per session of the canary. All tracks have 0.1 % errors, and a "
        "log-normal TTFT with deviation 0.55. The columns count canary sessions since the fault began. "
        "The design's figures are in parentheses."
    )
    return ["", *pages.paragraph(about), "", *detection.table(rows), ""]


def _load_lines(rows: list[loading.LoadRow], command: str, seconds: float, commit: str) -> list[str]:
    about = (
        f"Written by `{command}` at commit {commit}, {seconds / 60:.1f} minutes. Each row has simulated rollouts "
        f"with steps of 10, 25, 50 and 100 %, {loading.STEP_S} s each. Stable, baseline and canary have a pool of "
        "the same size. The load is that of one pool with all sessions: a pool is full at 1.7. TTFT is a mean. A step "
        "has passed if no gate failed, and all that is needed was there at its end."
    )
    return ["", *pages.paragraph(about), "", *loading.table(rows), ""]


def _made(made: dict[str, str]) -> dict[str, str]:
    return {name: made[name] for name in ("date", "commit", "python")}


def _weights(steps: str) -> tuple[float, ...]:
    try:
        weights = tuple(float(step) for step in steps.split(","))
    except ValueError:
        raise ValueError(f"--steps is {steps!r}; numbers by commas are allowed") from None
    if any(not 0 < weight <= 100 for weight in weights) or sorted(set(weights)) != list(weights):
        raise ValueError(f"--steps is {steps!r}; rising weights above 0 and up to 100 are allowed")
    return weights


if __name__ == "__main__":
    app()
