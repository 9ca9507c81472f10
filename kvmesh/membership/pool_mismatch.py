"""Finds the members of a pool that do not fit the others: another version, block size, or digest. Pure.

Routers and `kvmesh replicas` get the same result from the same leases. A mismatch is refused, because a replica with other
tokens or other blocks would answer wrongly. An unknown digest is no mismatch: release 0.1.0 leases none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from kvmesh.membership.member import Member

DIGESTS: Final = ("tokenizer", "engine")
"""Kinds of digests that are compared."""

REPLICAS: Final = ("prefill", "decode")

VALUE_CHARACTERS_MAX: Final = 80
"""A longer value of a lease is cut in messages."""

Value = TypeVar("Value", str, int)


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The values that all members of a pool must have."""

    model_version: str
    block_tokens: int
    digests: Mapping[str, str]
    """Digest by kind; a missing kind is unknown."""


def facts_of(members: Iterable[Member], own: Member | None = None) -> PoolFacts:
    """Return the facts of the pool that has exactly `members`.

    Version and block size are those of `own`, a router, else those of most routers, else those of most replicas. Each
    digest is the one of most replicas with that version. In a tie the value of the smallest process id wins.
    """
    members = sorted(members, key=lambda member: member.process_id)
    deciding = [own] if own is not None else [member for member in members if member.role == "router"]
    deciding = deciding or members
    version = _most([member.model_version for member in deciding], "")
    replicas = [member for member in members if member.role in REPLICAS and member.model_version == version]
    digests = {
        kind: _most([member.digests[kind] for member in replicas if member.digests.get(kind)], "")
        for kind in DIGESTS
    }
    return PoolFacts(
        model_version=version,
        block_tokens=_most([member.block_tokens for member in deciding], 0),
        digests={kind: digest for kind, digest in digests.items() if digest},
    )


def mismatch(member: Member, facts: PoolFacts) -> str:
    """Return each value of `member` that differs, beside the pool's value. Empty: the member fits."""
    pairs: list[tuple[str, str | int, str | int]] = [
        ("model version", member.model_version, facts.model_version),
        ("block_tokens", member.block_tokens, facts.block_tokens),
    ]
    for kind in DIGESTS:
        found, known = member.digests.get(kind, ""), facts.digests.get(kind, "")
        if found and known:
            pairs.append((f"{kind} digest", found, known))
    return "; ".join(
        f"{what} {_shown(found)}, the pool has {_shown(known)}"
        for what, found, known in pairs
        if found != known
    )


def mismatches(members: Sequence[Member]) -> dict[str, str]:
    """Return the mismatch of each router and replica, over all pools, by process id. Members that fit are left out."""
    found = {}
    for pool in {member.pool for member in members}:
        of_pool = [member for member in members if member.pool == pool and member.role != "frontend"]
        facts = facts_of(of_pool)
        found.update({member.process_id: mismatch(member, facts) for member in of_pool})
    return {name: text for name, text in sorted(found.items()) if text}


def _most(values: Sequence[Value], default: Value) -> Value:
    """Return the most frequent value, of equally frequent ones the first."""
    return max(values, key=values.count, default=default)


def _shown(value: str | int) -> str:
    text = (
        value
        if isinstance(value, int) or len(value) <= VALUE_CHARACTERS_MAX
        else f"{value[:VALUE_CHARACTERS_MAX]}..."
    )
    return json.dumps(text)
