"""Names of faults, also of numbers that only a newer peer knows."""

from typing import Any, cast

import pytest

from kvmesh.attach.v1 import attach_pb2 as pb
from services.frontend.requests import faults


@pytest.mark.parametrize("number", [0, 99])
def test_a_number_nobody_here_knows_is_internal(number: int) -> None:
    """A newer replica's code or reason, or none at all, gets the name of a bug, never an empty one."""
    assert faults.of_failure(cast(Any, number)) == "INTERNAL"
    assert faults.of_refusal(cast(Any, number)) == "INTERNAL"


def test_known_numbers_keep_their_names() -> None:
    """The names are those of the protocol, without its prefixes."""
    assert faults.of_failure(pb.Failure.CODE_HANDOFF_LOST) == "HANDOFF_LOST"
    assert faults.of_refusal(pb.Refusal.REASON_KV_FULL) == "KV_FULL"
