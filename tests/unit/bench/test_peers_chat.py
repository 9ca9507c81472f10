"""The client's check of a chat stream: only the whole answer counts as done."""

from __future__ import annotations

import random

import pytest

from bench.peers import chat
from bench.peers.streams import Outcome

TOKENS = 12


def whole(tokens: int = TOKENS) -> list[bytes]:
    """Return the events of a right answer."""
    events = [chat.chunk("worker-1", chat.token_text(position)) for position in range(tokens)]
    return [*events, chat.chunk("worker-1", None, "length"), chat.event(chat.DONE)]


def judged(body: bytes, draw: random.Random | None = None, cut: str = "") -> chat.Answer:
    """Feed `body` in pieces of random sizes, or whole."""
    answer = chat.Answer(TOKENS)
    while body:
        size = draw.randint(1, 200) if draw else len(body)
        answer.feed(body[:size])
        body = body[size:]
    answer.verdict(cut)
    return answer


@pytest.mark.parametrize("seed", range(20))
def test_a_whole_answer_is_done_however_it_is_cut_into_pieces(seed: int) -> None:
    """Pieces of the network are no pieces of the answer; comments and CRLF are allowed."""
    draw = random.Random(seed)
    events = whole()
    events.insert(draw.randrange(len(events)), b": keepalive\n\n")
    body = b"".join(events)
    answer = judged(body.replace(b"\n", b"\r\n") if seed % 2 else body, draw)
    assert answer.verdict() == (Outcome.DONE, "")
    assert (answer.token_count, answer.worker) == (TOKENS, "worker-1")


@pytest.mark.parametrize("seed", range(40))
def test_an_answer_cut_anywhere_is_lost(seed: int) -> None:
    """A stream with a missing end is not done, with or without an error of the connection."""
    draw = random.Random(seed)
    body = b"".join(whole())
    kept = body[: draw.randrange(len(body) - 1)]
    assert judged(kept, draw).verdict()[0] is Outcome.LOST
    assert judged(body, draw).verdict("connection cut")[0] is Outcome.LOST


@pytest.mark.parametrize("seed", range(40))
def test_a_token_missing_repeated_or_swapped_is_seen(seed: int) -> None:
    """The order and the number of tokens are checked, not their sum."""
    draw = random.Random(seed)
    events = whole()
    at = draw.randrange(TOKENS - 1)
    match seed % 4:
        case 0:
            del events[at]
        case 1:
            events.insert(at, events[at])
        case 2:
            events[at], events[at + 1] = events[at + 1], events[at]
        case 3:
            events[at] = chat.chunk("worker-1", "tok99 ")
    assert judged(b"".join(events), draw).verdict()[0] is Outcome.WRONG


def test_an_early_end_an_error_event_and_a_token_too_many_are_told_apart() -> None:
    """Each way to end badly has its own words."""
    early = [*whole()[:5], chat.event(chat.DONE)]
    assert judged(b"".join(early)).verdict() == (Outcome.LOST, "ended with [DONE] before the last token")
    error = [*whole()[:5], chat.event('{"error": {"message": "worker gone"}}'), chat.event(chat.DONE)]
    assert judged(b"".join(error)).verdict() == (Outcome.LOST, "error event")
    beyond = whole(TOKENS + 1)
    assert judged(b"".join(beyond)).verdict() == (Outcome.WRONG, "a token beyond the last")
    behind = [*whole(), whole()[0]]
    assert judged(b"".join(behind)).verdict() == (Outcome.WRONG, "an event behind [DONE]")
    unfinished = [*whole()[:TOKENS], chat.event(chat.DONE)]
    assert judged(b"".join(unfinished)).verdict() == (Outcome.LOST, "finish reason missing")
