"""Decoders of the JSON messages of an engine's service streams: load reports and KV events. Pure.

A stored block comes with all of its tokens, each an object of its own in TensorRT-LLM's format. A prompt of 2,000 tokens is
110 KB of JSON. Its tokens become small records that the garbage collector does not track, not dicts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypedDict

import msgspec


class Token(msgspec.Struct, gc=False):
    """One token of a stored block. Its further members are dropped."""

    token_id: int


class _Block(TypedDict, total=False):
    block_hash: Any
    tokens: list[Token | int]


class _Data(TypedDict, total=False):
    type: Any
    parent_hash: Any
    blocks: list[_Block]
    block_hashes: Any


class _Event(TypedDict, total=False):
    event_id: Any
    data: _Data


class _KvMessage(TypedDict, total=False):
    boot_id: Any
    event_id: Any
    part: Any
    more: Any
    snapshot: list[_Data]
    events: list[_Event]


_OTHER: Final = msgspec.json.Decoder(dict[str, Any])
_BY_STREAM: Final = {"kv_events": msgspec.json.Decoder(_KvMessage)}


def decoder(stream: str) -> Callable[[bytes], Any]:
    """Return the decoder of the messages of `stream`; each becomes a dict. It raises msgspec.DecodeError.

    Of `kv_events` the members that the mesh reads are kept. A token is a Token, or an int as the engine sent it.
    """
    return _BY_STREAM.get(stream, _OTHER).decode
