"""The section on conversations of the page on peers: procedure and table. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bench import conversations, pages
from bench.conversation_mesh import PREFILL_BLOCKS, STEP_S
from bench.conversation_player import WARM_LENGTHS
from bench.pages import paragraph
from bench.peers.record import Record, column

BEGIN = "<!-- Conversations: written by `python -m bench.peers.conversations`. -->"
END = "<!-- Conversations: end. -->"


@dataclass(frozen=True, slots=True)
class Figures:
    """One run in numbers."""

    turns: int
    """Answered to the last token."""
    failed: int
    reuse: float
    """Blocks found in cache over blocks that any replica computed before."""
    hit: float
    """Hit ratio over all blocks."""
    hit_max: float
    """Hit ratio of one unbounded cache."""
    imbalance: float
    """Prefill seconds of the replica with the most over the mean."""
    kept: float
    """Share of later turns with session affinity, see conversation_figures.kept."""
    work_s: float
    """Prefill seconds of all replicas."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class About:
    """Settings that all runs share."""

    conversations: int
    turns: int
    span_s: float
    load: float


ConversationRecord = Record[About, Figures]

COLUMNS = (
    column("turns", lambda one: one.turns, 0),
    column("failed", lambda one: one.failed, 0),
    column("**reuse**", lambda one: one.reuse, 3),
    column("hit ratio", lambda one: one.hit, 3),
    column("at most", lambda one: one.hit_max, 3),
    column("**imbalance**", lambda one: one.imbalance, 2),
    column("session affinity", lambda one: one.kept, 2),
    column("prefill work, s", lambda one: one.work_s, 0),
    column("first token, mean s", lambda one: one.ttft_mean_s, 2),
    column("p50", lambda one: one.ttft_p50_s, 2),
    column("p95", lambda one: one.ttft_p95_s, 2),
)


def line(figures: Figures) -> str:
    """Return one run as a line, for progress output."""
    told = ", ".join(f"{title.strip('*')} {cell([figures])}" for title, cell in COLUMNS)
    return f"{told}{''.join(f'; {error}' for error in figures.errors)}"


def put(page: str, record: ConversationRecord) -> str:
    """Return `page` with the section in place of the former one, or at its end."""
    marked = page if BEGIN in page else f"{page.rstrip()}\n\n{BEGIN}\n{END}\n"
    return pages.put(marked, ["", *section(record)], BEGIN, END)


def section(record: ConversationRecord) -> list[str]:
    """Return the lines of the section."""
    machine = record.machine
    origin = (
        f"Written by `{record.command}`, {record.seconds / 60:.1f} minutes, {machine['date']}, commit "
        f"{machine['commit']}, load {machine['load']}; the machine is that above."
    )
    lines = [*paragraph(origin), "", *paragraph(_procedure(record.about)), "", *record.table(COLUMNS)]
    lines += ["", *paragraph(_WORDS), "", _DIFFERENCES]
    if record.problems:
        lines += ["", "Not measured:", "", *pages.items(record.problems)]
    return pages.section("Conversations: the prefix cache under kvmesh and the routers from PyPI", lines)


def _procedure(about: About) -> str:
    return (
        f"The runs play {about.conversations} conversations with {about.turns} turns of a recorded trace "
        f"(`conversation_head`), with lengths divided by {conversations.FACTOR}. One system prompt of "
        f"{conversations.SYSTEM_TOKENS} tokens precedes all of them. They are played in {about.span_s:.0f} s: with perfect "
        f"reuse, their prefill work is {about.load:g} of the capacity of four replicas. A turn sends all earlier messages "
        "and a new one, at its time or once the turn before is answered. A prompt costs as much as at full length on one "
        f"H100 with an 8B model. Each replica caches {PREFILL_BLOCKS:,} blocks of {conversations.BLOCK_TOKENS} tokens with "
        f"LRU eviction, and generates a token every {STEP_S * 1000:g} ms. Before each run {3 * len(WARM_LENGTHS)} other "
        "prompts are sent. A cell is the median of the runs, with the smallest and the largest in brackets."
    )


_WORDS = (
    "**Reuse**: blocks found in cache over blocks that any replica computed before. Hit ratio: blocks found over all "
    "blocks; at most: the hit ratio of one unbounded cache. **Imbalance**: prefill seconds of the replica with the "
    "most over the mean of four. Session affinity: share of later turns that went to the replica of the turn before, or "
    "found all of its full blocks."
)
_DIFFERENCES = """\
Differences between the systems:

- kvmesh runs with two routers, a frontend, and four prefill and four decode replicas with the reference engine in Triton
  behind each. Its time to first token contains all of these, and the KV transfer to decode. A mock worker computes and
  generates in one process that does nothing else, which is an advantage.
- A mock worker serves prompts one at a time in the order of arrival. kvmesh's prefill serves the shortest job first, with
  aging. In the rows that say so, the mock workers do the same.
- A token is a word at the mock workers and an id at kvmesh. Roles of messages are words too, so prompts are some words
  longer there.
- The routers run with their defaults, except for the policy. cache_aware sends by a tree of the texts that the router sent
  before. With uneven numbers of running requests it sends to the least loaded worker (sglang-router: 64 more and 1.5
  times as many at one worker). The routers of kvmesh learn from the replicas which blocks they hold."""
