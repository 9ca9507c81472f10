"""The values of the retry policy."""

from __future__ import annotations

import pytest

from kvmesh.client import RetryPolicy


@pytest.mark.parametrize(
    "field", ["probe_after_s", "probe_timeout_s", "backoff_min_s", "sends_max", "refusals_max"]
)
def test_an_impossible_value_is_refused(field: str) -> None:
    """The message names field and value."""
    with pytest.raises(ValueError, match=f"{field} is 0"):
        RetryPolicy(**{field: 0})


def test_the_error_names_the_field_and_the_value() -> None:
    """A negative time is refused."""
    with pytest.raises(ValueError, match=r"retry_after_max_s is -1: 0 s or more is allowed"):
        RetryPolicy(retry_after_max_s=-1)
