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
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvmesh.config import ConfigError, MeshConfig
from simulator import options, plot, tables
from simulator.catalogue import POLICIES
from simulator.measured import measured
from simulator.measures import mean
from simulator.options import BadOption
from simulator.plan import Compared, Plan
from simulator.processes import Runner
from simulator.runs import BOUND, Row
from simulator.servers import ServiceOrder
from simulator.trace import BLOCK_TOKENS, Trace, TraceError, read

DEFAULT_POLICIES: Final = f"kvmesh,llm-d,preble,dynamo,sglang,least-outstanding,round-robin,{BOUND}"
DEFAULT_REPLICAS: Final = "8"
DEFAULT_COST: Final = "8b"
DEFAULT_SHARE: Final = ".3"
DEFAULT_SIZES: Final = "16GiB,64GiB,256GiB"
DEFAULTS: Final = MeshConfig()
DEFAULT_ORDER: Final = ServiceOrder(DEFAULTS.prefill.queue_order)
COST_OF: Final = "--cost-of"
SVG: Final = ".svg"
PIPE_COLUMNS: Final = 110
JOBS_MAX: Final = 256
SEEDS_MAX: Final = 100
ROUTERS_MAX: Final = 64
COPIES_MAX: Final = 64
SPEED: Final = 1.0
STALENESS_MAX_MS: Final = 60_000

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="kvmesh replay")
    except (BadOption, ConfigError, TraceError) as mistake:
        sys.stderr.write(f"{mistake}\n")
        sys.exit(2)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="Requests in the Mooncake format: JSON lines, perhaps .gz.")],
    replicas: Annotated[
        str | None,
        typer.Option(help="Numbers of prefill replicas to compare at.", show_default=DEFAULT_REPLICAS),
    ] = None,
    load: Annotated[
        str,
        typer.Option(help="Loads to compare at: work of one pooled cache over the capacity of the replicas."),
    ] = ".5,.7,.85",
    cache: Annotated[
        str | None,
        typer.Option(
            help="Cache: a share of the trace's unique blocks in all replicas together, or GiB per replica (80GiB).",
            show_default=f"{DEFAULT_SHARE}; sizing: {DEFAULT_SIZES}",
        ),
    ] = None,
    policies: Annotated[
        str,
        typer.Option(
            help=f"Policies to compare, or all: {', '.join(POLICIES)}; and {BOUND}. The last is a bound and no "
            "policy: one queue and one pooled cache, first come, first served."
        ),
    ] = DEFAULT_POLICIES,
    order: Annotated[
        ServiceOrder, typer.Option(help="Order in which a replica serves waiting prompts.")
    ] = DEFAULT_ORDER,
    cost: Annotated[
        str | None,
        typer.Option(
            help="Prefill seconds: 8b, 70b, or c0,a,b of c0 + u (a + b (T - u/2)).", show_default=DEFAULT_COST
        ),
    ] = None,
    cost_of: Annotated[
        str | None,
        typer.Option(COST_OF, help="Prefill seconds as measured by the running router at HOST:PORT."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help=f"The mesh's kvmesh.toml, for {COST_OF} with TLS; default ./kvmesh.toml."),
    ] = None,
    kv_bytes: Annotated[
        int | None,
        typer.Option(help="Bytes of KV cache per token.", show_default="131072; 70b: 327680"),
    ] = None,
    slo_s: Annotated[
        float | None,
        typer.Option(
            help="A first token within this, or twice its prompt's cold prefill, is in time.",
            show_default=".5; 70b: 1",
        ),
    ] = None,
    routers: Annotated[int, typer.Option(help="Routers that share the requests.")] = 1,
    staleness_ms: Annotated[
        float, typer.Option(help="Delay until a router hears of events other than its own dispatches.")
    ] = 0.0,
    loss: Annotated[float, typer.Option(help="Share of the cache events that a router never hears.")] = 0.0,
    dispatch_ahead_s: Annotated[
        str,
        typer.Option(
            help="Seconds of unstarted work that kvmesh sends to a replica before it holds requests back; or off."
        ),
    ] = str(DEFAULTS.router.dispatch_ahead_s),
    size: Annotated[
        bool | None,
        typer.Option(
            "--size/--no-size",
            help="Find how many replicas are needed at the trace's own rate.",
            show_default="on unless --replicas is given",
        ),
    ] = None,
    goodput: Annotated[float, typer.Option(help="Required share of first tokens in time.")] = 0.9,
    speed: Annotated[float, typer.Option(help="Factor on the rate of the trace when sizing.")] = SPEED,
    requests: Annotated[int, typer.Option(help="Number of requests to take from the beginning; 0: all.")] = 0,
    copies: Annotated[int, typer.Option(help="Number of overlaid copies of the trace.")] = 1,
    block_tokens: Annotated[int, typer.Option(help="Tokens per id of hash_ids.")] = BLOCK_TOKENS,
    seeds: Annotated[
        int, typer.Option(help="Runs with different noise; ± is half the distance of the extremes.")
    ] = 1,
    jobs: Annotated[int, typer.Option(help="Processes.", show_default="one per core")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Write TTFT and goodput over load to this SVG file.")
    ] = None,
) -> None:
    """Replay a trace against simulated prefill replicas: capacity planning and comparison of placement policies."""
    if cost is not None and cost_of is not None:
        raise BadOption(
            f"--cost and {COST_OF} exclude each other: the prefill cost is either given or measured."
        )
    if slo_s is not None:
        options.number("--slo-s", str(slo_s), 0.001, 1000, " s")
    if kv_bytes is not None:
        options.number("--kv-bytes", str(kv_bytes), 1, options.KV_BYTES_MAX, " bytes")
    model = options.cost(DEFAULT_COST if cost is None else cost, slo_s, kv_bytes)
    for option, value, low, high in (
        ("--routers", routers, 1, ROUTERS_MAX),
        ("--staleness-ms", staleness_ms, 0, STALENESS_MAX_MS),
        ("--loss", loss, 0, 1),
        ("--goodput", goodput, 0.01, 1),
        ("--speed", speed, 0.001, 10_000),
        ("--requests", requests, 0, 1e9),
        ("--copies", copies, 1, COPIES_MAX),
        ("--block-tokens", block_tokens, 1, 1 << 20),
        ("--seeds", seeds, 1, SEEDS_MAX),
        ("--jobs", jobs, 0, JOBS_MAX),
    ):
        options.number(option, str(value), low, high)
    ahead_s = options.ahead_s("--dispatch-ahead-s", dispatch_ahead_s)
    is_sized = size if size is not None else replicas is None
    if speed != SPEED and not is_sized:
        raise BadOption(f"--speed = {speed:g} applies to sizing only: add --size.")
    if plot_file is not None:
        _writable(plot_file)
    found = _trace(trace, block_tokens, requests)
    known = None
    if cost_of is not None:
        from simulator.status_client import (
            status_of,
        )  # gRPC, which the processes of a plain replay do not need

        known = measured(COST_OF, cost_of, asyncio.run(status_of(COST_OF, cost_of, config)), model)
        model = known.cost
    plan = Plan(
        trace=found,
        cost=model,
        measured=known,
        row=Row(
            order=order,
            routers=routers,
            delay_s=staleness_ms / 1e3,
            loss=loss,
            dispatch_ahead_s=ahead_s,
            copies=copies,
            speed=speed,
        ),
        replicas=options.listed(
            "--replicas", DEFAULT_REPLICAS if replicas is None else replicas, options.replicas
        ),
        loads=options.listed("--load", load, options.load),
        caches=options.listed("--cache", DEFAULT_SHARE if cache is None else cache, options.cache),
        policies=options.policies(policies),
        seeds=seeds,
        sizes=options.listed("--cache", DEFAULT_SIZES if cache is None else cache, options.cache)
        if is_sized
        else (),
        goodput=goodput,
    )
    for one in plan.caches:
        one.blocks(model, block_tokens)  # refuses a cache without a single block before any run
    try:
        raise typer.Exit(_run(plan, jobs or os.cpu_count() or 1, as_json=as_json, plot_file=plot_file))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _writable(file: Path) -> None:
    if not file.parent.is_dir():
        raise BadOption(f'--plot = "{file}": the folder does not exist.')
    if file.is_dir():
        raise BadOption(f'--plot = "{file}" is a folder: the name of a file is needed.')
    if file.suffix.lower() != SVG:
        raise BadOption(f'--plot = "{file}" does not end in {SVG}: only SVG can be written.')


def _trace(path: Path, block_tokens: int, requests: int) -> Trace:
    try:
        trace = read(path, block_tokens)
    except RecursionError:
        raise TraceError(
            f"{path.name}: a line is JSON nested too deeply; objects of plain fields are needed"
        ) from None
    if requests:
        trace = trace.head(requests)
    if not trace.span_s:
        raise TraceError(
            f"{path.name}: all timestamps are {trace.records[0].timestamp_ms:g}; two different ones are needed"
        )
    return trace


def _run(plan: Plan, jobs: int, *, as_json: bool, plot_file: Path | None) -> int:
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
    if as_json:
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
    if plot_file is not None:  # last, so that the results are printed even if the file cannot be written
        try:
            plot_file.write_text(plot.svg(plan.trace.name, _panels(plan, compared)), encoding="utf-8")
        except OSError as error:
            raise BadOption(f'--plot = "{plot_file}" cannot be written: {error.strerror}.') from None
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
