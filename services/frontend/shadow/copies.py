"""A copy of a user's request: its specification and its output. Pure.

A copy has the tokens, the sampling parameters and the seed of the user's request. It has a request id, a deadline and a
caller of its own. Its deadline is twice the time that the user's request has left.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import xxhash

from kvmesh.buckets.limits import Account
from kvmesh.deadlines import RUNTIME_MAX_S
from kvmesh.models.detokenizer import Detokenizer
from kvmesh.snapshot.shadow import SHADOW, Shadow
from kvmesh.tenants.caller import Caller, ServiceClass, Tenant
from services.frontend.requests.output import Output
from services.frontend.requests.request_spec import RequestSpec, Timing

DEADLINE_FACTOR: Final = 2.0
"""Time of a copy over the time that the user's request has left."""

KV_HEADROOM: Final = 0.5
"""Share of a decode replica's KV blocks that stay free beside a copy."""

CALLER: Final = Caller(
    tenant=Tenant(name=SHADOW),
    service_class=ServiceClass(
        name=SHADOW,
        priority_class=0,
        runtime_max_s=RUNTIME_MAX_S,
        default_deadline_s=RUNTIME_MAX_S,
        max_output_tokens=1 << 20,
        is_sheddable=True,
        kv_headroom=KV_HEADROOM,
    ),
    account=Account("", ()),
)
"""The caller of every copy. Nothing is charged."""


class Textless:
    """Makes no text: a copy without stop strings is compared by its token ids alone. Implements Detokenizer."""

    __slots__ = ("vocabulary_size",)

    def __init__(self, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size

    def feed(self, ids: Iterable[int]) -> str:
        """Return an empty text. Raises IndexError for an id out of range."""
        if max(ids, default=0) >= self.vocabulary_size:
            raise IndexError("a token id is out of range")
        return ""

    def flush(self) -> str:
        """Return an empty text."""
        return ""


def needed_tokens(spec: RequestSpec, shadow: Shadow) -> int:
    """Return the most tokens that one copy of `spec` may use: prompt and output."""
    return spec.prompt_tokens + shadow.output_tokens(spec.max_output_tokens)


def copy_id(shadow: Shadow, pool: str, request_id: str) -> str:
    """Return the request id of the copy in `pool`: 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(f"{shadow.id}\0{pool}\0{request_id}".encode())


def copied(spec: RequestSpec, shadow: Shadow, pool: str, model_version: str, now_s: float) -> RequestSpec:
    """Return the specification of the copy of a user's request in `pool`, which serves `model_version`."""
    left_s = min(RUNTIME_MAX_S, DEADLINE_FACTOR * (spec.timing.deadline_s - now_s))
    first_s = spec.timing.ttft_deadline_s
    timing = Timing(
        arrived_s=now_s,
        deadline_s=now_s + left_s,
        is_clients_deadline=spec.timing.is_clients_deadline,
        ttft_deadline_s=None if first_s is None else now_s + DEADLINE_FACTOR * max(0.0, first_s - now_s),
    )
    return RequestSpec(
        caller=CALLER,
        request_id=copy_id(shadow, pool, spec.request_id),
        prompt_ids=spec.prompt_ids,
        sampling=spec.sampling,
        stop=spec.stop,
        max_output_tokens=shadow.output_tokens(spec.max_output_tokens),
        pool=pool,
        model_version=model_version,
        end_token_ids=spec.end_token_ids,
        stop_token_ids=spec.stop_token_ids,
        session_id=spec.session_id,
        timing=timing,
        logprobs=spec.logprobs,
        is_shadow=True,
    )


def output_of(spec: RequestSpec, detokenizer: Detokenizer) -> Output:
    """Return the output of a copy, still empty. `detokenizer`: a new one of its model version."""
    made = detokenizer if spec.stop else Textless(detokenizer.vocabulary_size)
    return Output(made, spec.stop, with_logprobs=spec.logprobs)
