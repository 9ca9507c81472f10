"""What a caller may ask of the client's patience."""

from __future__ import annotations

import pytest

from kvmesh.client import RetryPolicy


@pytest.mark.parametrize(
    "field", ["probe_after_s", "probe_timeout_s", "backoff_min_s", "sends_max", "refusals_max"]
)
def test_patience_refuses_what_makes_no_sense(field: str) -> None:
    """The message names field and value."""
    with pytest.raises(ValueError, match=f"{field} is 0"):
        RetryPolicy(**{field: 0})


def test_patience_names_what_is_wrong() -> None:
    """Less than nothing is no patience."""
    with pytest.raises(ValueError, match=r"retry_after_max_s is -1: 0 s or more is allowed"):
        RetryPolicy(retry_after_max_s=-1)
