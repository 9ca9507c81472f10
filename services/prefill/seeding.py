"""KV seeding: a slot of PHASE_SEED waits for a handoff and pulls its KV blocks into the prefix cache. Pure.

The control plane seeds a replica from a warm one of its pool. The engine call is a GENERATION_ONLY call of one token: the
engine pulls the blocks that it lacks, and emits the first token of the handoff without a step. The token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvmesh.attach.frames import FrameError
from kvmesh.attach.names import name_of
from kvmesh.attach.refusal import SubmitRefusal
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.blocks import count_for
from kvmesh.budget.v1 import budget_pb2
from kvmesh.replica.calls import SEED_TOKENS
from kvmesh.triton.errors import HandoffLost
from services.prefill.prefilling import Prefilling
from services.prefill.slot import PrefillSlot, PrefillState
from services.prefill.slot_table import PrefillSlotTable

_PURPOSE: Final = "budget.purpose"

IsSource = Callable[[str, float], bool]


def seed_blocks(submit: pb.Submit) -> int:
    """Return the KV blocks that the engine needs to take the handoff of `submit`, its first token included."""
    return count_for(len(submit.token_ids) // 4 + SEED_TOKENS, submit.block_tokens)


def check_purpose(submit: pb.Submit) -> SubmitRefusal | None:
    """Return the refusal of a seed that is no warm-up, or None. No other caller may fill the cache of a replica."""
    purpose = submit.budget.purpose
    if purpose == budget_pb2.PURPOSE_WARM_UP:
        return None
    name = name_of(budget_pb2.Purpose, purpose)
    message = f"{_PURPOSE} is {purpose} ({name}): a seed needs {budget_pb2.PURPOSE_WARM_UP} (PURPOSE_WARM_UP)"
    return SubmitRefusal(pb.Refusal.REASON_INVALID, message, _PURPOSE)


class Seeding:
    """Handoffs of seeds on their way to the engine."""

    def __init__(
        self, is_source: IsSource, slot_table: PrefillSlotTable, prefilling: Prefilling, wait_s: float
    ) -> None:
        """`is_source(address, now_s)`: True if KV blocks may be pulled from the address. `wait_s`: longest time of a seed
        before its engine call."""
        self._is_source = is_source
        self._slot_table = slot_table
        self._prefilling = prefilling
        self._wait_s = wait_s

    def hand_over(self, slot: PrefillSlot, handoff: pb.Handoff, now_s: float) -> None:
        """Let `slot` wait for its turn; a slot that waits for no handoff ignores it. Raises FrameError."""
        if slot.state is not PrefillState.PENDING or slot.handoff is not None:
            return
        if handoff.first_token_count > SEED_TOKENS:
            count = handoff.first_token_count
            raise FrameError(
                f"handoff.first_token_count is {count}; 0 to {SEED_TOKENS} is allowed for a seed"
            )
        if not self._is_source(handoff.kv_address, now_s):
            text = f"{handoff.kv_address!r} is not the KV address of a registered prefill replica"
            self._prefilling.fail(slot, HandoffLost(text), now_s)
            return
        slot.handoff = handoff
        self._slot_table.lane.push(slot, is_light=True)

    def look_at(self, slot: PrefillSlot, now_s: float) -> None:
        """End a pending seed whose time is over; else schedule the next check."""
        wait_until_s = slot.submitted.submitted_s + self._wait_s
        if slot.submitted.deadline_s <= now_s:
            self._prefilling.cut(slot, pb.Finish.REASON_DEADLINE, now_s)
        elif wait_until_s <= now_s:
            lacked = "handoff" if slot.handoff is None else "turn in the engine"
            text = f"no {lacked} came for the seed within {self._wait_s:.1f} s"
            self._prefilling.fail(slot, HandoffLost(text), now_s)
        else:
            self._slot_table.look_by(slot, min(slot.submitted.deadline_s, wait_until_s))
