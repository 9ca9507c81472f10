"""Engines with and without KV events on the same traces: `python -m bench.routing.eventless [--write PAGE]`.

Without events the router believes what it dispatched (docs/decisions/0051-believed-blocks-without-events.md).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from bench import machine, pages
from bench.routing.record import code
from bench.routing.rows import LARGE, OURS, SEEDS, Case, chosen_rows, fault_rows
from bench.routing.sources import traces
from bench.routing.tails import geometric, met
from simulator.measures import Measures, mean
from simulator.processes import Runner, Task
from simulator.tables import row_dict

UNSEEN: Final = (0.0, 0.25)
"""Blocks unknown to routers over the blocks of prompts. Both traces generate 0.026 tokens per token of prompt."""

HIT_AIM: Final = 0.9
HIT_TEXT: Final = "in every row, hit ratio without KV events at least 0.9 of that with them"
COLUMNS: Final = (
    *("row", "unknown", "hit: events", "none", "none over events", "wrong: events", "none"),
    *("TTFT s: events", "none", "none over events"),
)
WORDS: Final = """kvmesh places all requests.

- hit: cached blocks over all blocks of prompts.
- wrong: wrong hits, blocks that the router expected in cache and the replica did not find, over all blocks of prompts.
- unknown: blocks that each prompt leaves in the cache without the router's knowledge, over its own blocks. They stand for
  generated tokens, 0.026 per token of prompt in both traces, and for requests of others. Decode is not
  simulated, so no router learns of the end of a generation.
- stale: 4 routers hear of each other's prompts after 100 ms. Of the KV events, 5 % are lost.

The simulated engines evict in strict LRU order. TensorRT-LLM does as well, except for blocks with another retention
priority. No engine on a GPU was measured."""


@dataclass(frozen=True)
class EventlessResult:
    """One row with both kinds of engines."""

    case: Case
    """With events."""
    events: Measures
    none: Measures

    @property
    def hit_ratio(self) -> float:
        """Hit ratio without events over that with them."""
        return self.none.hit / self.events.hit

    @property
    def mean_ratio(self) -> float:
        """Mean time to first token without events over that with them."""
        return self.none.mean_s / self.events.mean_s


def cases() -> list[Case]:
    """Return the chosen rows but the largest, and those after restarts, with each share of unknown blocks."""
    rows = [case for case in chosen_rows() if case.row.replicas < LARGE]
    rows += [case for case in fault_rows() if case.row.outage_s]
    return [replace(case, row=replace(case.row, unseen=unseen)) for unseen in UNSEEN for case in rows]


def without_events(case: Case) -> Case:
    """Return the same row with engines that have no KV events."""
    return replace(case, row=replace(case.row, has_events=False))


def tasks(case: Case) -> list[Task]:
    """Return the runs of kvmesh on `case`, one per seed."""
    return [Task(case.source, case.row, OURS, seed) for seed in SEEDS]


def page(rows: Sequence[EventlessResult], made: dict[str, str], old: str = "") -> str:
    """Return the page."""
    worst = min(rows, key=lambda row: row.hit_ratio)
    seen = f"{worst.hit_ratio:.3f}: {worst.case.name}, unknown {worst.case.row.unseen:g}"
    facts = (f"{name}: {value}" for name, value in {**made, "seeds per row": f"{len(SEEDS)}; means"}.items())
    told = ["# Placement without KV events", "", "Made by `make bench-eventless`. All figures are simulated."]
    told += [WORDS, "", *pages.items(facts), ""]
    told += pages.table(
        ("aim", "rows", "measured", ""), [(HIT_TEXT, f"{len(rows)}", seen, met(worst.hit_ratio >= HIT_AIM))]
    )
    for unseen in UNSEEN:
        group = [row for row in rows if row.case.row.unseen == unseen]
        hit, ttft = (geometric(getattr(row, name) for row in group) for name in ("hit_ratio", "mean_ratio"))
        told += [
            "",
            f"Geometric means with {unseen:g} unknown blocks: {hit:.3f} of the hits, {ttft:.3f} of the mean TTFT.",
        ]
    return pages.with_notes([*told, "", *pages.table(COLUMNS, map(_row, rows)), ""], old)


def as_json(rows: Sequence[EventlessResult], made: dict[str, str]) -> dict[str, Any]:
    """Return the record as plain objects."""
    return {
        "made": made,
        "seeds": list(SEEDS),
        "rows": [
            {
                "name": row.case.name,
                "row": row_dict(row.case.row),
                "events": row.events.as_dict(),
                "none": row.none.as_dict(),
            }
            for row in rows
        ],
    }


def _row(row: EventlessResult) -> list[str]:
    events, none = row.events, row.none
    return [
        *(row.case.name, f"{row.case.row.unseen:g}", f"{events.hit:.3f}", f"{none.hit:.3f}"),
        *(f"{row.hit_ratio:.3f}", f"{events.wrong:.4f}", f"{none.wrong:.4f}"),
        *(f"{events.mean_s:.3f}", f"{none.mean_s:.3f}", f"{row.mean_ratio:.2f}"),
    ]


def eventless(
    jobs: Annotated[int, typer.Option(help="Processes.", min=1, max=256)] = 2,
    write: Annotated[Path | None, typer.Option(help="Page to write, and its .json beside it.")] = None,
) -> None:
    """Compare engines with and without KV events on replayed traces."""
    found: dict[Task, Measures] = {}
    wanted = [task for case in cases() for each in (case, without_events(case)) for task in tasks(each)]
    with closing(Runner(traces(), jobs)) as runner:
        runner.run(list(dict.fromkeys(wanted)), found.__setitem__)

    def measured(case: Case) -> Measures:
        return mean([found[task] for task in tasks(case)])

    rows = [EventlessResult(case, measured(case), measured(without_events(case))) for case in cases()]
    described = machine.describe()
    made = {**{name: described[name] for name in ("date", "commit", "python")}, "code": code()}
    text = page(rows, made, pages.old(write))
    Console().print(text, soft_wrap=True, markup=False, highlight=False)
    if write is not None:
        pages.write(write, text, json.dumps(as_json(rows, made), indent=1) + "\n")


if __name__ == "__main__":
    typer.run(eventless)
