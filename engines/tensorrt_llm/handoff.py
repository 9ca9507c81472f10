"""The handoff from prefill to decode: an envelope around TensorRT-LLM's opaque state, with what is checked. Pure.

TensorRT-LLM's state names ranks and addresses and has neither version nor checksum. Both sides must run one build of it,
one model, one data type and one block size. Tensor and pipeline parallelism may differ (docs/source/advanced/
disaggregated-service.md@16ddd53). The checksum finds accidents, not attacks: only the mesh may reach an engine's port.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from engines.contract import errors, handoff_envelope
from engines.contract.errors import EngineError

_MAGIC = b"KVMT"
_VERSION = 1
USED_MAX = 16_384
"""Used handoffs that a decode engine remembers. TensorRT-LLM finds later replays itself, by its transfer timeout."""


class Handoff(msgspec.Struct, frozen=True, array_like=True):
    """A prompt whose KV cache waits at a prefill engine. The last fields are those of DisaggregatedParams."""

    boot_id: str  # of the prefill engine
    handoff_id: int  # unique within that boot
    build: str  # version of TensorRT-LLM
    digest: str  # of model, data types and block size
    parallelism: tuple[int, int]  # tensor and pipeline parallel sizes, for logs: both sides may differ
    prompt_tokens: int
    prompt_hash: int
    first_tokens: list[int]
    first_log_probs: list[float]  # empty unless the context_only request asked for them
    opaque_state: bytes
    ctx_request_id: int | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None

    def encode(self) -> bytes:
        """Return the blob (see handoff_envelope)."""
        return handoff_envelope.sealed(self, _MAGIC, _VERSION)


def decode(blob: bytes) -> Handoff:
    """Decode a blob. Raises EngineError with the reason if it is malformed."""
    return handoff_envelope.opened(blob, Handoff, _MAGIC, _VERSION)


def hash_of(prompt: npt.NDArray[np.int32]) -> int:
    """Return xxh3_64 of a prompt, int32 [n], as little-endian bytes."""
    return xxhash.xxh3_64_intdigest(prompt.astype("<i4", copy=False).tobytes())


@dataclass(slots=True)
class HandoffCheck:
    """Decides which handoffs a decode engine takes, each once. `build` and `digest` are its own."""

    build: str
    digest: str
    used_max: int = USED_MAX
    _used: OrderedDict[tuple[str, int], None] = field(default_factory=OrderedDict)

    def take(
        self, handoff: Handoff, prompt: npt.NDArray[np.int32], request_id: str, kv_peer: str | None
    ) -> None:
        """Record that `handoff` is used for `prompt`. Raises EngineError if it cannot be, and for a second use.

        `kv_peer`: the only address that KV blocks may be pulled from. TensorRT-LLM keeps its addresses in the opaque state.
        So only a handoff with that `ctx_info_endpoint` is taken.
        """
        if kv_peer is not None:
            named = handoff.ctx_info_endpoint or "none"
            if kv_peer != named:
                raise EngineError(errors.SOURCE_NOT_REGISTERED.format(named=named, registered=kv_peer))
        reason = self._mismatch(handoff, prompt)
        if reason is not None:
            raise EngineError(errors.HANDOFF_MISMATCH.format(reason=reason))
        name = (handoff.boot_id, handoff.handoff_id)
        if name in self._used:
            unknown = errors.HANDOFF_UNKNOWN.format(handoff=handoff.handoff_id, peer=handoff.boot_id)
            raise EngineError(errors.EXECUTOR_FAILED.format(request=request_id, reason=unknown))
        self._used[name] = None
        if len(self._used) > self.used_max:
            self._used.popitem(last=False)

    def _mismatch(self, handoff: Handoff, prompt: npt.NDArray[np.int32]) -> str | None:
        if handoff.build != self.build:
            return f"made by TensorRT-LLM {handoff.build}, this engine runs {self.build}"
        if handoff.digest != self.digest:
            return f"engine is {handoff.digest}, this engine is {self.digest}"
        if handoff.prompt_tokens != len(prompt):
            return f"made for {handoff.prompt_tokens} prompt tokens, got {len(prompt)}"
        if handoff.prompt_hash != hash_of(prompt):
            return "made for another prompt"
        return None
