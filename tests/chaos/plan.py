"""The plan of one run, drawn from its seed alone: the target, and every stream with its prompt and its times. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from tests.chaos.cells import DOWN_S, FAULT_S, LINK, LINKED, MACHINE, Cell, Run

STREAMS: Final = (16, 64)
PROMPT_TOKENS: Final = (20, 1500)
CANCELLED: Final = 0.15
WITH_DEADLINE: Final = 0.10
PLAIN: Final = 0.2
"""Share of streams read by a plain gRPC client, which cannot go to another frontend."""

GREEDY: Final = 0.4
SHARED: Final = 0.4
"""Share of prompts with a shared beginning."""

ARRIVE_S: Final = 1.5
"""Streams from before the fault arrive within this time."""

BEFORE, DURING, AFTER = "before", "during", "after"
PHASES: Final = ((BEFORE, 0.6), (DURING, 0.25), (AFTER, 0.15))
"""Arrival of streams: before the fault, while the part is unavailable, after its return."""

OUTPUT_TOKENS: Final = {BEFORE: (60, 260), DURING: (40, 160), AFTER: (20, 80)}
"""At some 20 tokens a second the first streams last 3 to 13 s. Most of them still run when the fault is detected, and many
when it is over. The other streams only have to overlap with it."""

FIRST_TOKEN_ID: Final = 16
VOCABULARY: Final = 4096


@dataclass(frozen=True, slots=True)
class Stream:
    """One request and the plan of its client."""

    number: int
    phase: str
    offset_s: float
    """Time of sending, in seconds after the start of its phase."""
    prompt: tuple[int, ...]
    max_output_tokens: int
    seed: int
    temperature: float
    top_k: int
    is_plain: bool
    frontend: int
    """Frontend of a plain client, and the first one of a resuming client."""
    cancel_s: float | None = None
    """The client cancels this long after it sent the request."""
    deadline_s: float | None = None
    """The client's own deadline."""
    session: str = ""
    """Session id. Empty: none, so that each request chooses its pool anew."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run: the target, the time of the fault, and the streams in the order of their numbers."""

    run: Run
    target: str
    """Name of the target process, for example "prefill-1-engine"."""
    delay_s: float
    """Time from the first phase, which takes ARRIVE_S, to the fault."""
    away_s: float
    """Duration of the fault, or of the absence of the part."""
    streams: tuple[Stream, ...]
    peer: str | None = None
    """The only part from which the target is cut off; None: the fault is between it and all others."""


def plan_of(run: Run, fault_s: float = FAULT_S) -> Plan:
    """Return the plan of `run`: the same run has the same plan."""
    rng = random.Random(f"{run.cell} {run.seed}")
    replica = rng.randrange(2)
    away_s = DOWN_S if run.cell.ends_the_part else fault_s
    shared = shared_beginnings(rng)
    count = rng.randint(*STREAMS)
    streams = tuple(_stream(rng, number, away_s, shared) for number in range(count))
    delay_s = rng.uniform(0.2, 1.5)
    return Plan(
        run, target_of(run.cell.part, replica), delay_s, away_s, streams, peer_of(run.cell, rng.randrange(2))
    )


def target_of(part: str, replica: int) -> str:
    """Return the name of the process, or of a machine."""
    if part == "redis":
        return part
    role, dash, suffix = part.partition("-")
    return f"{role}-{replica}{dash}{suffix}"


def members_of(target: str) -> tuple[str, ...]:
    """Return the processes of a target: those of a machine are the engine and the service of a replica."""
    replica = target.removesuffix(f"-{MACHINE}")
    return (target,) if replica == target else (f"{replica}-engine", replica)


def replica_of(target: str) -> str:
    """Return the service that uses the target: a replica itself, of its engine, or of its machine."""
    return target.removesuffix("-engine").removesuffix(f"-{MACHINE}")


def peer_of(cell: Cell, replica: int) -> str | None:
    """Return the name of the only process from which the target is cut off; None without such a process."""
    return target_of(LINKED[cell.part], replica) if cell.fault == LINK else None


def probe_of(run: Run, number: int, frontend: int) -> Stream:
    """Return a small request that probes for the returned part: its prompt is new, and too long for decode alone."""
    rng = random.Random(f"{run.cell} {run.seed} probe {number}")
    return Stream(
        number=number,
        phase=AFTER,
        offset_s=0.0,
        prompt=_tokens(rng, 130),
        max_output_tokens=2,
        seed=rng.getrandbits(62),
        temperature=1.0,
        top_k=0,
        is_plain=True,
        frontend=frontend,
    )


def shared_beginnings(rng: random.Random) -> list[tuple[int, ...]]:
    """Return shared beginnings of prompts."""
    return [_tokens(rng, rng.randint(64, 1000)) for _ in range(3)]


def stream_of(
    rng: random.Random,
    number: int,
    phase: str,
    shared: list[tuple[int, ...]],
    *,
    offset_s: float = 0.0,
    is_plain: bool,
) -> Stream:
    """Draw a stream."""
    cancel_s = rng.uniform(0.02, 8.0) if rng.random() < CANCELLED else None
    deadline_s = rng.uniform(0.5, 8.0) if rng.random() < WITH_DEADLINE else None
    is_greedy = rng.random() < GREEDY
    return Stream(
        number=number,
        phase=phase,
        offset_s=offset_s,
        prompt=_prompt(rng, shared),
        max_output_tokens=rng.randint(*OUTPUT_TOKENS[phase]),
        seed=rng.getrandbits(62),
        temperature=0.0 if is_greedy else rng.choice((1.0, 0.5)),
        top_k=0 if is_greedy else rng.choice((0, 8)),
        is_plain=is_plain,
        frontend=rng.randrange(2),
        cancel_s=cancel_s,
        deadline_s=deadline_s,
    )


def _stream(rng: random.Random, number: int, away_s: float, shared: list[tuple[int, ...]]) -> Stream:
    phase = rng.choices([name for name, _ in PHASES], [share for _, share in PHASES])[0]
    offset_s = rng.uniform(0.0, {BEFORE: ARRIVE_S, DURING: away_s, AFTER: 1.0}[phase])
    return stream_of(rng, number, phase, shared, offset_s=offset_s, is_plain=rng.random() < PLAIN)


def _prompt(rng: random.Random, shared: list[tuple[int, ...]]) -> tuple[int, ...]:
    low, high = PROMPT_TOKENS
    # As many of 20 to 80 tokens as of 400 to 1,500: uniform lengths would nearly all be long.
    length = round(low * (high / low) ** rng.random())
    if rng.random() >= SHARED:
        return _tokens(rng, length)
    beginning = rng.choice(shared)[: max(0, length - 8)]
    return beginning + _tokens(rng, length - len(beginning))


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_TOKEN_ID, VOCABULARY) for _ in range(count))
