"""Engine calls of prefill and decode replicas, and the row of a first token. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.triton.errors import InvalidToken
from kvmesh.triton.port import CallKind, EngineCall, GuideKind, SamplingExtras

TRANSPORT_GRACE_S: Final = 5.0
"""Time from the deadline of a request to the timeout of its engine call. The timeout is a backstop of the core."""

SEED_TOKENS: Final = 1
"""Output tokens of a seed: the first token of its handoff, which the engine emits without a step."""

CONTROL_PURPOSES: Final = {budget_pb2.PURPOSE_WARM_UP: "warm_up", budget_pb2.PURPOSE_PROBE: "probe"}
"""Purposes for which no user waits."""


def control_purpose(budget: budget_pb2.Budget) -> str:
    """Return "warm_up" or "probe" for a call of the control plane; empty for every other call."""
    return CONTROL_PURPOSES.get(budget.purpose, "")


def engine_call(
    submit: pb.Submit, kind: CallKind, left_s: float, handoff: pb.Handoff | None = None
) -> EngineCall:
    """Return the call for `submit` with `left_s` until its deadline."""
    sampling = submit.sampling
    return EngineCall(
        kind=kind,
        request_id=f"{submit.request_id}-{submit.attempt}",
        token_ids=submit.token_ids,
        max_output_tokens=submit.budget.max_output_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        end_token_id=submit.end_token_id,
        further_end_token_ids=tuple(submit.further_end_token_ids),
        logprobs=submit.logprobs,
        extras=extras_of(submit),
        context_phase_params=b"" if handoff is None else handoff.context_phase_params,
        kv_peer="" if handoff is None else handoff.kv_address,
        timeout_s=left_s + TRANSPORT_GRACE_S,
    )


def extras_of(submit: pb.Submit) -> SamplingExtras | None:
    """Return the further sampling parameters of `submit`; None if none of them changes anything."""
    sampling = submit.sampling
    has_guide = sampling.HasField("guide")
    repetition = sampling.repetition_penalty or 1.0
    min_tokens = max(0, sampling.min_tokens - submit.start_position)
    numbers = (sampling.frequency_penalty, sampling.presence_penalty, min_tokens, sampling.alternative_count)
    if not (any(numbers) or repetition != 1.0 or sampling.bias_token_ids or has_guide):
        return None
    return SamplingExtras(
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=repetition,
        bias=tuple(zip(sampling.bias_token_ids, sampling.bias_values, strict=True)),
        min_tokens=min_tokens,
        alternatives=sampling.alternative_count,
        guide_kind=GUIDES[sampling.guide.kind] if has_guide else None,
        guide=sampling.guide.text if has_guide else "",
        output_start=len(submit.token_ids) // 4 - submit.start_position,
    )


GUIDES: Final = {
    pb.Guide.KIND_JSON: GuideKind.JSON,
    pb.Guide.KIND_JSON_SCHEMA: GuideKind.JSON_SCHEMA,
    pb.Guide.KIND_REGEX: GuideKind.REGEX,
}


def seed_call(submit: pb.Submit, handoff: pb.Handoff, left_s: float) -> EngineCall:
    """Return the call that pulls the KV blocks of `handoff` into the cache (KV seeding). No end token ends it early."""
    call = engine_call(submit, CallKind.GENERATION_ONLY, left_s, handoff)
    return replace(
        call,
        max_output_tokens=SEED_TOKENS,
        end_token_id=-1,
        further_end_token_ids=(),
        logprobs=False,
        extras=None,
    )


def cached_tokens(reused_blocks: int, block_tokens: int, prompt_tokens: int) -> int:
    """Return the number of prompt tokens that were cached. The last token of a prompt is always computed."""
    return min(reused_blocks * block_tokens, prompt_tokens - 1)


def valid_count(token_ids: Sequence[int], vocabulary_size: int) -> int:
    """Return the number of `token_ids` before the first id outside the vocabulary. Size 0 allows all ids.

    `token_ids` has at least one id.
    """
    if not vocabulary_size or (max(token_ids) < vocabulary_size and min(token_ids) >= 0):
        return len(token_ids)
    return next(index for index, each in enumerate(token_ids) if not 0 <= each < vocabulary_size)


def invalid_token(token_id: int, vocabulary_size: int) -> InvalidToken:
    """Return the error for an engine that made `token_id`."""
    return InvalidToken(f"the engine made token id {token_id}; 0 to {vocabulary_size - 1} is allowed")


def first_token(
    slot: int,
    position: int,
    token_id: int,
    logprob: float | None,
    *,
    prompt_tokens: int,
    cached: int,
    run_s: float,
    context_phase_params: bytes = b"",
    alternatives: bytes = b"",
) -> pb.FirstToken:
    """Return the row of the first token of a prompt that took `run_s` in the engine. `logprob` None: not requested."""
    row = pb.FirstToken(
        slot=slot,
        position=position,
        token_id=token_id,
        context_phase_params=context_phase_params,
        cached_token_count=cached,
        computed_token_count=prompt_tokens - cached,
        prefill_us=microseconds(run_s),
    )
    if logprob is not None:
        row.logprob = logprob
    if alternatives:
        row.alternatives = alternatives
    return row


def microseconds(seconds: float) -> int:
    """Return `seconds` as microseconds for the wire, at least 0."""
    return max(0, round(seconds * 1e6))
