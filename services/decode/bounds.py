"""Admission control of a decode replica by the submit's budget: KV headroom and time. Pure."""

from __future__ import annotations

from typing import Final

from kvmesh import deadlines
from kvmesh.attach.refusal import SubmitRefusal
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.blocks import count_for
from kvmesh.replica.admission import too_late

HEADROOM_PERMILLE_MAX: Final = 900
_FIELD: Final = "budget.kv_head_room_permille"


def blocks_needed(submit: pb.Submit) -> int:
    """Return the KV blocks that let `submit` run to its end."""
    tokens = len(submit.token_ids) // 4 + submit.budget.max_output_tokens
    return count_for(tokens, submit.block_tokens)


def headroom_blocks(submit: pb.Submit, blocks_total: int) -> int:
    """Return the KV headroom of `submit`: blocks that must stay free beside it. A resumed submit needs none."""
    if submit.resumed:
        return 0
    return -(-blocks_total * submit.budget.kv_head_room_permille // 1000)


def check_headroom(submit: pb.Submit, blocks: int, headroom: int, blocks_total: int) -> SubmitRefusal | None:
    """Return the refusal of a `submit` that asks for too much headroom, or that fits into no empty replica; or None.

    `blocks`: KV blocks that the submit needs. `headroom`: KV blocks that must stay free beside them. `blocks_total`: KV
    blocks of the engine. The submit may ask for at most HEADROOM_PERMILLE_MAX.
    """
    permille = submit.budget.kv_head_room_permille
    if permille > HEADROOM_PERMILLE_MAX:
        message = f"{_FIELD} is {permille}: 0 to {HEADROOM_PERMILLE_MAX} is allowed"
        return SubmitRefusal(pb.Refusal.REASON_INVALID, message, _FIELD)
    if blocks + headroom > blocks_total:
        message = f"{blocks} KV blocks are needed beside {headroom} of headroom; {blocks_total} exist"
        return SubmitRefusal(pb.Refusal.REASON_INVALID, message, "token_ids")
    return None


def check_time(submit: pb.Submit, step_s: float) -> SubmitRefusal | None:
    """Return the refusal of a `submit` that cannot meet its deadline, or None.

    The submit is refused if its first token would be late, or, where prefill makes that token, if the second would be.
    `step_s`: seconds of a step of this engine; 0: unknown. The prefill is taken to last as long as the router expects.
    """
    budget = submit.budget
    left_s = deadlines.left_s(budget.remaining_ms)
    prefill_s = submit.prefill_estimate_us / 1e6
    if budget.HasField("ttft_remaining_ms"):
        ttft_left_s = deadlines.left_s(budget.ttft_remaining_ms)
        if ttft_left_s <= prefill_s:
            return too_late("the first token", prefill_s, ttft_left_s)
    if submit.phase == pb.PHASE_CONTEXT_AND_GENERATION:
        what, needed_s = "the first token", max(prefill_s, step_s)
    elif budget.max_output_tokens > 1:
        what, needed_s = "the second token", prefill_s + step_s
    else:  # prefill makes the only one
        what, needed_s = "the first token", prefill_s
    return too_late(what, needed_s, left_s) if left_s <= needed_s else None
