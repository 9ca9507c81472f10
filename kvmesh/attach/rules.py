"""Rules of the protocol for the requests of a stream, the same at every server. Pure."""

from __future__ import annotations

from typing import Final

from kvmesh.attach.frames import TOKEN_BYTES, FrameError
from kvmesh.attach.v1 import attach_pb2 as pb

HANDOFF_BYTES_MAX: Final = 1 << 20

_HEX: Final = frozenset("0123456789abcdef")


def check_numbers(message: pb.AttachRequest, *, last_slot: int) -> int:
    """Return the highest slot that `message` opens, or `last_slot`.

    Raises FrameError unless adopts and submits obey the protocol and, taken together, use only new numbers, each list
    ascending.
    """
    last = last_slot
    for adopt in message.adopts:
        check_adopt(adopt, last_slot=last)
        last = adopt.slot
    highest, last = last, last_slot
    for submit in message.submits:
        check_submit(submit, last_slot=last)
        last = submit.slot
    if message.adopts and message.submits:
        both = {one.slot for one in message.adopts} & {one.slot for one in message.submits}
        if both:
            raise FrameError(
                f"slot {min(both)} is named by both an adopt and a submit; one of them is allowed"
            )
    return max(highest, last)


def uneven_credits(message: pb.AttachRequest) -> FrameError:
    """Return the error for a message with different numbers of credit slots and credit positions."""
    return FrameError(
        f"credit columns differ in length: slots {len(message.credit_slots)}, "
        f"positions {len(message.credit_positions)}"
    )


def check_computed(message: pb.AttachResponse) -> None:
    """Raise FrameError if the computed columns of `message` differ in length."""
    if len(message.computed_slots) != len(message.computed_positions):
        raise FrameError(
            f"computed columns differ in length: slots {len(message.computed_slots)}, "
            f"positions {len(message.computed_positions)}"
        )


def check_submit(submit: pb.Submit, *, last_slot: int) -> None:
    """Raise FrameError if `submit` breaks the protocol. The limits of a replica are checked by its admission control."""
    check_slot(submit.slot, last_slot)
    check_request_id(submit.request_id)
    if not 1 <= submit.attempt <= 65_535:
        raise FrameError(f"submit.attempt is {submit.attempt}; 1 to 65535 is allowed")
    if not submit.token_ids or len(submit.token_ids) % TOKEN_BYTES:
        raise FrameError(
            f"submit.token_ids has {len(submit.token_ids)} bytes; a positive multiple of 4 is needed"
        )
    if not submit.HasField("budget") or not submit.HasField("sampling"):
        raise FrameError("submit.budget and submit.sampling must be present")
    tokens = len(submit.token_ids) // TOKEN_BYTES
    if submit.start_position >= tokens:
        raise FrameError(
            f"submit.start_position is {submit.start_position}; below {tokens} tokens is allowed"
        )
    if not 1 <= submit.block_tokens <= 1024:
        raise FrameError(f"submit.block_tokens is {submit.block_tokens}; 1 to 1024 is allowed")
    blocks = tokens // submit.block_tokens
    if len(submit.block_hashes) != 8 * blocks:
        raise FrameError(
            f"submit.block_hashes has {len(submit.block_hashes)} bytes; {blocks} blocks need {8 * blocks}"
        )


def check_adopt(adopt: pb.Adopt, *, last_slot: int) -> None:
    """Raise FrameError if `adopt` breaks the protocol."""
    check_slot(adopt.slot, last_slot)
    check_request_id(adopt.request_id)


def check_handoff(handoff: pb.Handoff) -> None:
    """Raise FrameError unless `handoff` has parameters of 1 to HANDOFF_BYTES_MAX bytes."""
    size = len(handoff.context_phase_params)
    if not 0 < size <= HANDOFF_BYTES_MAX:
        raise FrameError(
            f"handoff.context_phase_params has {size} bytes; 1 to {HANDOFF_BYTES_MAX} is allowed"
        )


def check_slot(slot: int, last_slot: int) -> None:
    """Raise FrameError unless `slot` is new: slots ascend within a stream and are never reused."""
    if slot <= last_slot:
        raise FrameError(
            f"slot is {slot}; above {last_slot} is needed, slots are never used twice in a stream"
        )


def check_request_id(request_id: str) -> None:
    """Raise FrameError unless `request_id` is 32 lower-case hexadecimal digits."""
    if len(request_id) != 32 or not set(request_id) <= _HEX:
        raise FrameError(f"request_id is {request_id[:40]!r}; 32 lower-case hexadecimal digits are needed")
