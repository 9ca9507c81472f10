"""A client that sends its message slowly."""

from __future__ import annotations

from tests.integration.frontend.calls import LateCall, asking
from tests.integration.frontend.conftest import Serving
from tests.integration.frontend.scripted_router import Pool
from tests.patience import wait_for


async def test_the_time_of_a_message_is_not_taken_off_twice(serving: Serving, pool: Pool) -> None:
    """The deadline starts at the call's arrival, for any duration of the message; here no time passes meanwhile."""
    await wait_for(serving.frontend.service.serve(LateCall(asking(3))), 5)
    assert 55_500 < pool.submits[0].budget.remaining_ms <= 60_000
