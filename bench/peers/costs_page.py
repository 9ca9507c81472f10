"""The page on the CPU of the systems: figures, procedure, tables, limits of the comparison. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from bench import pages
from bench.pages import paragraph
from bench.peers import chat
from bench.peers.cost_systems import BEHIND, FRONTEND, REPLICAS, ROUTER, STEP_S, WORKERS
from bench.peers.record import Column, Record, column

EVENT_BYTES: Final = len(chat.chunk(WORKERS[0], chat.token_text(1)))
"""A token as a server-sent event of a mock worker."""


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
class FirstTokens:
    """Times to first token in milliseconds: through the system, and from a mock worker without it."""

    p50: float
    p99: float
    direct_p50: float
    direct_p99: float


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
    first: FirstTokens
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
    first_rounds: int = 200


CostRecord = Record[About, Figures]


def line(figures: Figures) -> str:
    """Return one run as a line, for progress output."""
    token, short, long = figures.token, figures.short, figures.long
    return (
        f"{token.own_us:.1f} us per token ({figures.arrived:.0%} arrived), {short.own_us / 1e3:.2f} ms per short and "
        f"{long.own_us / 1e3:.2f} ms per long request ({short.rate:.0f} and {long.rate:.0f} per second), "
        f"{figures.first.p50 - figures.first.direct_p50:.2f} ms added to the first token"
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
FIRST_COLUMNS: Final = (
    column("**added, p50**", lambda one: one.first.p50 - one.first.direct_p50, 2),
    column("**added, p99**", lambda one: one.first.p99 - one.first.direct_p99, 2),
    column("through the system, p50", lambda one: one.first.p50, 2),
    column("p99", lambda one: one.first.p99, 2),
    column("from a mock worker, p50", lambda one: one.first.direct_p50, 2),
    column("p99", lambda one: one.first.direct_p99, 2),
)
IDLE_COLUMNS: Final = columns(lambda one: one.idle, "ms per second", 1e3, 1)


def tables(record: CostRecord) -> list[str]:
    """Return the tables, each with its title."""
    about = record.about
    titles = (
        (f"A token, with {about.streams} streams", TOKEN_COLUMNS),
        (f"A request with a prompt of {about.short.words:,} words", SHORT_COLUMNS),
        (f"A request with a prompt of {about.long.words:,} words", LONG_COLUMNS),
        ("Added time to first token, ms", FIRST_COLUMNS),
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
        "One system runs at a time, with all processes new. Its own processes are alone on core 0. On core 1 are "
        "clients, workers, Redis, and the prefill and decode services of kvmesh. First "
        f"{about.first_rounds} prompts of {short.words:,} words for one token go through the system, one at a time. As "
        f"many go to a mock worker directly, in turn with them. Then {about.streams} streams are held open, each with a "
        f"prompt of {about.stream_words} words. Workers send a token per stream every {STEP_S * 1000:g} ms, those of "
        f"all streams of a worker together. The window is {about.window_s:g} s long. Then callers send requests for "
        f"one token in a closed loop, for {about.loop_s:g} s each. Short prompts have {short.words:,} words and "
        f"{short.callers} callers, long ones {long.words:,} words and {long.callers} callers. Words are drawn anew for "
        "each prompt, so no cache has them. Repeats go there and back over the systems (A B C, C B A), so a drift of "
        "the machine burdens all alike. A cell is the median of the runs, with the smallest and the largest in "
        "brackets. All processes run on one machine, over loopback."
    )


_COUNTED: Final = (
    "CPU is user and system time of the system's own processes, by the kernel's clock of each process, child processes "
    "included. That is the process of the router, and for kvmesh frontend and router. CPU of clients, workers and Redis is "
    "never counted. Work without load is not subtracted; the last table shows it. The row `load` above tells how busy the "
    "machine was before the run. Other work on the two cores raises all figures."
)
_DIFFERENCES: Final = f"""\
- A router from PyPI is one program in Rust that takes OpenAI requests over HTTP/1.1. It passes the server-sent events of
  one of {REPLICAS} mock workers on, {EVENT_BYTES} bytes a token. Frontend and router of kvmesh are two programs in Python
  with a hop between them. Between themselves they speak gRPC, with batched transports (`frontend.edge`, `mesh.hops`) and
  step frames. One row of kvmesh has clients of its own API over gRPC, the other has the clients of the routers from PyPI.
- The added time to first token is that through the system minus that of the same client at a mock worker. At kvmesh it
  has the work of four processes: frontend, router, prefill or decode, and the stub engine. In the row of its own API the
  client is grpcio's, which takes more time than the HTTP client.
- kvmesh does more with each request. Its frontend checks the key and the budgets of the tenant, and counts each token
  against them. It tokenizes the prompt and detokenizes the output; mock workers take and give text. It signs resume
  tokens. Its router follows the KV events of all replicas. [Streams survive](peers.md) the death of a replica.
- Behind kvmesh are {REPLICAS} prefill and {REPLICAS} decode services, the real ones. Behind each is a stub engine
  (`bench.stub_engine`): a small gRPC server that speaks Triton's protocol with step frames, and computes nothing. It
  passes the checks of the engine contract. Like a mock worker it sends the first token at once, and the others at its
  steps.
- The CPU of prefill and decode services is no part of the sum. Their work is in the engine's server where a router from
  PyPI is used, and a mock worker does none of it.
- Prompts above 64 tokens go through prefill, a handoff and decode (`router.local_prefill_tokens_max`). Of those with 40
  words these are four in five, 71 tokens on average. A router from PyPI sends a prompt to one worker.
- The client is one program for all systems (`bench.peers.cost_client`). It draws words from one vocabulary, and checks
  every token.
- In the closed loop a slower system gets fewer requests. The rates show the load and compare nothing: mostly the core of
  clients and workers limits them. At a lower rate a request takes more CPU, as caches are cold and batches small.
- The routers run with their defaults, except for the policy."""
