"""Plan of a seeding: the prefixes to copy into a cache, in their order, each with its source. Pure.

The order of the record is kept: the heaviest prefix first. A prefix is pulled from the replica that holds most of it, and
is cut to the part that is held there. Replicas that hold equally much share the work. The target computes a prefix of a
package that no source holds, and does so before all others. In a replay it computes every prefix.

INVARIANT: the steps of a plan copy at most `blocks_max` distinct blocks that the target lacks, by their chained hashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from controlplane.warmup.hot_record import HotPrefix
from kvmesh import blocks
from kvmesh.attach.frames import TOKEN_BYTES

MIN_BLOCKS: Final = 1
"""Fewest blocks of a step. A prefix with fewer held blocks is left out."""


class SeededReplica(Protocol):
    """The replica that gets the blocks."""

    @property
    def process_id(self) -> str: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def model_version(self) -> str: ...


@dataclass(frozen=True, slots=True)
class SeedStep:
    """One prefix to copy."""

    token_ids: bytes = field(repr=False)
    """Full blocks."""
    blocks: int
    """Blocks of it that the target lacks and that no step before copies."""
    source: str = ""
    """Name of the replica to pull from. Empty: the target computes the prefix."""
    is_last: bool = True
    """False: a later step copies more of the same prefix."""


@dataclass(slots=True)
class _Progress:
    """State of a plan in the making."""

    blocks_left: int
    known: set[int]
    """Hashes of the blocks that the target has, or gets by the steps so far."""
    load: dict[str, int]
    """Blocks to pull by source."""
    steps: list[SeedStep] = field(default_factory=list)


def plan(
    prefixes: Sequence[HotPrefix],
    package: Sequence[bytes],
    target: SeededReplica,
    sources: Sequence[str],
    blocks_max: int,
    *,
    is_replay: bool = False,
    is_empty: bool = False,
) -> tuple[SeedStep, ...]:
    """Return the steps, in order. `package`: token ids of prefixes. `sources`: names of the replicas to pull from.

    `is_empty`: the target holds no block, even if `prefixes` list it as a holder.
    """
    chains = [blocks.chain(each.token_ids, target.block_tokens, target.model_version) for each in prefixes]
    known = {
        block
        for prefix, chain in zip(prefixes, chains, strict=True)
        for block in chain[: 0 if is_empty else prefix.holders.get(target.process_id, 0)]
    }
    progress = _Progress(blocks_max, known, dict.fromkeys(sources, 0))
    held = _held(prefixes, chains, sources)
    for token_ids in package:
        chain = blocks.chain(token_ids, target.block_tokens, target.model_version)
        depths = {source: len(chain) for source in sources if chain and chain[-1] in held[source]}
        _add(progress, target, token_ids, chain, {} if is_replay else depths, may_compute=True)
    for prefix, chain in zip(prefixes, chains, strict=True):
        depths = {source: prefix.holders[source] for source in sources if source in prefix.holders}
        _add(progress, target, prefix.token_ids, chain, {} if is_replay else depths, may_compute=is_replay)
    return tuple(progress.steps)


def in_pieces(steps: Iterable[SeedStep], block_tokens: int, tokens_max: int) -> Iterator[SeedStep]:
    """Yield `steps` in pieces, each with at most `tokens_max` tokens behind the piece before it, at least one block.

    A piece repeats the pieces before it, which are in the cache by then. A prompt of a user waits for one piece at most.
    """
    for step in steps:
        block_bytes = block_tokens * TOKEN_BYTES
        end, most = len(step.token_ids) // block_bytes, max(1, tokens_max // block_tokens)
        at = end - step.blocks
        while at < end:
            count = min(most, end - at)
            at += count
            yield SeedStep(step.token_ids[: at * block_bytes], count, step.source, is_last=at == end)


def _held(
    prefixes: Sequence[HotPrefix], chains: Sequence[Sequence[int]], sources: Sequence[str]
) -> dict[str, set[int]]:
    """Return the hashes that each source holds."""
    held: dict[str, set[int]] = {source: set() for source in sources}
    for prefix, chain in zip(prefixes, chains, strict=True):
        for source, depth in prefix.holders.items():
            if source in held:
                held[source].update(chain[:depth])
    return held


def _add(
    progress: _Progress,
    target: SeededReplica,
    token_ids: bytes,
    chain: Sequence[int],
    depths: Mapping[str, int],
    *,
    may_compute: bool,
) -> None:
    """Add the step of one prefix with the hashes `chain`, unless it copies nothing.

    `depths`: leading blocks by source. `may_compute`: True if the target computes a prefix that no source holds.
    """
    depth = min(len(chain), max(depths.values(), default=0))
    source = ""
    if depth >= MIN_BLOCKS:
        equal = [name for name, each in depths.items() if min(len(chain), each) == depth]
        source = min(equal, key=lambda name: (progress.load[name], name))
    elif may_compute:
        depth = len(chain)
    count, lacking = _cut(chain[:depth], progress.known, progress.blocks_left)
    if lacking < MIN_BLOCKS:
        return
    if source:
        progress.load[source] += count
    progress.blocks_left -= lacking
    progress.known.update(chain[:count])
    step = SeedStep(token_ids[: count * target.block_tokens * TOKEN_BYTES], lacking, source)
    progress.steps.append(step)


def _cut(chain: Sequence[int], known: set[int], most: int) -> tuple[int, int]:
    """Return the leading blocks to copy with at most `most` that are not `known`, and the number of those."""
    count = lacking = 0
    for at, block in enumerate(chain, start=1):
        if block not in known:
            if lacking == most:
                break
            lacking += 1
            count = at
    return count, lacking
