"""Prompts that no cache knows: random tokens, and the submit that carries them. Pure but for the random numbers."""

from __future__ import annotations

import random

from kvmesh import blocks
from kvmesh.attach import frames
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.budget.v1 import budget_pb2

FIRST_ID = 400
"""Lower ids may be control tokens or single bytes."""
LAST_ID = 3900


def random_ids(count: int, draw: random.Random) -> list[int]:
    """Return `count` token ids."""
    return [draw.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


def make_submit(
    prompt_ids: list[int],
    output_tokens: int,
    *,
    slot: int,
    phase: pb.Phase.ValueType,
    credit: int,
    block_tokens: int,
    model_version: str,
    draw: random.Random,
) -> pb.Submit:
    """Return a greedy submit; the outbox fills in the remaining time."""
    token_ids = frames.pack_ids(prompt_ids)
    return pb.Submit(
        slot=slot,
        request_id=f"{draw.getrandbits(128):032x}",
        attempt=1,
        token_ids=token_ids,
        block_hashes=blocks.pack(blocks.chain(token_ids, block_tokens, model_version)),
        block_tokens=block_tokens,
        sampling=pb.Sampling(temperature=0.0, top_p=1.0, seed=1),
        budget=budget_pb2.Budget(max_output_tokens=output_tokens, attempt=1, attempts_max=1),
        phase=phase,
        credit_position=credit,
        model_version=model_version,
        end_token_id=-1,
    )
