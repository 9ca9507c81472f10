"""Requests that break the protocol end the stream, and the error states the reason."""

from __future__ import annotations

import random

import pytest

from kvmesh.attach import frames, rules
from kvmesh.attach.v1 import attach_pb2 as pb


def _submit() -> pb.Submit:
    submit = pb.Submit(
        slot=1,
        request_id="0" * 32,
        attempt=1,
        token_ids=frames.pack_ids(range(5)),
        block_tokens=2,
        block_hashes=b"h" * 16,
    )
    submit.budget.remaining_ms = 1000
    submit.sampling.top_p = 1.0
    return submit


def test_a_sound_submit_passes() -> None:
    """The submit from which the other cases are made is valid."""
    rules.check_submit(_submit(), last_slot=0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("slot", 0, "slot is 0"),
        ("request_id", "x", "request_id"),
        ("request_id", "A" * 32, "request_id"),
        ("attempt", 0, "attempt is 0"),
        ("attempt", 70_000, "attempt is 70000"),
        ("token_ids", b"", "token_ids has 0 bytes"),
        ("token_ids", b"12345", "token_ids has 5 bytes"),
        ("start_position", 5, "start_position is 5"),
        ("block_tokens", 0, "block_tokens is 0"),
        ("block_hashes", b"h" * 8, "block_hashes has 8 bytes"),
    ],
)
def test_a_submit_that_breaks_the_protocol_is_named(field: str, value: object, words: str) -> None:
    """Each broken field is refused with its name and value."""
    submit = _submit()
    setattr(submit, field, value)
    with pytest.raises(frames.FrameError, match=words):
        rules.check_submit(submit, last_slot=0)


def test_a_slot_is_never_used_twice() -> None:
    """A slot at or below the last one of the stream breaks the protocol."""
    with pytest.raises(frames.FrameError, match="never used twice"):
        rules.check_submit(_submit(), last_slot=1)


@pytest.mark.parametrize("seed", range(20))
def test_numbers_are_new_ascend_and_name_one_request_each(seed: int) -> None:
    """Exactly the valid lists pass. The highest number is the bound of the next message."""
    draw = random.Random(seed)
    for _ in range(200):
        last = draw.randrange(3)
        adopts, submits = ([draw.randrange(8) for _ in range(draw.randrange(3))] for _ in range(2))
        message = pb.AttachRequest(adopts=[pb.Adopt(slot=slot, request_id="a" * 32) for slot in adopts])
        for slot in submits:
            message.submits.append(_submit())
            message.submits[-1].slot = slot
        ascends = all([last, *slots] == sorted({last, *slots}) for slots in (adopts, submits))
        if ascends and not set(adopts) & set(submits):
            highest = rules.check_numbers(message, last_slot=last)
            assert highest == max([last, *adopts, *submits])
        else:
            with pytest.raises(frames.FrameError, match="slot"):
                rules.check_numbers(message, last_slot=last)


def test_the_fields_of_a_response_are_numbered_in_the_order_in_which_they_apply() -> None:
    """A reader applies the present fields by number. The fifth rule of attach.proto gives the order.

    Only the computed columns are read earlier. They were added last, and their slots may end in the same message.
    """
    fields = sorted(pb.AttachResponse.DESCRIPTOR.fields, key=lambda field: field.number)
    fields = [field for field in fields if not field.name.startswith("computed_")]
    order = "hello acceptances placements starts first_tokens transfers frame finishes failures refusals load_report"
    assert [field.name for field in fields] == order.split()
