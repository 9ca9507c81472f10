"""Conversations under routers: the mock worker's cache and time, the client over a real connection, the page."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from bench.conversation_player import PlayedTurn, Player
from bench.conversations import BLOCK_TOKENS, SYSTEM_TOKENS, Turn
from bench.peers import chat, conversations_page
from bench.peers.caching_worker import CachingWorker, words_of
from bench.peers.chat_conversations import ChatBackend, messages
from bench.peers.conversations import judge
from bench.peers.conversations_page import BEGIN, END, About, ConversationRecord
from bench.results import BenchError
from simulator.cost import Cost

FREE = Cost("free", 0.0, 1e-9, 0.0)


def asked(words: int, seed: int = 1) -> dict[str, list[chat.Message]]:
    """Return a request with a prompt of `words` tokens, the role included."""
    draw = random.Random(seed)
    text = " ".join(f"{draw.getrandbits(24):06x}" for _ in range(words - 1))
    return {"messages": [{"role": "user", "content": text}]}


async def cached(worker: CachingWorker, words: int, seed: int = 1) -> int:
    """Return how many tokens of a prompt the worker found in cache."""
    used = await worker.compute(asked(words, seed), 1)
    assert used["prompt_tokens"] == words
    found = used["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(found, int)
    return found


async def test_the_worker_finds_full_blocks_and_computes_the_last_token() -> None:
    """Computed blocks are found again, up to the block of the last token."""
    worker = CachingWorker("worker-0", 0.0, 100, FREE)
    assert await cached(worker, 100) == 0
    assert await cached(worker, 100) == 96
    assert await cached(worker, 96) == 64
    assert await cached(worker, 200) == 96
    assert await cached(worker, 100, seed=2) == 0


async def test_the_worker_evicts_the_least_recently_used_blocks() -> None:
    """Four blocks hold the last prompts, not the first."""
    worker = CachingWorker("worker-0", 0.0, 4, FREE)
    for seed in (1, 2, 3):
        await cached(worker, 2 * BLOCK_TOKENS + 1, seed)
    assert await cached(worker, 2 * BLOCK_TOKENS + 1, 2) == 2 * BLOCK_TOKENS
    assert await cached(worker, 2 * BLOCK_TOKENS + 1, 1) == 0


async def test_prompts_take_their_time_one_after_another() -> None:
    """Three prompts at once take as long as their uncached tokens in all; a known one costs its rest alone."""
    worker = CachingWorker("worker-0", 0.0, 100, Cost("slow", 0.0, 0.001, 0.0))
    now = asyncio.get_running_loop().time
    began_s = now()
    found = await asyncio.gather(cached(worker, 65), cached(worker, 65, 2), cached(worker, 65))
    assert sorted(found) == [0, 0, 64]
    assert now() - began_s >= 0.130


@pytest.mark.parametrize(("order", "then"), [("fifo", [500, 100, 40]), ("shortest", [500, 40, 100])])
async def test_waiting_prompts_go_in_the_order_of_the_worker(order: str, then: list[int]) -> None:
    """The first one computes; of two that wait the shorter one goes first if it is said so."""
    worker = CachingWorker("worker-0", 0.0, 100, Cost("slow", 0.0, 0.0001, 0.0), order)
    ended: list[int] = []

    async def send(words: int) -> None:
        await worker.compute(asked(words, words), 1)
        ended.append(words)

    await asyncio.gather(*map(send, (500, 100, 40)))
    assert ended == then


def test_roles_alternate_behind_the_system_prompt() -> None:
    """Conversations become messages, and messages the tokens that a worker counts."""
    said = [["be", "kind"], ["hi"], ["tok0"], ["and", "now"]]
    told = messages(said)
    assert [one["role"] for one in told] == ["system", "user", "assistant", "user"]
    assert words_of(told) == [
        "<system>",
        "be",
        "kind",
        "<user>",
        "hi",
        "<assistant>",
        "tok0",
        "<user>",
        "and",
        "now",
    ]


async def test_a_conversation_over_http_finds_its_former_turn_again() -> None:
    """With one worker all possible hits are hits, and the client knows the worker and the cached tokens."""
    made = CachingWorker("worker-7", 0.001, 1000, FREE)
    async with await made.serve(0) as server:
        backend = ChatBackend(server.sockets[0].getsockname()[1])
        plan = [[Turn(0.0, 50, 3), Turn(0.0, 70, 2), Turn(0.0, 40, 1)] for _ in range(2)]
        taken = await Player(backend, plan, 1).play(1.0)
        backend.close()
    assert not [one.error for one in taken if one.error]
    assert {one.replica for one in taken} == {"worker-7"}
    lengths = [one.prompt_tokens for one in taken if one.conversation == 0]
    assert lengths == [SYSTEM_TOKENS + 50 + 2, SYSTEM_TOKENS + 50 + 3 + 70 + 4, SYSTEM_TOKENS + 165 + 6]
    figures = judge(taken, ["worker-7"])
    assert (figures.turns, figures.failed, figures.kept, figures.imbalance) == (6, 0, 1.0, 1.0)
    assert figures.reuse > 0.9 and figures.hit <= figures.hit_max


def test_a_run_without_an_answer_is_no_figure() -> None:
    """A router that serves nothing is a problem, not a row of zeros."""
    with pytest.raises(BenchError, match="no request had a first token"):
        judge([PlayedTurn(0, 0, 0.0, None, "connection cut", 100, 0, "", 0.0, [1])], ["a"])


def test_the_section_is_put_behind_the_page_and_later_in_its_own_place() -> None:
    """The rest of the page stays as it is; a cell is the median and the extremes."""
    good = judge([PlayedTurn(0, 0, 0.0, 0.5, "", 64, 0, "a", 0.0, [1, 2])], ["a"])
    machine = {"date": "today", "commit": "abc", "load": "1"}
    record = ConversationRecord("command", machine, About(1, 1, 10.0, 0.6))
    for share in (0.5, 0.9, 0.8):
        record.add("kvmesh", "abc", "its own", replace(good, reuse=share))
    page = conversations_page.put("# Page\n\nnotes\n", record)
    assert "| kvmesh abc | its own | 3 | 1 | 0 | 0.800 [0.500..0.900] |" in page
    assert page.startswith("# Page\n\nnotes\n\n" + BEGIN) and page.endswith(END + "\n")
    again = conversations_page.put(page.replace("its own", "another") + "\nbehind\n", record)
    assert again == page + "\nbehind\n"
