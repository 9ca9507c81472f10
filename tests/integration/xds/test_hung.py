"""A region that hangs: its connections stay open and its packets are lost. The figures are those of docs/xds.md."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tests.integration.xds.mesh import OPTIONS, Mesh, calls, freeze, named, publish, thaw

FOUND_S: Final = 5.0 + 2.0 + 2.0 + 2.0
"""Keepalive time and ping timeout, time for the first priority to connect again, and 2 s for a busy machine."""

DEADLINE_S: Final = 6.0
"""Deadline of calls that nothing else ends."""

FAILOVER_S: Final = 2.0
"""Time for the first priority to connect. gRPC's default is 10 s (gRFC A56)."""


def test_a_hung_region_is_left_by_clients_with_the_options(mesh: Mesh) -> None:
    """Four clients at once: with all options, without any, without the ping timeout, and one that starts."""
    eu, us, ads = mesh.start()
    publish(ads, eu.told(), us.told())
    without_ping = {key: value for key, value in OPTIONS.items() if "ping_timeout" not in key}
    clients = [mesh.starting_client(ads, options=options) for options in (OPTIONS, {}, without_ping, OPTIONS)]
    for client in clients:
        client.wait_ready()
    pinging, plain, unanswered, starting = clients
    for client in (pinging, plain, unanswered):
        assert calls(client, 5) == {"eu": 5}
    freeze(eu.process)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = threads.submit(pinging.ask, "until", region="us", within_s=3 * FOUND_S)
            lost = [threads.submit(named, one, 1, deadline_s=DEADLINE_S) for one in (plain, unanswered)]
            first = threads.submit(starting.ask, "call", count=1, deadline_s=FOUND_S, target="")
        moved = found.result()
        assert len(moved["errors"]) <= 1 and moved["seconds"] <= FOUND_S
        assert [each.result() for each in lost] == [{"DEADLINE_EXCEEDED": 1}] * 2
        answer = first.result()
        assert answer["by"] == {"us-0": 1} and answer["slowest_s"] >= FAILOVER_S
    finally:
        thaw(eu.process)
