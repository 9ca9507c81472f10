"""Replicas whose engines have no KV events: what the core tells the index about them, from the first load report on."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh import blocks
from kvmesh.attach.frames import pack_ids
from kvmesh.attach.v1 import attach_pb2 as pb
from tests.unit.router.desk import B, Desk, first, frame

BLOCKS = 40
"""KV blocks of each engine."""


def desk_without_events(**changes: Any) -> Desk:
    """Return a desk whose engines have no KV events and no boot id."""
    desk = Desk(**changes)
    for replica, _ in desk.links.values():
        replica.take_capabilities(("disaggregated", "life"))
    report(desk)
    return desk


def report(desk: Desk, **changes: Any) -> None:
    for name in desk.links:
        desk.down(
            name, load_report=pb.LoadReport(**{"engine_ready": True, "block_total_count": BLOCKS, **changes})
        )


def held(desk: Desk, name: str) -> int:
    return desk.policy.local_index.blocks_of(name)


def handed_over(desk: Desk, **changes: Any) -> tuple[str, int]:
    """Bring a request to its transfer. Return the decode replica and its slot."""
    desk.submit(**changes)
    decode, submit = desk.placed()
    (asked,) = desk.up("prefill-0").submits  # at once, because decode has ample room
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)])
    desk.down("prefill-0", starts=[pb.Start(slot=asked.slot)], first_tokens=[first(asked.slot)])
    return decode, submit.slot


def generating(desk: Desk, **changes: Any) -> tuple[str, int]:
    """Bring a request to its generation. Return the decode replica and its slot."""
    decode, slot = handed_over(desk, **changes)
    desk.down(decode, transfers=[pb.Transfer(slot=slot)])
    desk.up("prefill-0")
    return decode, slot


def generate(desk: Desk, decode: str, slot: int, tokens: int) -> None:
    """End a generation after `tokens` tokens, the first one included."""
    finish = pb.Finish(slot=slot, end_position=tokens, reason=pb.Finish.REASON_LENGTH)
    desk.down(decode, frame=frame(slot, 1, tokens - 1), finishes=[finish])
    assert desk.ended[-1] == "REASON_LENGTH"


def test_a_transferred_prompt_is_believed_at_both_replicas() -> None:
    """Prefill has the blocks of a prompt once it is computed, decode once its generation has ended."""
    desk = desk_without_events()
    decode, slot = generating(desk, tokens=20, output=12)
    assert (held(desk, "prefill-0"), held(desk, decode)) == (5, 0)
    (attempt,) = desk.core.attempts.open
    assert len(attempt.hashes) == 5
    generate(desk, decode, slot, 12)
    assert held(desk, decode) == 5 and not attempt.hashes
    believed = desk.policy.local_index._replicas[decode].believed
    assert believed is not None and len(believed) == 5 + 2, (
        "31 of 32 tokens are in the cache, 20 of them of the prompt"
    )


def test_a_local_prompt_is_used_again_when_its_generation_ends() -> None:
    """A prompt of a decode replica is its newest use at the end of the generation, and not at its first token."""
    desk = desk_without_events(prefills=0)
    desk.submit(tokens=60, output=50)
    decode, submit = desk.placed()
    desk.down(decode, acceptances=[pb.Acceptance(slot=submit.slot)], starts=[pb.Start(slot=submit.slot)])
    desk.down(decode, first_tokens=[first(submit.slot)])
    assert held(desk, decode) == 15
    index = desk.policy.local_index
    index.repair(decode, range(1, 27), 0, 26, at_s=desk.now_s + 1, dispatched_s=desk.now_s)
    assert held(desk, decode) == BLOCKS
    desk.now_s += 10
    generate(desk, decode, submit.slot, 50)
    assert held(desk, decode) == BLOCKS - 12, "12 blocks of output displaced others"
    assert index.matched(range(1, 27)) == {decode: 13}


@pytest.mark.parametrize("end", ["handoff lost", "cancelled in transfer", "with events"])
def test_without_blocks_in_decode_none_are_believed(end: str) -> None:
    """A transfer that failed leaves nothing at decode. Engines with events say themselves what they have."""
    desk = desk_without_events()
    if end == "with events":
        for replica, _ in desk.links.values():
            replica.take_capabilities(("disaggregated", "kv_events"))
        report(desk)
        decode, slot = generating(desk, tokens=20, output=13)
        (attempt,) = desk.core.attempts.open
        assert not attempt.hashes
        generate(desk, decode, slot, 13)
    else:
        decode, slot = handed_over(desk, tokens=20)
        if end == "handoff lost":
            desk.down(decode, failures=[pb.Failure(slot=slot, code=pb.Failure.CODE_HANDOFF_LOST)])
        else:
            desk.ask(cancels=[pb.Cancel(slot=desk.slot)])
    assert held(desk, decode) == 0
    assert desk.ended


@pytest.mark.parametrize("event", ["not ready", "stream lost", "boot id"])
def test_a_restart_forgets_what_was_believed(event: str) -> None:
    """An engine with a boot id is forgotten at its next boot; one without when it was not ready or out of reach."""
    desk = desk_without_events()
    if event == "boot id":
        report(desk, engine_boot_id="boot-1")
    decode, slot = generating(desk, tokens=20, output=13)
    generate(desk, decode, slot, 13)
    report(desk, engine_boot_id="boot-1" if event == "boot id" else "")
    assert (held(desk, "prefill-0"), held(desk, decode)) == (5, 5)
    if event == "boot id":
        report(desk, engine_boot_id="boot-1", engine_ready=False)
        desk.lose(decode)
        assert (held(desk, "prefill-0"), held(desk, decode)) == (5, 5)
        report(desk, engine_boot_id="boot-2")
        assert held(desk, "prefill-0") == 0
    elif event == "not ready":
        report(desk, engine_ready=False)
        assert held(desk, "prefill-0") == 0
    else:
        desk.lose(decode)
        assert held(desk, "prefill-0") == 5
    assert held(desk, decode) == 0
    desk.submit(B, tokens=20)


def test_replicas_never_hold_more_than_their_blocks() -> None:
    """Many different prompts leave at most the KV blocks of the engine in the index."""
    desk = desk_without_events()
    for number in range(20):
        ids = pack_ids(range(100 * number, 100 * number + 48))
        prompt = {"token_ids": ids, "block_hashes": blocks.pack(blocks.chain(ids, 4, "m"))}
        decode, slot = generating(desk, request_id=f"{number:032x}", output=9, **prompt)
        generate(desk, decode, slot, 9)
        assert all(held(desk, name) <= BLOCKS for name in desk.links)
    assert held(desk, "prefill-0") > BLOCKS / 2
