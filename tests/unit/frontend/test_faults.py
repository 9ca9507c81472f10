"""Names of faults, also of numbers that only a newer peer knows."""

from typing import Any, cast

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from services.frontend.requests import faults


@pytest.mark.parametrize("number", [0, 99])
def test_an_unknown_number_is_internal(number: int) -> None:
    """An unknown or missing code or reason of a newer replica is named INTERNAL, never left empty."""
    assert faults.of_failure(cast(Any, number)) == "INTERNAL"
    assert faults.of_refusal(cast(Any, number)) == "INTERNAL"


def test_known_numbers_keep_their_names() -> None:
    """Known numbers have the protocol's names, without its prefixes."""
    assert faults.of_failure(pb.Failure.CODE_HANDOFF_LOST) == "HANDOFF_LOST"
    assert faults.of_refusal(pb.Refusal.REASON_KV_FULL) == "KV_FULL"
