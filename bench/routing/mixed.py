"""Makes the generated trace `mixed`, many short prompts and few long ones: `python -m bench.routing.mixed FILE`.

Requests arrive by a Poisson process, 10 a second. 94 of 100 are turns of chats. A chat begins with one of 24 system
prompts (Zipf popularity, 512 to 2,048 tokens). Each turn adds 300 tokens in the median to its history. The other 6
carry a document of 12,000 to 110,000 tokens, 30,000 in the median. 4 of 10 of these ask again about one of the last 20
documents. The same seed gives the same trace.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import sys
from pathlib import Path
from typing import Final

from simulator.trace import BLOCK_TOKENS, Record, Trace

REQUESTS: Final = 6000
RATE_PER_S: Final = 10.0
LONG_SHARE: Final = 0.06
APPLICATIONS: Final = 24
CHATS: Final = 300
CHAT_ENDS: Final = 0.2
CHAT_TOKENS_MAX: Final = 8000
TURN_MEDIAN, TURN_SIGMA = 300, 1.0
REPLY_TOKENS: Final = 200
DOCUMENT_MEDIAN, DOCUMENT_SIGMA = 30_000, 0.6
DOCUMENT_SPAN: Final = (12_000, 110_000)
DOCUMENTS: Final = 20
ASKED_AGAIN: Final = 0.4
QUESTION_TOKENS: Final = 100
SEED: Final = 7


class _Ids:
    """A source of unique block ids."""

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


class _Text:
    """A growing text. Full blocks keep their ids; a partial block gets a new id with every growth."""

    def __init__(self, ids: _Ids, tokens: int, blocks: list[int] | None = None) -> None:
        self._ids = ids
        self._blocks = blocks or []
        self.tokens = tokens

    def prompt(self, more: int) -> tuple[int, tuple[int, ...]]:
        """Append `more` tokens, and return the length and the block ids."""
        self.tokens += more
        full = self.tokens // BLOCK_TOKENS
        self._blocks += self._ids.fresh(full - len(self._blocks))
        rest = self._ids.fresh(1) if self.tokens % BLOCK_TOKENS else []
        return self.tokens, (*self._blocks, *rest)


def mixed(requests: int = REQUESTS, seed: int = SEED) -> Trace:
    """Return the trace."""
    rng, ids = random.Random(seed), _Ids()
    systems = [ids.fresh(rng.randint(1, 4)) for _ in range(APPLICATIONS)]
    popularity = [1 / (rank + 1) for rank in range(APPLICATIONS)]

    def chat() -> _Text:
        system = rng.choices(systems, popularity)[0]
        return _Text(ids, len(system) * BLOCK_TOKENS, list(system))

    chats = [chat() for _ in range(CHATS)]
    documents: list[_Text] = []
    records, at_ms = [], 0.0
    for _ in range(requests):
        at_ms += rng.expovariate(RATE_PER_S) * 1000
        if rng.random() < LONG_SHARE:
            if not documents or rng.random() >= ASKED_AGAIN:
                tokens = _lognormal(rng, DOCUMENT_MEDIAN, DOCUMENT_SIGMA)
                low, high = DOCUMENT_SPAN
                documents = [*documents, _Text(ids, max(low, min(high, tokens)))][-DOCUMENTS:]
                text = documents[-1]
            else:
                text = rng.choice(documents)
            prompt = text.prompt(QUESTION_TOKENS)
        else:
            index = rng.randrange(CHATS)
            if rng.random() < CHAT_ENDS or chats[index].tokens > CHAT_TOKENS_MAX:
                chats[index] = chat()
            prompt = chats[index].prompt(max(1, _lognormal(rng, TURN_MEDIAN, TURN_SIGMA)))
            chats[index].tokens += REPLY_TOKENS
        records.append(Record(float(round(at_ms)), *prompt))
    return Trace("mixed", BLOCK_TOKENS, tuple(records))


def _lognormal(rng: random.Random, median: float, sigma: float) -> int:
    return round(rng.lognormvariate(math.log(median), sigma))


def write(trace: Trace, path: Path) -> None:
    """Write `trace` to `path` in the Mooncake format, gzip-compressed. Equal traces give equal bytes."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    with path.open("wb") as raw, gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as file:
        for one in trace.records:
            row = (round(one.timestamp_ms), one.input_tokens, REPLY_TOKENS, list(one.blocks))
            file.write(json.dumps(dict(zip(names, row, strict=True))).encode() + b"\n")


if __name__ == "__main__":
    write(mixed(), Path(sys.argv[1]))
