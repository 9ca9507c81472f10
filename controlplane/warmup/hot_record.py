"""Hot prefixes and shapes of a pool: the answers of its routers, checked and merged. Pure.

The tokens are those of users. They stay in memory, and no text of this module has one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvmesh.router.v1 import router_pb2 as pb

TENANTS_MAX: Final = 255
"""Routers count the tenants of a prefix up to this number."""

WEIGHT_MAX: Final = 1e9
"""Heavier prefixes and shapes are left out: no router releases so many requests in minutes."""

PREFIXES_MAX: Final = 20_000
"""Prefixes of one router. Further ones, which are lighter, are not read."""

PREFIX_BYTES: Final = 1_024
"""Bytes that a prefix counts beside its tokens."""

HOLDERS_MAX: Final = 64
"""Holders of a prefix in one answer. Further ones are left out."""

SHAPES_MAX: Final = 64
"""Shapes in one answer. A router has 32 of prompts and 32 of batches."""

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Name of a replica."""


class AnswerRefused(Exception):
    """A router's answer is for another model version or block size. The text has both values."""


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix of prompts of users, full blocks only."""

    token_ids: bytes = field(repr=False)
    """32-bit little-endian integers."""
    weight: float
    """Requests that began with it, each counted with exp(-age / 120 s)."""
    tenant_count: int
    """At least so many tenants sent it. Range: 1 to TENANTS_MAX."""
    holders: Mapping[str, int]
    """Replica -> leading blocks that it holds, at least 1."""


@dataclass(frozen=True, slots=True)
class HotShape:
    """A shape of the work. Of `prompt_tokens` (uncached ones) and `batch` one is 0."""

    prompt_tokens: int
    batch: int
    weight: float


@dataclass(frozen=True, slots=True)
class HotRecord:
    """The hot prefixes and shapes of a pool, the heaviest first."""

    prefixes: tuple[HotPrefix, ...] = ()
    shapes: tuple[HotShape, ...] = ()
    incomplete: tuple[str, ...] = ()
    """Routers without an answer, or with a part of one."""


@dataclass(frozen=True, slots=True)
class HotQuestion:
    """A question to the routers of a pool."""

    routers: tuple[tuple[str, str], ...]
    """Name and address of each."""
    model_version: str
    block_tokens: int
    blocks_max: int
    """Distinct blocks in the answer of a router at most."""
    tenants_min: int
    """Tenants that must have sent a prefix."""
    timeout_s: float


class RouterAnswer:
    """The answer of one router, part by part. What breaks the rules of router.proto is left out and counted.

    INVARIANT: `byte_count` <= `bytes_max`.
    """

    def __init__(self, model_version: str, block_tokens: int, bytes_max: int) -> None:
        """`bytes_max`: for all tokens of the answer, with PREFIX_BYTES for each prefix."""
        self.prefixes: dict[bytes, HotPrefix] = {}
        """By their tokens."""
        self.shapes: dict[tuple[int, int], float] = {}
        """Weight by prompt tokens and batch."""
        self.is_complete = False
        self.dropped_count = 0
        self.byte_count = 0
        self._model_version = model_version
        self._block_tokens = block_tokens
        self._bytes_max = bytes_max
        self._has_first = False

    def __repr__(self) -> str:
        return f"RouterAnswer({len(self.prefixes)} prefixes, {self.byte_count} bytes)"

    def take(self, part: pb.ListHotPrefixesResponse) -> bool:
        """Take the next part. Return False once a bound is reached: no further part is wanted.

        Raises AnswerRefused if the first part has another model version or block size.
        """
        if not self._has_first:
            self._has_first = True
            self._check(part)
            self._take_shapes(part)
        for prefix in part.prefixes:
            taken = self._checked(prefix)
            if taken is None:
                self.dropped_count += 1
                continue
            added = len(taken.token_ids) + PREFIX_BYTES
            if self.byte_count + added > self._bytes_max or len(self.prefixes) == PREFIXES_MAX:
                return False
            self.byte_count += added
            self.prefixes[taken.token_ids] = taken
        return True

    def _check(self, part: pb.ListHotPrefixesResponse) -> None:
        if part.model_version != self._model_version:
            raise AnswerRefused(f"model version {part.model_version!r}; {self._model_version!r} is needed")
        if part.block_tokens != self._block_tokens:
            raise AnswerRefused(f"block_tokens is {part.block_tokens}; {self._block_tokens} is needed")

    def _take_shapes(self, part: pb.ListHotPrefixesResponse) -> None:
        for shape in part.shapes[:SHAPES_MAX]:
            key = shape.prompt_tokens, shape.batch
            is_known_kind = (shape.prompt_tokens == 0) != (shape.batch == 0)
            if is_known_kind and key not in self.shapes and _is_weight(shape.weight):
                self.shapes[key] = shape.weight
            else:
                self.dropped_count += 1

    def _checked(self, prefix: pb.HotPrefix) -> HotPrefix | None:
        """Return the prefix, or None if it breaks a rule. Holders that break one are left out."""
        token_ids = prefix.token_ids
        block_count, rest = divmod(len(token_ids), 4 * self._block_tokens)
        if rest or not block_count or not token_ids[3::4].isascii():  # the highest bit is the sign
            return None
        if token_ids in self.prefixes or not _is_weight(prefix.weight):
            return None
        if not 1 <= prefix.tenant_count <= TENANTS_MAX:
            return None
        holders = {
            holder.replica: holder.block_count
            for holder in prefix.holders[:HOLDERS_MAX]
            if 1 <= holder.block_count <= block_count and NAME.fullmatch(holder.replica)
        }
        return HotPrefix(token_ids, prefix.weight, prefix.tenant_count, holders)


def merged(answers: Mapping[str, RouterAnswer]) -> HotRecord:
    """Return the record of all `answers`, by the names of their routers.

    Equal prefixes and shapes of several routers become one, with the sum of their weights. A tenant may send through each
    of the routers, so that their greatest tenant count is the one that is certain. Of a holder, the greater number of
    blocks counts.

    A router knows no prompts of another one. So a beginning that only prompts of different routers share is in no answer.
    """
    prefixes: dict[bytes, HotPrefix] = {}
    shapes: dict[tuple[int, int], float] = {}
    for answer in answers.values():
        for token_ids, prefix in answer.prefixes.items():
            known = prefixes.get(token_ids)
            prefixes[token_ids] = prefix if known is None else _united(known, prefix)
        for key, weight in answer.shapes.items():
            shapes[key] = shapes.get(key, 0.0) + weight
    return HotRecord(
        _ranked(prefixes.values()),
        tuple(
            HotShape(prompt_tokens, batch, weight)
            for (prompt_tokens, batch), weight in sorted(shapes.items(), key=lambda each: (-each[1], each[0]))
        ),
        tuple(sorted(name for name, answer in answers.items() if not answer.is_complete)),
    )


def _ranked(prefixes: Iterable[HotPrefix]) -> tuple[HotPrefix, ...]:
    """Return prefixes by weight, as a router does (services/router/hot/prefix_tree.py). Ties: the shorter one first."""
    return tuple(sorted(prefixes, key=lambda each: (-each.weight, len(each.token_ids), each.token_ids)))


def _united(one: HotPrefix, other: HotPrefix) -> HotPrefix:
    names = one.holders.keys() | other.holders.keys()
    return HotPrefix(
        one.token_ids,
        one.weight + other.weight,
        max(one.tenant_count, other.tenant_count),
        {name: max(one.holders.get(name, 0), other.holders.get(name, 0)) for name in names},
    )


def _is_weight(weight: float) -> bool:
    return 0.0 < weight <= WEIGHT_MAX  # false for NaN
