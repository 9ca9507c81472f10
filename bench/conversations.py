"""Conversations of a recorded trace, made shorter and faster for a mesh without GPUs. Pure.

A row of the trace continues the conversation that last used its deepest known block. FACTOR divides lengths: a block of
512 tokens becomes one of 32. COST is that of an 8B model on one H100, with the work per token raised by FACTOR. A prompt
therefore takes as long as one of the recorded length on that GPU.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from simulator.cost import COSTS, Cost

TRACE: Final = Path(__file__).parent / "traces" / "conversation_head.jsonl.gz"
FACTOR: Final = 16
BLOCK_TOKENS: Final = 32
COST: Final = Cost("8b", COSTS["8b"].c0_s, COSTS["8b"].a_s * FACTOR, COSTS["8b"].b_s * FACTOR**2)
"""Cost of a prompt after the division of lengths by FACTOR."""

SYSTEM_TOKENS: Final = 128
"""Length of the system prompt of every conversation: 2,048 tokens in the trace's lengths."""

TURNS_MIN: Final = 3
"""A conversation with fewer turns says little about session affinity."""

FRESH_MIN: Final = 4
"""Least new tokens of a turn. Some recorded turns are shorter than the turn before with its answer."""

SEQUENCE_TOKENS_MAX: Final = 8000


class Record(NamedTuple):
    """One row of the trace, in its own lengths."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


class Turn(NamedTuple):
    """One turn of a conversation: all earlier messages, and `fresh_tokens` more."""

    at_s: float
    """Earliest time; a turn waits for the answer to the turn before."""
    fresh_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The conversations to play."""

    conversations: Sequence[Sequence[Turn]]

    @property
    def turn_count(self) -> int:
        """Turns in all."""
        return sum(map(len, self.conversations))

    @property
    def span_s(self) -> float:
        """Time at which the last turn is due."""
        return max(turns[-1].at_s for turns in self.conversations)


def read(path: Path = TRACE) -> list[Record]:
    """Return the rows of a trace in the Mooncake format, gzip-compressed."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [
        Record(row["timestamp"] / 1e3, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
        for row in rows
    ]


def recorded(records: Sequence[Record]) -> list[list[Record]]:
    """Return the conversations in the order of their first turns. All of them share the first block."""
    conversations: list[list[Record]] = []
    owner: dict[int, list[Record]] = {}
    for record in records:
        known = (owner[block] for block in reversed(record.blocks[1:]) if block in owner)
        mine = next(known, None)
        if mine is None:
            mine = []
            conversations.append(mine)
        mine.append(record)
        for block in record.blocks[1:]:
            owner[block] = mine
    return conversations


def turns_of(records: Sequence[Record]) -> list[Turn]:
    """Return one conversation in the mesh's lengths, with recorded times. It ends before SEQUENCE_TOKENS_MAX."""
    turns: list[Turn] = []
    held = 0
    for record in records:
        fresh = max(FRESH_MIN, record.prompt_tokens // FACTOR - held)
        output = max(1, record.output_tokens // FACTOR)
        held += fresh + output
        if SYSTEM_TOKENS + held > SEQUENCE_TOKENS_MAX:
            break
        turns.append(Turn(record.at_s, fresh, output))
    return turns


def plan(records: Sequence[Record], count: int, load: float, replicas: int) -> Plan:
    """Return up to `count` conversations, spread over the whole trace.

    They are sped up so that their prefill work, with perfect reuse, is `load` of the capacity of `replicas`.
    """
    known = (turns for turns in map(turns_of, recorded(records)) if len(turns) >= TURNS_MIN)
    usable = [turns for turns in known if len({turn.at_s for turn in turns}) == len(turns)]
    chosen = [usable[len(usable) * number // count] for number in range(min(count, len(usable)))]
    begin_s = min(turns[0].at_s for turns in chosen)
    span_s = max(turns[-1].at_s for turns in chosen) - begin_s
    speed = load * replicas * span_s / sum(map(work_s, chosen))
    return Plan([[turn._replace(at_s=(turn.at_s - begin_s) / speed) for turn in turns] for turns in chosen])


def work_s(turns: Sequence[Turn]) -> float:
    """Return the prefill seconds of a conversation with perfect reuse."""
    totals = []
    held = SYSTEM_TOKENS
    for turn in turns:
        totals.append(held + turn.fresh_tokens)
        held += turn.fresh_tokens + turn.output_tokens
    known = [SYSTEM_TOKENS, *totals[:-1]]
    return sum(
        COST.seconds(total - before // BLOCK_TOKENS * BLOCK_TOKENS, total)
        for before, total in zip(known, totals, strict=True)
    )
