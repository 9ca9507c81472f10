"""`kvmesh replay TRACE`: reads the command line, runs the replay and prints the results.

Exit status: 0 done, 2 an option or the trace cannot be used, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvmesh.bad_option import BadOption
from kvmesh.config import ConfigError
from simulator import plot, tables
from simulator.command_options import (
    COST_OF,
    DEFAULT_SIZES,
    ClusterOptions,
    CostOptions,
    OutputOptions,
    RunOptions,
    TraceOptions,
)
from simulator.cost import Cost
from simulator.measured import MeasuredCost, measured
from simulator.measures import mean
from simulator.option_groups import grouped
from simulator.options import listed, load, policies
from simulator.plan import Compared, Plan
from simulator.processes import Runner
from simulator.trace import TraceError

PIPE_COLUMNS: Final = 110

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="kvmesh replay")
    except (BadOption, ConfigError, TraceError) as mistake:
        sys.stderr.write(f"{mistake}\n")
        sys.exit(2)


@app.command()
@grouped
def replay(
    traced: TraceOptions, cluster: ClusterOptions, costs: CostOptions, runs: RunOptions, output: OutputOptions
) -> None:
    """Replay a trace against simulated prefill replicas: capacity planning and comparison of placement policies."""
    cost = costs.given()
    for options in (cluster, runs, traced):
        options.check()
    is_sized = runs.is_sized(has_replicas=cluster.replicas is not None)
    output.check()
    trace = traced.read()
    known = _measured(costs, cost)
    plan = Plan(
        trace=trace,
        cost=cost if known is None else known.cost,
        measured=known,
        row=cluster.row(traced.copies, runs.speed),
        replicas=cluster.replica_counts(),
        loads=listed("--load", runs.load, load),
        caches=cluster.caches(),
        policies=policies(runs.policies),
        seeds=runs.seeds,
        sizes=cluster.caches(DEFAULT_SIZES) if is_sized else (),
        goodput=runs.goodput,
    )
    for one in plan.caches:
        one.blocks(plan.cost, traced.block_tokens)  # refuses a cache without a single block before any run
    try:
        raise typer.Exit(_run(plan, runs.jobs or os.cpu_count() or 1, output))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _measured(costs: CostOptions, cost: Cost) -> MeasuredCost | None:
    if costs.cost_of is None:
        return None
    from simulator.status_client import status_of  # gRPC, which the processes of a plain replay do not need

    return measured(
        COST_OF, costs.cost_of, asyncio.run(status_of(COST_OF, costs.cost_of, costs.config)), cost
    )


def _run(plan: Plan, jobs: int, output: OutputOptions) -> int:
    console = Console()
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with closing(Runner({plan.trace.name: plan.trace}, jobs)) as runner, bar:
        sizing = bar.add_task("sizing", total=None, visible=bool(plan.sizes))
        sized = plan.size(runner, lambda: bar.advance(sizing))
        bar.update(sizing, visible=False)
        comparing = bar.add_task("comparing", total=plan.run_count)
        compared = plan.compare(runner, lambda: bar.advance(comparing))
    warnings = plan.warnings(compared)
    if output.as_json:
        found = {
            **plan.described(),
            "warnings": warnings,
            **tables.as_json(compared, sized, plan.goodput, plan.policies[0]),
        }
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        for line in (*plan.headlines(), *warnings):
            console.print(line, highlight=False)
        if sized:
            console.print(tables.sizing(sized, plan))
        for one in compared:
            console.print(tables.comparison(one, plan.cost, plan.trace.block_tokens))
    # Last, so that the results are printed even if the file cannot be written.
    if output.plot_file is not None:
        output.write_plot(plot.svg(plan.trace.name, _panels(plan, compared)))
    return 0


def _panels(plan: Plan, compared: Sequence[Compared]) -> list[plot.Panel]:
    panels = []
    for replicas in plan.replicas:
        for cache in plan.caches:
            here = [one for one in compared if one.row.replicas == replicas and one.cache == cache]
            here.sort(key=lambda one: one.row.load or 0.0)
            lines = [
                plot.Series(policy, [(one.row.load or 0.0, mean(one.policies[policy])) for one in here])
                for policy in plan.policies
            ]
            panels.append(plot.Panel(f"{replicas} replicas, cache {cache}", lines))
    return panels
