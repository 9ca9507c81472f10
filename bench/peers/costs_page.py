"""The page on the CPU of the systems: figures, procedure, tables, limits of the comparison. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from bench import pages
from bench.pages import paragraph
from bench.peers.cost_systems import BEHIND, FRONTEND, REPLICAS, ROUTER, STEP_S
from bench.peers.record import Column, Record, column


@dataclass(frozen=True, slots=True)
class Cost:
    """The CPU of one kind of work. `us`: microseconds per unit of work, by role; `rate`: units per second."""

    us: Mapping[str, float]
    rate: float

    @property
    def own_us(self) -> float:
        """CPU of the system's own processes: frontend and router."""
        return sum(value for role, value in self.us.items() if role != BEHIND)


@dataclass(frozen=True, slots=True)
class Figures:
    """One run in numbers."""

    idle: Cost
    """Without load; the unit is a second."""
    token: Cost
    short: Cost
    """A request with a short prompt."""
    long: Cost
    """A request with a long prompt."""
    arrived: float
    """Tokens that arrived over tokens that were paced."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Requests of one token: words of the prompt, and callers in a closed loop."""

    words: int
    callers: int


@dataclass(frozen=True, slots=True)
class About:
    """Settings that all runs share. Windows are in seconds."""

    streams: int = 64
    stream_words: int = 40
    stream_tokens: int = 4000
    window_s: float = 5.0
    short: Prompts = Prompts(40, 8)
    long: Prompts = Prompts(1200, 4)
    loop_s: float = 4.0


CostRecord = Record[About, Figures]


def line(figures: Figures) -> str:
    """Return one run as a line, for progress output."""
    token, short, long = figures.token, figures.short, figures.long
    return (
        f"{token.own_us:.1f} us per token ({figures.arrived:.0%} arrived), {short.own_us / 1e3:.2f} ms per short and "
        f"{long.own_us / 1e3:.2f} ms per long request ({short.rate:.0f} and {long.rate:.0f} per second)"
    )


def columns(
    read: Callable[[Figures], Cost], unit: str, us_per_unit: float, digits: int
) -> tuple[Column, ...]:
    """Return the columns of a kind of work: the sum, and each role. `us_per_unit`: microseconds in `unit`."""

    def of(role: str) -> Callable[[Figures], float | None]:
        return lambda one: read(one).us[role] / us_per_unit if role in read(one).us else None

    return (
        column(f"**CPU, {unit}**", lambda one: read(one).own_us / us_per_unit, digits),
        column("of it frontend", of(FRONTEND), digits),
        column("of it router", of(ROUTER), digits),
        column("beside it prefill and decode", of(BEHIND), digits),
    )


TOKEN_COLUMNS: Final = (
    *columns(lambda one: one.token, "us per token", 1.0, 1),
    column("tokens that arrived, %", lambda one: one.arrived * 100, 0),
)
SHORT_COLUMNS: Final = (
    *columns(lambda one: one.short, "ms per request", 1e3, 2),
    column("requests/s", lambda one: one.short.rate, 0),
)
LONG_COLUMNS: Final = (
    *columns(lambda one: one.long, "ms per request", 1e3, 2),
    column("requests/s", lambda one: one.long.rate, 0),
)
IDLE_COLUMNS: Final = columns(lambda one: one.idle, "ms per second", 1e3, 1)


def tables(record: CostRecord) -> list[str]:
    """Return the tables, each with its title."""
    about = record.about
    titles = (
        (f"A token, with {about.streams} streams", TOKEN_COLUMNS),
        (f"A request with a prompt of {about.short.words:,} words", SHORT_COLUMNS),
        (f"A request with a prompt of {about.long.words:,} words", LONG_COLUMNS),
        ("Without load", IDLE_COLUMNS),
    )
    return [text for title, chosen in titles for text in pages.section(title, record.table(chosen))]


def page(record: CostRecord, old: str) -> str:
    """Return the page. `old`: the previous page; its hand-written end is kept."""
    lines = [
        "# CPU per token and per request: kvmesh and the routers from PyPI",
        "",
        *pages.origin(record.command, record.seconds, record.machine),
        *pages.section("Procedure", [*paragraph(_procedure(record.about)), "", *paragraph(_COUNTED)]),
        *tables(record),
        *pages.section("Differences between the systems, and limits", [_DIFFERENCES]),
        *pages.section("Not measured", pages.items(record.problems)),
    ]
    return pages.with_notes(lines, old)


def _procedure(about: About) -> str:
    short, long = about.short, about.long
    return (
        "One system runs at a time, with all processes new. Its own processes are alone on core 0. Clients, workers and "
        f"Redis are on core 1. {about.streams} streams are held open, each with a prompt of {about.stream_words} words. "
        f"Workers send a token per stream every {STEP_S * 1000:g} ms, those of all streams of a worker together. The "
        f"window is {about.window_s:g} s long. Then callers send requests for one token, each caller one at a time: "
        f"{short.callers} callers with prompts of {short.words:,} words, and {long.callers} with prompts of "
        f"{long.words:,} words, {about.loop_s:g} s each. Words are drawn anew for each prompt, so no cache has them. "
        "Repeats go there and back over the systems (A B C, C B A), so a drift of the machine burdens all alike. A cell is "
        "the median of the runs, with the smallest and the largest in brackets. All processes run on one machine, over "
        "loopback."
    )


_COUNTED: Final = (
    "CPU is user and system time of the system's own processes, by the kernel's clock of each process, child processes "
    "included. That is the process of the router, and for kvmesh frontend and router. CPU of clients, workers and Redis is "
    "never counted. Work without load is not subtracted; the last table shows it. The row `load` above tells how busy the "
    "machine was before the run. Other work on the two cores raises all figures."
)
_DIFFERENCES: Final = f"""\
- A router from PyPI receives OpenAI requests over HTTP/1.1, passes them to one of {REPLICAS} mock workers, and passes
  their server-sent events back. It is one program in Rust, and does not look into the events. kvmesh receives gRPC.
  Its frontend and router are two programs in Python, with a hop between them. They run with batched transports
  (`frontend.edge`, `mesh.hops`) and step frames.
- kvmesh does more with each request. The frontend checks the key and the budgets of the tenant, tokenizes the
  prompt, detokenizes the output, counts each token for the tenant and signs points at which a broken stream can
  go on. The router follows the KV events of all replicas, and moves streams when a replica dies. With the
  routers from PyPI the engine's own server tokenizes, and nobody counts.
- Behind kvmesh are {REPLICAS} prefill and {REPLICAS} decode services. They are the real ones, each before a stub engine
  (`bench.stub_engine`), a small gRPC server that speaks Triton's protocol with step frames and computes nothing. It
  passes the checks of the engine contract. As a mock worker it sends the first token at once and the next ones
  at its steps. The CPU of prefill and decode services is named apart. With the routers from PyPI this part is
  in the engine's server, and is not measured.
- Clients of all systems are asyncio tasks of one program (`bench.peers.cost_client`) that checks every token. Words are
  drawn from one vocabulary for all.
- In the closed loop a slower system gets fewer requests, so the rates differ. They show the load, and compare nothing:
  mostly the core of clients and workers limits them.
- The routers run with their defaults, except for the policy. They count requests, and kvmesh counts tokens, too."""
