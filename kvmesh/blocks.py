"""Blocks of tokens and their chained hashes, by which the prefix index identifies a prefix.

Pure. A block is `block_tokens` consecutive tokens. Its hash is xxh3-64 over its tokens (32-bit little-endian), seeded with
the hash of its parent. The parent of the root is xxh3-64 of the salt. Equal hashes therefore mean equal prefixes. Models
that must not share cache entries use different salts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash


def root_hash(salt: str) -> int:
    """Return the parent of the first block under `salt`: an unsigned 64-bit integer."""
    return xxhash.xxh3_64_intdigest(salt.encode())


def child_hash(parent: int, block: bytes) -> int:
    """Return the hash of one full block (4 bytes per token, little-endian) behind `parent`."""
    return xxhash.xxh3_64_intdigest(block, parent)


def chain(token_ids: bytes, block_tokens: int, salt: str) -> list[int]:
    """Return the hashes of all full blocks of `token_ids` (4 bytes per token), root first."""
    size = 4 * block_tokens
    digest = xxhash.xxh3_64_intdigest
    parent = root_hash(salt)
    hashes = []
    for at in range(0, len(token_ids) - size + 1, size):
        parent = digest(token_ids[at : at + size], parent)
        hashes.append(parent)
    return hashes


def pack(hashes: Sequence[int]) -> bytes:
    """Return hashes as 64-bit little-endian bytes."""
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def unpack(data: bytes) -> tuple[int, ...]:
    """Return the hashes in `data`. Raises ValueError if its length is no multiple of 8."""
    if len(data) % 8:
        raise ValueError(f"block hashes have {len(data)} bytes; a multiple of 8 is needed")
    return struct.unpack(f"<{len(data) // 8}Q", data)


def count_for(tokens: int, block_tokens: int) -> int:
    """Return the blocks that `tokens` tokens need, the last one perhaps partial."""
    return -(-tokens // block_tokens)
