"""1,000 streams on one connection for a minute: each of them advances every second, and none is cut."""

from __future__ import annotations

import json
import time
from typing import Final

from tests.clients import ticker
from tests.clients.driver import Client
from tests.clients.site import Site
from tests.patience import SHARE, quiet_s

STREAMS: Final = 1_000
EVERY_S: Final = 0.5
GAP_S_MAX: Final = 1.0
"""Longest time between two messages of a stream, in seconds of a quiet machine."""


async def long_streams(site: Site, client: Client, seconds: float) -> str:
    """Return the largest gap. Raises AssertionError for a stream that ends otherwise, or waits for more than a second."""
    count = round(seconds / EVERY_S)
    wanted = json.dumps({"count": count, "every_s": EVERY_S}).encode()
    began_s, began_quiet_s = time.monotonic(), quiet_s()
    outcomes = await client.begin(
        site.tickers[0].address,
        ticker.TICK,
        wanted,
        channel="long",
        count=STREAMS,
        deadline_s=None,
        is_brief=True,
    ).end(3 * seconds)
    quiet_share = max(SHARE, (quiet_s() - began_quiet_s) / (time.monotonic() - began_s))
    bad = [each for each in outcomes if each.status != "OK" or each.message_count != count]
    assert not bad, f"{len(bad)} of {STREAMS} streams, the first: {bad[0]}"
    gap_s, gap_s_max = max(each.gap_s for each in outcomes), GAP_S_MAX / quiet_share
    assert gap_s <= gap_s_max, f"a stream waited {gap_s:.2f} s; allowed are {gap_s_max:.2f} s on this machine"
    return f"{STREAMS} streams of {seconds:g} s, largest gap {gap_s:.2f} s"
