"""Renders docs/measurements/openai-faults.md from the records of the OpenAI form. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import UnsetType

from bench import pages
from tests.chaos.cells import Cell, CellError, Run
from tests.chaos.records import Record, median

FORM: Final = (
    *(
        ("frontend", "kill"),
        ("frontend", "term"),
        ("router", "kill"),
        ("prefill", "kill"),
        ("decode", "kill"),
    ),
    *(("prefill-engine", "kill"), ("decode-engine", "pause"), ("redis", "term"), ("control", "kill")),
)
"""Cells of the OpenAI form: signals suffice for all of them, so the mesh has processes and no containers."""

COLUMNS: Final = (
    *("cell", "runs", "streams", "in flight", "**lost**", "cancelled", "over deadline", "excused"),
    *("taken over", "resumed", "went on elsewhere", "longest pause, s", "violations"),
)

LEGEND: Final = """\
The mesh, its load, the faults and the judge are those of [faults](faults.md), with processes in place of containers. The
clients are others. They call `/v1/completions` with token ids and `return_token_ids`, and every token is compared.

- Four in five read server-sent events with an `Idempotency-Key`. When a connection breaks, or the mesh allows a retry, they
  send the request to the other frontend with `Last-Event-ID`. **Went on elsewhere** counts that. The answer must go on with
  exactly the rest.
- One in five is the `openai` package of Python, unmodified, at one frontend. It retries a request by itself, but no stream.
- **excused**: callers of the package whose frontend was killed, or drained and refused them. The package needs up to 4 s
  for its two retries.
- **taken over**, **resumed**: counted by the frontends, without those of a frontend that ended later. All other columns are
  those of [faults](faults.md)."""


def form(text: str, seeds: int, only_seed: int | None) -> list[Run]:
    """Return the runs of "frontend:kill,redis:term"; "" means all of FORM. Seeds are 1 to `seeds`, or `only_seed`.

    Raises CellError with the unknown name.
    """
    known = {str(cell): cell for cell in (Cell(part, fault) for part, fault in FORM)}
    named = list(dict.fromkeys(filter(None, (word.strip() for word in text.split(",")))))
    for word in named:
        if word not in known:
            raise CellError(f"{word!r} is no cell of the OpenAI form; allowed are {', '.join(known)}")
    every = range(1, seeds + 1) if only_seed is None else [only_seed]
    return [Run(known[word], seed) for seed in every for word in named or known]


def page(records: Sequence[Record], command: str, old: str = "") -> str:
    """Return the page as Markdown. `old`: the page that it replaces; its hand-written end is kept."""
    lines = [
        "# Faults, seen by OpenAI clients",
        "",
        "**Question.** What do clients of the OpenAI API see when a process of the mesh fails under them?",
        "",
        *section(records, command),
        "",
        LEGEND,
        "",
        "## What callers of the openai package saw",
        "",
        *_package(records),
        "",
    ]
    bad = [record for record in records if record.violations]
    if bad:
        lines += ["## Violations", ""]
        lines += pages.items(
            f"{record.part}:{record.fault}, seed {record.seed}: {violation}"
            for record in bad
            for violation in record.violations[:5]
        )
        lines += [""]
    return pages.with_notes(lines, old)


def section(records: Sequence[Record], command: str) -> list[str]:
    """Return command, machine, result and table."""
    minutes = sum(record.seconds for record in records) / 60
    machines = "; ".join(dict.fromkeys(record.machine for record in records))
    commits = ", ".join(dict.fromkeys(record.commit for record in records))
    first = min((record.began for record in records), default="")[:16].replace("T", " ")
    busy = median([record.cpu_share for record in records]) or 0.0
    bad = sum(bool(record.violations) for record in records)
    return [
        f"**Command.** `{command}`: {len(records)} runs in {minutes:.0f} minutes ([all](openai-faults.jsonl)).",
        "",
        f"**Where.** {machines}; {first} UTC; commit {commits}. Busy cores while streams ran: {100 * busy:.0f} % (median).",
        "",
        *pages.paragraph(
            f"**Result.** {_sum(records, 'streams'):,} streams, {_sum(records, 'in_flight'):,} of them in flight when the"
            f" fault came. {_sum(records, 'output_tokens'):,} tokens were compared. **{_sum(records, 'lost')} lost**;"
            f" violations in {bad} of {len(records)} runs."
        ),
        "",
        *pages.table(COLUMNS, _rows(records), "lr"),
    ]


def _rows(records: Sequence[Record]) -> Iterable[list[str]]:
    for part, fault in FORM:
        ones = [record for record in records if (record.part, record.fault) == (part, fault)]
        if ones:
            names = (
                "streams",
                "in_flight",
                "lost",
                "cancelled",
                "deadlined",
                "excused",
                "takeovers",
                "resumed",
                "client_resumes",
            )
            pauses = [record.longest_pause_s for record in ones]
            yield [
                str(Cell(part, fault)).replace(":", ", "),
                str(len(ones)),
                *(f"{_sum(ones, name):,}" for name in names),
                f"{median(pauses) or 0.0:.2f} / {max(pauses):.2f}",
                str(sum(len(record.violations) for record in ones)),
            ]


def _package(records: Sequence[Record]) -> list[str]:
    """Return a table of what callers saw, by cell."""
    rows = []
    for part, fault in FORM:
        counts: Counter[str] = Counter()
        for record in records:
            if (record.part, record.fault) == (part, fault) and not isinstance(record.package, UnsetType):
                counts.update(record.package)
        rows += [[f"{part}, {fault}", what, str(count)] for what, count in counts.most_common()]
    return pages.table(("cell", "", "count"), rows, "llr")


def _sum(records: Iterable[Record], name: str) -> int:
    return sum(int(getattr(record, name)) for record in records)
