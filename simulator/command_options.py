"""The options of `kvmesh replay` in groups: the trace, the simulated cluster, prefill costs, the runs, and the output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from kvmesh.bad_option import BadOption
from kvmesh.config import MeshConfig
from simulator import options
from simulator.catalogue import POLICIES
from simulator.cost import Cost
from simulator.options import Cache
from simulator.runs import BOUND, ReplayRow
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
JOBS_MAX: Final = 256
SEEDS_MAX: Final = 100
ROUTERS_MAX: Final = 64
COPIES_MAX: Final = 64
SPEED: Final = 1.0
STALENESS_MAX_MS: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """The trace, and the part of it that is replayed."""

    trace: Annotated[Path, typer.Argument(help="Requests in the Mooncake format: JSON lines, perhaps .gz.")]
    requests: Annotated[int, typer.Option(help="Number of requests to take from the beginning; 0: all.")] = 0
    copies: Annotated[int, typer.Option(help="Number of copies of the trace that run at once.")] = 1
    block_tokens: Annotated[int, typer.Option(help="Tokens per id of hash_ids.")] = BLOCK_TOKENS

    def check(self) -> None:
        """Raise BadOption for a value out of range."""
        options.number("--requests", str(self.requests), 0, 1e9)
        options.number("--copies", str(self.copies), 1, COPIES_MAX)
        options.number("--block-tokens", str(self.block_tokens), 1, 1 << 20)

    def read(self) -> Trace:
        """Return the trace. Raises TraceError."""
        name = self.trace.name
        try:
            trace = read(self.trace, self.block_tokens)
        except RecursionError:
            raise TraceError(
                f"{name}: a line is JSON nested too deeply; objects of plain fields are needed"
            ) from None
        if self.requests:
            trace = trace.head(self.requests)
        if not trace.span_s:
            raise TraceError(
                f"{name}: all timestamps are {trace.records[0].timestamp_ms:g}; two different ones are needed"
            )
        return trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The simulated replicas and routers."""

    replicas: Annotated[
        str | None,
        typer.Option(
            help="Numbers of prefill replicas to compare at, by commas.", show_default=DEFAULT_REPLICAS
        ),
    ] = None
    cache: Annotated[
        str | None,
        typer.Option(
            help="Cache: a share of the trace's unique blocks in all replicas together, or GiB per replica (80GiB).",
            show_default=f"{DEFAULT_SHARE}; sizing: {DEFAULT_SIZES}",
        ),
    ] = None
    order: Annotated[ServiceOrder, typer.Option(help="Order in which a replica serves waiting prompts.")] = (
        DEFAULT_ORDER
    )
    routers: Annotated[int, typer.Option(help="Routers that share the requests.")] = 1
    staleness_ms: Annotated[
        float, typer.Option(help="Delay until a router hears of events other than its own dispatches.")
    ] = 0.0
    loss: Annotated[float, typer.Option(help="Share of the cache events that a router never hears.")] = 0.0
    dispatch_ahead_s: Annotated[
        str,
        typer.Option(
            help="Seconds of unstarted work that kvmesh sends to a replica before it holds requests back; or off."
        ),
    ] = str(DEFAULTS.router.dispatch_ahead_s)

    def check(self) -> None:
        """Raise BadOption for a value out of range."""
        options.number("--routers", str(self.routers), 1, ROUTERS_MAX)
        options.number("--staleness-ms", str(self.staleness_ms), 0, STALENESS_MAX_MS)
        options.number("--loss", str(self.loss), 0, 1)
        options.ahead_s("--dispatch-ahead-s", self.dispatch_ahead_s)

    def row(self, copies: int, speed: float) -> ReplayRow:
        """Return the values that all rows have in common. Raises BadOption."""
        return ReplayRow(
            order=self.order,
            routers=self.routers,
            delay_s=self.staleness_ms / 1e3,
            loss=self.loss,
            dispatch_ahead_s=options.ahead_s("--dispatch-ahead-s", self.dispatch_ahead_s),
            copies=copies,
            speed=speed,
        )

    def replica_counts(self) -> list[int]:
        """Return the numbers of replicas. Raises BadOption."""
        text = DEFAULT_REPLICAS if self.replicas is None else self.replicas
        return options.listed("--replicas", text, options.replicas)

    def caches(self, default: str = DEFAULT_SHARE) -> list[Cache]:
        """Return the amounts of cache, those of `default` without the option. Raises BadOption."""
        return options.listed("--cache", default if self.cache is None else self.cache, options.cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostOptions:
    """Prefill times, given or measured, and the objective for the first token."""

    cost: Annotated[
        str | None,
        typer.Option(
            help="Prefill seconds: 8b, 70b, or c0,a,b of c0 + u (a + b (T - u/2)).", show_default=DEFAULT_COST
        ),
    ] = None
    cost_of: Annotated[
        str | None,
        typer.Option(COST_OF, help="Prefill seconds as measured by the running router at HOST:PORT."),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(help=f"The mesh's kvmesh.toml, for {COST_OF} with TLS; default ./kvmesh.toml."),
    ] = None
    kv_bytes: Annotated[
        int | None,
        typer.Option(help="Bytes of KV cache per token.", show_default="131072; 70b: 327680"),
    ] = None
    slo_s: Annotated[
        float | None,
        typer.Option(
            help="A first token within this, or twice its prompt's cold prefill, is in time.",
            show_default=".5; 70b: 1",
        ),
    ] = None

    def given(self) -> Cost:
        """Return the cost as the options state it; a measured one replaces its prefill times. Raises BadOption."""
        if self.cost is not None and self.cost_of is not None:
            raise BadOption(
                f"--cost and {COST_OF} exclude each other: the prefill cost is either given or measured."
            )
        if self.slo_s is not None:
            options.number("--slo-s", str(self.slo_s), 0.001, 1000, " s")
        if self.kv_bytes is not None:
            options.number("--kv-bytes", str(self.kv_bytes), 1, options.KV_BYTES_MAX, " bytes")
        return options.cost(DEFAULT_COST if self.cost is None else self.cost, self.slo_s, self.kv_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The comparison and the sizing."""

    load: Annotated[
        str,
        typer.Option(
            help="Loads to compare at, by commas: offered load, with one pooled cache, over the capacity of the replicas."
        ),
    ] = ".5,.7,.85"
    policies: Annotated[
        str,
        typer.Option(
            help=f"Policies to compare, or all: {', '.join(POLICIES)}; and {BOUND}. The last is a bound and no "
            "policy: one queue and one pooled cache, first come, first served."
        ),
    ] = DEFAULT_POLICIES
    size: Annotated[
        bool | None,
        typer.Option(
            "--size/--no-size",
            help="Find how many replicas are needed at the trace's own rate.",
            show_default="on unless --replicas is given",
        ),
    ] = None
    goodput: Annotated[float, typer.Option(help="Required share of first tokens in time.")] = 0.9
    speed: Annotated[float, typer.Option(help="Factor on the rate of the trace when sizing.")] = SPEED
    seeds: Annotated[
        int, typer.Option(help="Runs with different noise; ± is half the distance of the extremes.")
    ] = 1
    jobs: Annotated[
        int, typer.Option(help="Worker processes; 0: one per core.", show_default="one per core")
    ] = 0

    def check(self) -> None:
        """Raise BadOption for a value out of range."""
        options.number("--goodput", str(self.goodput), 0.01, 1)
        options.number("--speed", str(self.speed), 0.001, 10_000)
        options.number("--seeds", str(self.seeds), 1, SEEDS_MAX)
        options.number("--jobs", str(self.jobs), 0, JOBS_MAX)

    def is_sized(self, *, has_replicas: bool) -> bool:
        """True if the replay sizes. Raises BadOption if another option applies to sizing only."""
        is_sized = not has_replicas if self.size is None else self.size
        if self.speed != SPEED and not is_sized:
            raise BadOption(f"--speed = {self.speed:g} applies to sizing only: add --size.")
        return is_sized


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """The form of the results."""

    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Write TTFT and goodput over load to this SVG file.")
    ] = None

    def check(self) -> None:
        """Raise BadOption if the plot cannot be written."""
        file = self.plot_file
        if file is None:
            return
        if not file.parent.is_dir():
            raise BadOption(f'--plot = "{file}": the folder does not exist.')
        if file.is_dir():
            raise BadOption(f'--plot = "{file}" is a folder: the name of a file is needed.')
        if file.suffix.lower() != SVG:
            raise BadOption(f'--plot = "{file}" does not end in {SVG}: only SVG can be written.')

    def write_plot(self, svg: str) -> None:
        """Write the plot. Raises BadOption if the file cannot be written."""
        assert self.plot_file is not None
        try:
            self.plot_file.write_text(svg, encoding="utf-8")
        except OSError as error:
            raise BadOption(f'--plot = "{self.plot_file}" cannot be written: {error.strerror}.') from None
