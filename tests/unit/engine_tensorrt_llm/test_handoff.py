"""Handoffs: what a decode engine takes, and what it refuses."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from engines.contract.errors import EngineError
from engines.tensorrt_llm import handoff as handoffs
from engines.tensorrt_llm.handoff import Handoff, HandoffCheck

PROMPT = np.arange(100, 140, dtype=np.int32)


def made(**changes: object) -> Handoff:
    """Return a handoff for PROMPT."""
    base = Handoff(
        boot_id="b",
        handoff_id=1,
        build="1.2.1",
        digest="d",
        parallelism=(2, 1),
        prompt_tokens=len(PROMPT),
        prompt_hash=handoffs.hash_of(PROMPT),
        first_tokens=[7],
        first_log_probs=[-0.5],
        opaque_state=bytes(range(256)),
        ctx_request_id=2**63,
    )
    return msgspec.structs.replace(base, **changes)


def test_a_handoff_survives_the_wire() -> None:
    """All fields come back."""
    assert handoffs.decode(made().encode()) == made()


def test_every_cut_and_every_altered_byte_is_malformed() -> None:
    """The checksum covers magic, version and body."""
    blob, rng = made().encode(), random.Random(1)
    broken = [blob[:size] for size in range(len(blob))]
    for place in range(len(blob)):
        altered = bytearray(blob)
        altered[place] ^= rng.randrange(1, 256)
        broken.append(bytes(altered))
    for each in broken:
        with pytest.raises(EngineError, match="context_phase_params is malformed"):
            handoffs.decode(each)


def test_another_version_is_named() -> None:
    """A mixed rollout is recognised."""
    blob = bytearray(made().encode())
    blob[4] = 2
    with pytest.raises(EngineError, match="version 2, this engine reads 1"):
        handoffs.decode(bytes(blob))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"build": "1.3.0"}, "made by TensorRT-LLM 1.3.0, this engine runs 1.2.1"),
        ({"digest": "e"}, "engine is e, this engine is d"),
        ({"prompt_tokens": 3}, "made for 3 prompt tokens, got 40"),
        ({"prompt_hash": 3}, "made for another prompt"),
    ],
)
def test_a_handoff_of_another_engine_or_prompt_is_refused(changes: dict[str, object], reason: str) -> None:
    """The text is the contract's, with both values."""
    with pytest.raises(EngineError, match=f"handoff does not belong to this request: {reason}"):
        HandoffCheck("1.2.1", "d").take(made(**changes), PROMPT, "r", None)


def test_other_parallelism_is_taken_and_a_second_use_is_not() -> None:
    """TensorRT-LLM moves KV blocks between other tensor and pipeline sizes. Used handoffs are remembered, in bounds."""
    check = HandoffCheck("1.2.1", "d", used_max=2)
    check.take(made(parallelism=(8, 2)), PROMPT, "r", None)
    with pytest.raises(
        EngineError, match=r"Executor failed process requestId r .* KV handoff 1 is unknown or expired at b"
    ):
        check.take(made(), PROMPT, "r", None)
    for number in (2, 3):
        check.take(made(handoff_id=number), PROMPT, "r", None)
    check.take(made(), PROMPT, "r", None)  # forgotten: TensorRT-LLM finds it by its transfer timeout


def test_a_handoff_without_the_registered_address_is_refused() -> None:
    """A request that names the source of its KV blocks gets them from nowhere else."""
    check = HandoffCheck("1.2.1", "d")
    with pytest.raises(EngineError, match=r"handoff names none, registered is 10.0.0.1:9"):
        check.take(made(), PROMPT, "r", "10.0.0.1:9")
    check.take(made(ctx_info_endpoint="10.0.0.1:9"), PROMPT, "r", "10.0.0.1:9")
