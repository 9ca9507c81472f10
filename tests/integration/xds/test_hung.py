"""A region that hangs: its connections stay open and its packets are lost. The figures are those of docs/xds.md."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tests.integration.xds.mesh import KEEPALIVE, Mesh, calls, freeze, named, publish, thaw

DETECTED_S: Final = 9.0
"""Keepalive time 5 s and ping timeout 2 s, and 2 s for a busy machine."""

DEADLINE_S: Final = 11.0
"""Deadline of calls that nothing else ends."""

CONNECT_S: Final = (9.0, 14.0)
"""A client that has no connection yet gives the first priority 10 s (gRFC A56)."""


def test_only_keepalive_with_a_ping_timeout_finds_a_hung_region(mesh: Mesh) -> None:
    """Four clients at once: with all options, without, without the ping timeout, and one that starts."""
    eu, us, ads = mesh.start()
    publish(ads, eu.told(), us.told())
    without_ping = {key: value for key, value in KEEPALIVE.items() if "ping_timeout" not in key}
    clients = [
        mesh.starting_client(ads, options=options) for options in (KEEPALIVE, {}, without_ping, KEEPALIVE)
    ]
    for client in clients:
        client.wait_ready()
    pinging, plain, unanswered, starting = clients
    for client in (pinging, plain, unanswered):
        assert calls(client, 5) == {"eu": 5}
    freeze(eu.process)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = threads.submit(pinging.ask, "until", region="us", within_s=3 * DETECTED_S)
            lost = [threads.submit(named, one, 1, deadline_s=DEADLINE_S) for one in (plain, unanswered)]
            first = threads.submit(starting.ask, "call", count=1, deadline_s=2 * CONNECT_S[1], target="")
        moved = found.result()
        assert moved["errors"] <= 1 and 5 <= moved["seconds"] <= DETECTED_S
        assert [each.result() for each in lost] == [{"DEADLINE_EXCEEDED": 1}] * 2
        answer = first.result()
        assert answer["by"] == {"us-0": 1} and CONNECT_S[0] <= answer["slowest_s"] <= CONNECT_S[1]
        print(f"with keepalive {moved['seconds']:.1f} s, a client that starts {answer['slowest_s']:.1f} s")
    finally:
        thaw(eu.process)
