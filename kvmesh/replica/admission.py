"""Admission control of a replica: refusals of submits that its engine cannot run, or not in time. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from kvmesh.attach.frames import ALTERNATIVES_MAX
from kvmesh.attach.names import name_of
from kvmesh.attach.refusal import SubmitRefusal
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2
from kvmesh.deadlines import REMAINING_MS_MAX
from kvmesh.replica import features
from kvmesh.replica.calls import GUIDES, control_purpose
from kvmesh.replica.life_view import LifeView
from kvmesh.triton.capabilities import ModelFacts
from kvmesh.triton.errors import (
    CallError,
    EngineBusy,
    EngineError,
    EngineLost,
    EngineStalled,
    HandoffLost,
    InvalidRequest,
    InvalidToken,
    NoHandoff,
)

FAILURE_CODES: Final[dict[type[CallError], pb.Failure.Code.ValueType]] = {
    EngineLost: pb.Failure.CODE_ENGINE_LOST,
    EngineBusy: pb.Failure.CODE_ENGINE_ERROR,
    EngineError: pb.Failure.CODE_ENGINE_ERROR,
    EngineStalled: pb.Failure.CODE_STALLED,
    HandoffLost: pb.Failure.CODE_HANDOFF_LOST,
    NoHandoff: pb.Failure.CODE_HANDOFF_LOST,
    InvalidRequest: pb.Failure.CODE_INVALID,
    InvalidToken: pb.Failure.CODE_INVALID_TOKEN,
}


def too_late(what: str, needed_s: float, left_s: float, waited_s: float = 0.0) -> SubmitRefusal:
    """Return the refusal of `what`, which has `left_s` and needs `needed_s` (0: unknown) after `waited_s` here."""
    if needed_s <= 0:
        after = f" after {waited_s:.3f} s at this replica" if waited_s > 0 else ""
        return SubmitRefusal(pb.Refusal.REASON_DEADLINE, f"the deadline has passed{after}")
    return SubmitRefusal(
        pb.Refusal.REASON_DEADLINE,
        f"{what} needs {needed_s:.3f} s, and {max(0.0, left_s):.3f} s are left after {waited_s:.3f} s at this replica",
        estimate_ms=min(REMAINING_MS_MAX, max(1, math.ceil((waited_s + needed_s) * 1000 - 1e-6))),
    )


def not_serving(replica: str, *, is_draining: bool, is_ready: bool) -> SubmitRefusal | None:
    """Return the refusal of all new submits at `replica`, or None. `is_ready`: its engine answers."""
    if is_draining:
        return SubmitRefusal(pb.Refusal.REASON_DRAINING, f"{replica} is draining")
    if not is_ready:
        return SubmitRefusal(pb.Refusal.REASON_DRAINING, f"the engine of {replica} does not answer")
    return None


def quarantined(replica: str, life: LifeView, budget: budget_pb2.Budget) -> SubmitRefusal | None:
    """Return the refusal of a user's submit at a quarantined `replica`, or None. Warm-up and probes are taken."""
    if not life.is_quarantined or control_purpose(budget):
        return None
    why = f": {life.reason}" if life.reason else ""
    return SubmitRefusal(pb.Refusal.REASON_DRAINING, f"{replica} is quarantined{why}")


def check_submit(
    submit: pb.Submit, facts: ModelFacts, phases: Sequence[pb.Phase.ValueType], blocks: int
) -> SubmitRefusal | None:
    """Return the refusal of a submit that this engine can never run, or None. `blocks`: the KV blocks it needs."""
    if submit.model_version != facts.model_version:
        return SubmitRefusal(
            pb.Refusal.REASON_STALE_SNAPSHOT,
            f"model version is {submit.model_version!r}; {facts.model_version!r} is served here",
        )
    if submit.phase not in phases:
        allowed = " or ".join(name_of(pb.Phase, phase) for phase in phases)
        return _invalid("phase", name_of(pb.Phase, submit.phase), f"{allowed} runs here")
    if submit.block_tokens != facts.tokens_per_block:
        return _invalid("block_tokens", submit.block_tokens, f"{facts.tokens_per_block} is served here")
    output = submit.budget.max_output_tokens
    prompt = len(submit.token_ids) // 4
    space = facts.max_sequence_tokens - prompt
    if not 1 <= output <= space:
        return _invalid(
            "budget.max_output_tokens", output, f"1 to {space} fits behind {prompt} prompt tokens"
        )
    if blocks > facts.kv_blocks:
        return _invalid(
            "token_ids", f"{prompt} tokens", f"{blocks} KV blocks needed, {facts.kv_blocks} exist"
        )
    sampling = submit.sampling
    if not 0 <= sampling.temperature <= 10:
        return _invalid("sampling.temperature", sampling.temperature, "0 to 10 is allowed")
    if not 0 < sampling.top_p <= 1:
        return _invalid("sampling.top_p", sampling.top_p, "above 0 and at most 1 is allowed")
    if len(sampling.bias_token_ids) != len(sampling.bias_values):
        counts = f"{len(sampling.bias_values)} for {len(sampling.bias_token_ids)} tokens"
        return _invalid("sampling.bias_values", counts, "one for each token is needed")
    if any(not 0 <= each < facts.vocab_size for each in sampling.bias_token_ids):
        return _invalid("sampling.bias_token_ids", "out of range", f"0 to {facts.vocab_size - 1} is allowed")
    if sampling.alternative_count > ALTERNATIVES_MAX:
        allowed = f"0 to {ALTERNATIVES_MAX} is allowed"
        return _invalid("sampling.alternative_count", sampling.alternative_count, allowed)
    if sampling.HasField("guide") and sampling.guide.kind not in GUIDES:
        return _invalid("sampling.guide.kind", sampling.guide.kind, "json, json_schema or regex is allowed")
    lacking = features.missing(submit, facts.capabilities)
    if lacking is not None:
        field, reason = lacking
        return SubmitRefusal(pb.Refusal.REASON_INVALID, f"{field} is set: {reason}", field)
    return None


def _invalid(field: str, value: object, allowed: str) -> SubmitRefusal:
    return SubmitRefusal(pb.Refusal.REASON_INVALID, f"{field} is {value}: {allowed}", field)
