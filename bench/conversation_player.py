"""Plays conversations: a turn sends all earlier messages and a new one.

Each conversation is a closed loop: a turn is sent at its time, but not before the previous turn was answered.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from bench.conversations import BLOCK_TOKENS, SYSTEM_TOKENS, Turn
from bench.loop_watch import LoopWatch

Token = TypeVar("Token")
"""A token id, or a word."""

WARM_LENGTHS: Final = tuple(64 + 120 * number for number in range(12))


WATCH_S: Final = 0.1


class PlayedTurn(NamedTuple):
    """The outcome of one turn."""

    conversation: int
    turn: int
    sent_s: float
    """Seconds of play before the turn was sent. Pauses between two plays do not count."""
    ttft_s: float | None
    error: str
    """Empty: the turn succeeded."""
    prompt_tokens: int
    cached_tokens: int
    replica: str
    """The replica that computed the prompt."""
    prefill_s: float
    """Prefill time at that replica; 0: unknown."""
    blocks: list[int]
    """An id per full block of the prompt. The id stands for all tokens up to the block's end."""


@dataclass(slots=True)
class Reply(Generic[Token]):
    """The answer to one prompt."""

    tokens: list[Token] = field(default_factory=list)
    ttft_s: float | None = None
    error: str = ""
    cached_tokens: int = 0
    replica: str = ""
    prefill_s: float = 0.0


class Backend(Protocol[Token]):
    """The client side of a system that serves conversations."""

    def fresh(self, count: int, draw: random.Random) -> list[Token]:
        """Return the tokens of a new message."""
        ...

    def prompt(self, said: Sequence[Sequence[Token]]) -> list[Token]:
        """Return the tokens of the prompt that workers cut into blocks.

        `said`: the messages of system, user, assistant, user, and so on.
        """
        ...

    async def ask(self, said: Sequence[Sequence[Token]], output_tokens: int) -> Reply[Token]:
        """Send the messages and read the answer to its end. Errors of the system are part of the reply."""
        ...


class Blocks(Generic[Token]):
    """Numbers the blocks of prompts: equal ids mean equal tokens up to the block's end."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, tuple[Token, ...]], int] = {}

    def of(self, tokens: Sequence[Token]) -> list[int]:
        """Return the ids of the full blocks of `tokens`, from 1."""
        ids: list[int] = []
        parent = 0
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            key = parent, tuple(tokens[end - BLOCK_TOKENS : end])
            parent = self._ids.setdefault(key, len(self._ids) + 1)
            ids.append(parent)
        return ids


class Player(Generic[Token]):
    """Holds the messages of each conversation, over several plays."""

    def __init__(self, backend: Backend[Token], plan: Sequence[Sequence[Turn]], seed: int) -> None:
        self._backend = backend
        self._plan = plan
        self._draws = [random.Random(f"{seed}/{number}") for number in range(len(plan))]
        system = backend.fresh(SYSTEM_TOKENS, random.Random(f"{seed}/system"))
        self._said: list[list[list[Token]]] = [[system] for _ in plan]
        self._next = [0] * len(plan)
        self._blocks: Blocks[Token] = Blocks()
        self._clock_s = 0.0
        """Time at which the next play begins, on the plan's clock."""
        self.watch = LoopWatch(WATCH_S)
        """Measures stalls of this event loop. Figures of a stalled play say little of the system."""

    async def warm(self, seed: int) -> int:
        """Send single prompts of several lengths, so that a system learns their cost. Return how many failed."""
        draw = random.Random(f"{seed}/warm")
        failed = 0
        for _ in range(3):
            said = [
                [self._backend.fresh(8, draw), self._backend.fresh(count, draw)] for count in WARM_LENGTHS
            ]
            replies = await asyncio.gather(*(self._backend.ask(one, 1) for one in said))
            failed += sum(bool(reply.error) for reply in replies)
        return failed

    async def play(self, until_s: float) -> list[PlayedTurn]:
        """Send all unsent turns that are due before `until_s`. Return them when all are answered."""
        began_s = asyncio.get_running_loop().time() - self._clock_s
        taken: list[PlayedTurn] = []
        watching = asyncio.create_task(self.watch.run())
        async with asyncio.TaskGroup() as group:
            for number in range(len(self._plan)):
                group.create_task(self._converse(number, until_s, began_s, taken))
        watching.cancel()
        self._clock_s = max(self._clock_s, asyncio.get_running_loop().time() - began_s)
        return sorted(taken, key=lambda one: one.sent_s)

    async def _converse(self, number: int, until_s: float, began_s: float, taken: list[PlayedTurn]) -> None:
        now = asyncio.get_running_loop().time
        turns, said = self._plan[number], self._said[number]
        while self._next[number] < len(turns) and turns[self._next[number]].at_s < until_s:
            turn = turns[self._next[number]]
            await asyncio.sleep(max(0.0, began_s + turn.at_s - now()))
            said.append(self._backend.fresh(turn.fresh_tokens, self._draws[number]))
            prompt = self._backend.prompt(said)
            sent_s = now() - began_s
            reply = await self._backend.ask(said, turn.output_tokens)
            said.append(reply.tokens)
            row: tuple[Any, ...] = (reply.ttft_s, reply.error, len(prompt), reply.cached_tokens)
            row += (reply.replica, reply.prefill_s, self._blocks.of(prompt))
            taken.append(PlayedTurn(number, self._next[number], sent_s, *row))
            self._next[number] += 1
            if reply.error:  # the answer is unknown: the conversation ends here
                self._next[number] = len(turns)
