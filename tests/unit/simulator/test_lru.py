"""The simulated cache against a simple reference."""

from __future__ import annotations

import random

from simulator.lru import BlockCache


class Twin:
    """The same rule with a list, least recently used first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: list[int] = []

    def depth(self, hashes: list[int]) -> int:
        """Return the number of leading blocks in the cache."""
        depth = 0
        while depth < len(hashes) and hashes[depth] in self.blocks:
            depth += 1
        return depth

    def use(self, hashes: list[int]) -> tuple[set[int], list[int]]:
        """Touch the blocks from leaf to root."""
        added = set(hashes) - set(self.blocks)
        self.blocks = [one for one in self.blocks if one not in hashes] + hashes[::-1]
        gone = self.blocks[: max(0, len(self.blocks) - self.capacity)]
        self.blocks = self.blocks[len(gone) :]
        return added, gone


def chain(rng: random.Random, known: list[list[int]]) -> list[int]:
    """Return a prompt that may begin as a known one does."""
    prefix = rng.choice(known) if known and rng.random() < 0.8 else []
    prompt = prefix[: rng.randint(0, len(prefix))]
    prompt = prompt + [rng.getrandbits(64) for _ in range(rng.randint(0 if prompt else 1, 5))]
    known.append(prompt)
    return prompt


def test_the_cache_agrees_with_its_reference() -> None:
    """Cache and reference agree for random prompts in random order.

    Hits, additions, evictions and remaining blocks are equal. INVARIANT: no block is cached without its
    parent.
    """
    for seed in range(60):
        rng = random.Random(seed)
        capacity = rng.randint(3, 40)  # also smaller than the longest prompt
        cache, twin = BlockCache(capacity), Twin(capacity)
        known: list[list[int]] = []
        for _ in range(80):
            prompt = chain(rng, known)
            assert cache.depth(prompt) == twin.depth(prompt), f"seed={seed}"
            added, removed = cache.use(prompt)
            twin_added, twin_removed = twin.use(prompt)
            assert set(added) == twin_added and removed == twin_removed, f"seed={seed}"
            assert added == [one for one in prompt if one in twin_added], (
                "additions are in order from the root"
            )
            assert len(cache) == len(twin.blocks) <= capacity
            for other in known:
                held = [one in cache for one in other]
                assert held == sorted(held, reverse=True), (
                    f"seed={seed}: a block is cached without its parent"
                )
