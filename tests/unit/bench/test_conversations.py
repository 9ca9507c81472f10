"""Conversations: made from a trace, played in order, with figures that can be computed by hand."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import conversations
from bench.conversation_figures import fitted, imbalance, kept, reuse, simulated, trace_lines
from bench.conversation_player import Blocks, PlayedTurn, Player, Reply
from bench.conversations import BLOCK_TOKENS, COST, FACTOR, FRESH_MIN, SYSTEM_TOKENS, Record, Turn
from bench.results import Aim
from simulator import trace
from simulator.cost import Cost

SIMPLE = Cost("simple", 0.0, 0.001, 0.0)


def turn(
    conversation: int,
    number: int,
    sent_s: float,
    tokens: int,
    cached: int,
    replica: str,
    blocks: Sequence[int],
) -> PlayedTurn:
    """Return a turn that went well."""
    return PlayedTurn(conversation, number, sent_s, 0.1, "", tokens, cached, replica, 0.1, list(blocks))


HAND = [
    turn(0, 0, 0.0, 70, 0, "a", [1, 2]),  # nothing known
    turn(1, 0, 1.0, 70, 32, "b", [1, 3]),  # could hit 1, hits it
    turn(0, 1, 2.0, 100, 32, "b", [1, 2, 4]),  # could hit 2, hits 1: moved and lost a block
    turn(1, 1, 3.0, 70, 64, "a", [1, 3]),  # moved, but lost nothing
    turn(1, 2, 4.0, 64, 32, "a", [1, 3]),  # its last token is computed: could hit 1
]
"""Two conversations on two replicas. Blocks of 32 tokens."""


def test_the_figures_of_a_small_case_are_those_computed_by_hand() -> None:
    """Reuse 1 + 1 + 2 + 1 of 1 + 2 + 2 + 1 blocks; work 70 + 6 + 32 tokens at a, 38 + 68 at b."""
    seen = reuse(reversed(HAND))
    assert (seen.hit, seen.possible, seen.blocks) == (5, 6, 3 + 3 + 4 + 3 + 2)
    assert seen.share == pytest.approx(5 / 6) and seen.ratio == pytest.approx(1 / 3)
    assert seen.ratio_max == pytest.approx(6 / 15)
    assert imbalance(HAND, ["a", "b"], SIMPLE) == pytest.approx(108 / 107)
    assert imbalance(HAND, ["a", "b", "idle", "idle too"], SIMPLE) == pytest.approx(108 / 53.5)
    assert imbalance([], ["a"], SIMPLE) == 0.0


def test_a_turn_keeps_affinity_at_its_replica_or_with_all_its_blocks() -> None:
    """One of three later turns went to another replica and lost blocks."""
    assert kept((), HAND) == (2, 3)
    assert kept(HAND[:2], HAND[2:]) == (2, 3)
    assert kept((), HAND[:2]) == (0, 0)


def test_the_trace_of_played_turns_shows_shared_blocks(tmp_path: Path) -> None:
    """The simulator reads it; no two prompts share a partial block, and one replica hits what could be hit."""
    path = tmp_path / "played.jsonl"
    path.write_text("".join(trace_lines(HAND)), encoding="utf-8")
    read = trace.read(path, BLOCK_TOKENS)
    assert [one.blocks for one in read.records] == [
        (1, 2, 5),
        (1, 3, 6),
        (1, 2, 4, 7),
        (1, 3, 8),
        (1, 3),
    ]
    assert [one.timestamp_ms for one in read.records] == [0, 1000, 2000, 3000, 4000]
    alone = simulated(HAND, path, replicas=1, routers=1, cache_blocks=100, cost=SIMPLE)
    assert alone.hit == pytest.approx((0 + 1 + 2 + 2 + 2) / 15) and alone.imbalance == 1.0


def test_the_cost_is_fitted_to_what_prompts_took() -> None:
    """Other prompts cost by the fit what they cost by the law that made the first ones."""
    draw = random.Random(1)
    taken = []
    for number in range(200):
        total = draw.randrange(64, 4000)
        cached = draw.randrange(0, total) // BLOCK_TOKENS * BLOCK_TOKENS
        taken.append(
            turn(number, 0, number, total, cached, "a", [])._replace(
                prefill_s=COST.seconds(total - cached, total)
            )
        )
    found = fitted(taken)
    for uncached, total in ((100, 100), (100, 4000), (3000, 4000)):
        assert found.seconds(uncached, total) == pytest.approx(COST.seconds(uncached, total), rel=0.1)


def test_a_trace_becomes_conversations_that_only_grow() -> None:
    """Every recorded conversation keeps its order and its lengths, as far as turns grow by something."""
    records = conversations.read()
    plan = conversations.plan(records, 60, 0.6, 4)
    assert len(plan.conversations) == 60
    for turns in plan.conversations:
        assert len(turns) >= conversations.TURNS_MIN
        assert all(before.at_s < after.at_s for before, after in itertools.pairwise(turns))
        assert all(one.fresh_tokens >= FRESH_MIN and one.output_tokens >= 1 for one in turns)
        assert SYSTEM_TOKENS + sum(one[1] + one[2] for one in turns) <= conversations.SEQUENCE_TOKENS_MAX
    work_s = sum(map(conversations.work_s, plan.conversations))
    assert work_s / 4 / plan.span_s == pytest.approx(0.6)
    assert plan == conversations.plan(records, 60, 0.6, 4)


def test_rows_that_share_more_than_the_first_block_are_one_conversation() -> None:
    """The first block is the system prompt's. A row continues the conversation that last used its deepest known block."""
    rows = [
        Record(0.0, 1000, 160, (0, 1)),
        Record(1.0, 1000, 160, (0, 2)),
        Record(2.0, 2000, 160, (0, 1, 3, 4)),
        Record(3.0, 1100, 32, (0, 1, 5)),
    ]
    first, second = conversations.recorded(rows)
    assert [one.at_s for one in first] == [0.0, 2.0, 3.0] and second == [rows[1]]
    assert conversations.turns_of(first) == [
        Turn(0.0, 1000 // FACTOR, 10),
        Turn(2.0, 2000 // FACTOR - 1000 // FACTOR - 10, 10),
        Turn(3.0, FRESH_MIN, 2),
    ]


def test_equal_ids_mean_equal_tokens_up_to_the_end_of_the_block() -> None:
    """A block behind another one is another block; a partial one has no id."""
    blocks: Blocks[str] = Blocks()
    one, two = ["x"] * BLOCK_TOKENS, ["y"] * BLOCK_TOKENS
    assert blocks.of([*one, *two, "z"]) == [1, 2]
    assert blocks.of([*one, *one]) == [1, 3]
    assert blocks.of([*two]) == [4]
    assert blocks.of(one[1:]) == []


class Echo:
    """Implements Asker: answers at once with words of its own, and holds what was sent."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self.fails = False

    def fresh(self, count: int, draw: random.Random) -> list[str]:
        """See Asker."""
        return [f"{draw.getrandbits(32):08x}" for _ in range(count)]

    def prompt(self, said: Sequence[Sequence[str]]) -> list[str]:
        """See Asker."""
        return [token for part in said for token in part]

    async def ask(self, said: Sequence[Sequence[str]], output_tokens: int) -> Reply[str]:
        """See Asker."""
        self.sent.append(self.prompt(said))
        await asyncio.sleep(0)
        if self.fails:
            return Reply(error="LOST")
        return Reply([f"answer{index}" for index in range(output_tokens)], 0.01, replica="a")


async def test_each_turn_repeats_all_messages_and_answers() -> None:
    """Turns of a conversation are prefixes of each other, all begin with one system prompt, and pauses lose nothing."""
    backend = Echo()
    plan = [[Turn(0.01 * (number + step), 40, 3) for step in range(4)] for number in range(3)]
    player = Player(backend, plan, 1)
    first = await player.play(0.025)
    second = await player.play(1.0)
    assert 0 < len(first) < 12 and len(first) + len(second) == 12
    assert max(one.sent_s for one in first) <= min(one.sent_s for one in second)
    assert len({tuple(prompt[:SYSTEM_TOKENS]) for prompt in backend.sent}) == 1
    for number in range(3):
        mine = sorted(
            (one for one in [*first, *second] if one.conversation == number), key=lambda one: one.turn
        )
        assert [one.prompt_tokens for one in mine] == [SYSTEM_TOKENS + 40 + 43 * step for step in range(4)]
        assert all(
            after.blocks[: len(before.blocks)] == before.blocks for before, after in itertools.pairwise(mine)
        )
    assert len({block for one in [*first, *second] for block in one.blocks}) > len(mine[-1].blocks)


async def test_a_conversation_ends_where_an_answer_is_lost() -> None:
    """Later turns would need the unknown answer."""
    backend = Echo()
    backend.fails = True
    taken = await Player(backend, [[Turn(0.0, 40, 3), Turn(0.0, 40, 3)]], 1).play(1.0)
    assert [one.error for one in taken] == ["LOST"]


def test_an_aim_may_be_a_least_value() -> None:
    """Reuse should be large, cost small."""
    assert Aim(0.87, is_least=True).is_met(0.9) and not Aim(0.87, is_least=True).is_met(0.8)
    assert Aim(1.3).is_met(1.2) and not Aim(1.3).is_met(1.4)
