"""The section on conversations of the page on peers: a table, and what was done. Pure."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from bench import conversations
from bench.conversation_mesh import PREFILL_BLOCKS, STEP_S
from bench.conversation_player import WARM_LENGTHS
from bench.peers.page import spread

BEGIN = "<!-- Conversations: written by `python -m bench.peers.conversations`. -->"
END = "<!-- Conversations: end. -->"


@dataclass(frozen=True, slots=True)
class Figures:
    """One run in numbers."""

    turns: int
    """Answered to the last token."""
    failed: int
    reuse: float
    """Blocks found in cache of those that were computed before anywhere."""
    hit: float
    """Of all blocks."""
    hit_max: float
    """What one cache without bounds would find of all blocks."""
    imbalance: float
    """Prefill seconds of the replica with the most over the mean."""
    kept: float
    """Share of turns behind a first one that went where the one before was, or found all of its blocks."""
    work_s: float
    """Prefill seconds of all replicas."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    errors: tuple[str, ...] = ()


@dataclass(slots=True)
class Record:
    """All runs of a command."""

    command: str
    machine: Mapping[str, str]
    conversations: int
    turns: int
    span_s: float
    load: float
    seconds: float = 0.0
    runs: dict[tuple[str, str, str], list[Figures]] = field(default_factory=dict)
    """By system, version and policy, in the order of the first run."""
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, version: str, policy: str, figures: Figures) -> None:
        """Add one run."""
        self.runs.setdefault((name, version, policy), []).append(figures)

    def to_json(self) -> str:
        """Return everything as JSON."""
        told = {
            "command": self.command,
            "seconds": round(self.seconds, 1),
            "machine": dict(self.machine),
            "conversations": self.conversations,
            "turns": self.turns,
            "load": self.load,
            "runs": [
                {"system": name, "version": version, "policy": policy, "run": number, **asdict(figures)}
                for (name, version, policy), runs in self.runs.items()
                for number, figures in enumerate(runs, 1)
            ],
            "problems": self.problems,
        }
        return json.dumps(told, indent=2) + "\n"


COLUMNS: tuple[tuple[str, Callable[[Figures], float], int], ...] = (
    ("turns", lambda one: one.turns, 0),
    ("failed", lambda one: one.failed, 0),
    ("**reuse**", lambda one: one.reuse, 3),
    ("hit ratio", lambda one: one.hit, 3),
    ("at most", lambda one: one.hit_max, 3),
    ("**imbalance**", lambda one: one.imbalance, 2),
    ("kept their place", lambda one: one.kept, 2),
    ("prefill work, s", lambda one: one.work_s, 0),
    ("first token, mean s", lambda one: one.ttft_mean_s, 2),
    ("p50", lambda one: one.ttft_p50_s, 2),
    ("p95", lambda one: one.ttft_p95_s, 2),
)


def line(figures: Figures) -> str:
    """Return one run as a line, for the one who waits."""
    told = ", ".join(f"{title.strip('*')} {read(figures):.{digits}f}" for title, read, digits in COLUMNS)
    return f"  {told}{''.join(f'; {error}' for error in figures.errors)}"


def table(record: Record) -> str:
    """Return the table in Markdown: each cell the median, and in brackets the smallest and the largest run."""
    titles = ["system", "policy", "runs", *(title for title, _, _ in COLUMNS)]
    lines = [f"| {' | '.join(titles)} |", f"|---|---|{'--:|' * (len(titles) - 2)}"]
    for (name, version, policy), runs in record.runs.items():
        cells = [f"{name} {version}", policy, str(len(runs))]
        cells += [spread((read(one) for one in runs), digits) for _, read, digits in COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def section(record: Record) -> str:
    """Return the section, between its marks."""
    machine = record.machine
    lines = [
        BEGIN,
        "",
        "## Conversations: the prefix cache under kvmesh and the routers from PyPI",
        "",
        *_paragraph(
            f"Written by `{record.command}`, {record.seconds / 60:.1f} minutes, {machine['date']}, commit "
            f"{machine['commit']}, load {machine['load']}; the machine is that above."
        ),
        "",
        *_paragraph(_procedure(record)),
        "",
        table(record).rstrip(),
        "",
        *_paragraph(_WORDS),
        "",
        _DIFFERENCES.rstrip(),
        "",
    ]
    if record.problems:
        lines += ["Not measured:", "", *(f"- {text}" for text in record.problems), ""]
    return "\n".join([*lines, END])


def put(page: str, text: str) -> str:
    """Return `page` with `text` in place of the section it had, or behind its end."""
    before, mark, rest = page.partition(BEGIN)
    if not mark:
        return f"{page.rstrip()}\n\n{text}\n"
    return before + text + rest.partition(END)[2]


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def _procedure(record: Record) -> str:
    return (
        f"{record.conversations} conversations with {record.turns} turns of a recorded trace (`conversation_head`), "
        f"lengths divided by {conversations.FACTOR}, one system prompt of {conversations.SYSTEM_TOKENS} tokens before "
        f"all of them, played so fast ({record.span_s:.0f} s) that the prefill work of perfect reuse is {record.load:g} "
        "of what four replicas can do. A turn sends all that was said before and something new, at its time or once the "
        "turn before is answered. A prompt costs what it would at full length on one H100 with an 8B model. Each replica "
        f"caches {PREFILL_BLOCKS:,} blocks of {conversations.BLOCK_TOKENS} tokens, least recently used first out, and "
        f"gives a token every {STEP_S * 1000:g} ms. Before each run {3 * len(WARM_LENGTHS)} other prompts are sent. A "
        "cell is the median of the runs, with the smallest and the largest in brackets."
    )


_WORDS = (
    "**Reuse**: blocks found in cache over blocks that were computed before, anywhere. Hit ratio: blocks found over all "
    "blocks; at most: what one cache without bounds would find. **Imbalance**: prefill seconds of the replica with the "
    "most over the mean of four. Kept their place: turns behind a first one that went to the replica of the turn before, "
    "or found all of its full blocks."
)
_DIFFERENCES = """\
What differs:

- kvmesh runs with four prefill and four decode replicas, the reference engine in Triton behind each, two routers and a
  frontend: its time to first token holds all of these and the move of the blocks to decode. The routers' mock workers
  compute and generate in one process that does nothing else: they have it easier.
- A mock worker serves prompts one at a time as they come; kvmesh's prefill serves the shortest first, with ageing. Where
  the table says so, the mock workers do the same.
- A token is a word at the mock workers and an id at kvmesh; roles of messages are words too, so that prompts are some
  words longer there.
- The routers run with their defaults, but for the policy. cache_aware sends by a tree of the texts that the router sent
  before; where requests under way are uneven (sglang-router: 64 more and 1.5 times as many at one worker) it sends to the
  least busy one.
  kvmesh's routers hear from the replicas which blocks they hold.
"""
