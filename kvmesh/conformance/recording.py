"""The recorded responses to one call. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvmesh.triton.errors import CallError, EngineError
from kvmesh.triton.tensors import answer_of, payload_of

RESPONSES_MAX: Final = 10_000
"""Responses of one call. A check asks for a few hundred tokens at most."""

BYTES_MAX: Final = 8 << 20
"""Bytes of the responses of one call: room for the longest prompt, sent back."""


class Response(NamedTuple):
    """One response."""

    token_ids: tuple[int, ...]
    length: int | None
    """Value of the output `sequence_length`; None: absent."""
    logprobs: tuple[float, ...]
    alternatives: tuple[tuple[int, float], ...]
    """Token ids and log-probabilities of the most likely tokens, those of all tokens in order."""
    reused_blocks: int | None
    """Blocks of the prompt that were in the cache; None: absent."""


@dataclass(slots=True)
class Recording:
    """All responses to one call, and its end."""

    responses: list[Response] = field(default_factory=list)
    handoff: bytes = b""
    is_final: bool = False
    """A response had the flag `triton_final_response`."""
    after_final: int = 0
    """Responses behind the final one."""
    error: CallError | None = None
    unreadable: EngineError | None = None
    """Why the responses could not be recorded to their end."""
    size: int = 0
    """Bytes of all responses."""

    def add(self, raw: Any) -> None:
        """Record one ModelInferResponse. Raises EngineError if it is malformed, or one more than a call may have."""
        self.size += raw.ByteSize()
        if len(self.responses) >= RESPONSES_MAX or self.size > BYTES_MAX:
            bound = f"allowed are {RESPONSES_MAX:,} responses and {BYTES_MAX >> 20} MiB"
            raise EngineError(
                f"one call got {len(self.responses) + 1:,} responses of {self.size:,} bytes: {bound}"
            )
        answer = answer_of(raw)
        self.after_final += self.is_final
        self.is_final = self.is_final or answer.is_final
        self.handoff = answer.context_phase_params or self.handoff
        self.responses.append(
            Response(
                answer.token_ids,
                _first_int(payload_of(raw, "sequence_length")),
                answer.logprobs,
                tuple(struct.iter_unpack("<if", answer.alternatives)),
                _first_int(payload_of(raw, "kv_cache_reused_blocks")),
            )
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens in order."""
        return tuple(token for response in self.responses for token in response.token_ids)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """All log-probabilities in order."""
        return tuple(value for response in self.responses for value in response.logprobs)

    @property
    def reused_blocks(self) -> int | None:
        """Blocks of the prompt that were in the cache; None: no response had the output."""
        return next((one.reused_blocks for one in self.responses if one.reused_blocks is not None), None)


def _first_int(raw: bytes | None) -> int | None:
    return int.from_bytes(raw[:4], "little", signed=True) if raw else None
