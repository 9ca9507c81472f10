"""Prompts of the exactness runs: 1 to 2,000 tokens, median near 200, shared prefixes, all of Unicode."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer

from kvmesh.inference.v1 import inference_pb2 as pb

LONGEST = 2000

_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "a",
    "in",
    "was",
    "her",
    "she",
    "had",
    "not",
    "with",
    "his",
    "he",
    "that",
    "as",
    "for",
    "it",
    "be",
    "but",
    "at",
    "him",
    "very",
    "so",
    "by",
    "on",
    "have",
    "which",
    "all",
    "they",
    "were",
    "from",
    "no",
    "been",
    "this",
    "when",
    "could",
    "if",
    "would",
    "them",
    "any",
    "there",
    "more",
    "than",
    "said",
    "mother",
    "sister",
    "morning",
    "letter",
    "walk",
    "house",
    "happy",
    "before",
    "after",
    "never",
    "always",
    "every",
    "much",
    "little",
    "great",
    "young",
    "evening",
    "friend",
    "answer",
    "heart",
    "mind",
    "love",
    "half",
    "hour",
]
_UNICODE = "äöüß ñ é 漢字かな交じり文 한국어 Привет мир العربية עברית ไทย 🦊🚀👩‍👩‍👧 \u0301\u200d ∑∫√ 𝔘𝔫𝔦 \x00\x07\ufffd"


@dataclass(frozen=True)
class Case:
    """One request and the token ids of its prompt."""

    ids: list[int]
    request: pb.GenerateRequest


def cases(tokenizer: Tokenizer, count: int, seed: int, *, longest: int = LONGEST) -> Iterator[Case]:
    """Yield `count` cases; deterministic for the same arguments."""
    rng = random.Random(seed)
    stems = [_prose(rng, tokenizer, rng.randint(70, 300)) for _ in range(4)]
    for index in range(count):
        # The first two are the limits; the others are spread log-evenly around a median of 200.
        length = (
            (1, longest)[index] if index < 2 else min(longest, max(1, round(rng.lognormvariate(5.3, 1.0))))
        )
        text = _text(rng) if rng.random() < 0.2 else None
        if text is not None and index >= 2:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            request = pb.GenerateRequest(text=text)
        else:
            stem = rng.choice(stems) if rng.random() < 0.6 else []
            ids = (stem + _prose(rng, tokenizer, length))[:length]
            request = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=ids))
        request.limits.max_output_tokens = rng.randint(20, 60)
        request.sampling.seed = rng.getrandbits(64)
        if rng.random() < 0.4:
            request.sampling.temperature = 0.0
        else:
            request.sampling.temperature = rng.choice((0.5, 0.8, 1.0, 1.3))
            request.sampling.top_p = rng.choice((1.0, 0.95, 0.7))
            request.sampling.top_k = rng.choice((0, 0, 40, 5))
        yield Case(ids, request)


def _prose(rng: random.Random, tokenizer: Tokenizer, tokens: int) -> list[int]:
    if rng.random() < 0.1:
        return [rng.randrange(5, 4096) for _ in range(tokens)]
    ids: list[int] = []
    while len(ids) < tokens:
        ids += tokenizer.encode(" ".join(rng.choices(_WORDS, k=40)) + ". ", add_special_tokens=False).ids
    return ids[:tokens]


def _text(rng: random.Random) -> str:
    pieces = [
        rng.choice(_UNICODE.split(" ")) if rng.random() < 0.5 else rng.choice(_WORDS)
        for _ in range(rng.randint(1, 80))
    ]
    pieces += [
        chr(rng.choice((rng.randrange(0x20, 0xD800), rng.randrange(0xE000, 0x110000))))
        for _ in range(rng.randint(0, 8))
    ]
    rng.shuffle(pieces)
    return " ".join(pieces)
