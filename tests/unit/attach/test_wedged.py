"""A peer with a blocked event loop still answers pings: only the failure detector finds it."""

from __future__ import annotations

import asyncio
import sys

from kvmesh.attach.client import ATTACH_TIMEOUT_S, HEARTBEAT_TIMEOUT_S, AttachLink
from kvmesh.attach.v1 import attach_pb2 as pb
from kvmesh.clock import MonotonicClock
from kvmesh.server import channel
from tests.patience import quiet_s
from tests.unit.attach.test_streams import Collector, until

CLOCK = MonotonicClock()
WEDGED_S = 6.0


async def test_a_wedged_peer_is_lost_within_the_limit_and_attached_again_when_it_recovers() -> None:
    """Pings are answered while the loop is blocked. The peer is lost by its silence, and attached 2 s after recovery."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.unit.attach.wedged", str(WEDGED_S), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    address = (await process.stdout.readline()).decode().strip()
    hello = pb.Hello(process_id="caller", boot_id="c", protocol_version=1)
    sink = Collector()
    link = AttachLink("wedged", address, hello, sink, CLOCK, channel, keep=True)
    running = asyncio.create_task(link.run())
    try:
        await until(lambda: bool(sink.responses))
        link.outbox.submit(pb.Submit(slot=link.outbox.new_slot(), token_ids=b"\1\0\0\0"), CLOCK.now_s() + 10)
        wedged_s, quiet_wedged_s = CLOCK.now_s(), quiet_s()
        await until(lambda: bool(sink.lost))
        assert "HeartbeatTimeout" in sink.lost[0], "pings found it: it was frozen, not wedged"
        assert CLOCK.now_s() - wedged_s > HEARTBEAT_TIMEOUT_S - 1.0
        assert quiet_s() - quiet_wedged_s < HEARTBEAT_TIMEOUT_S + 1.5
        await until(lambda: len(sink.attached) == 2, timeout_s=WEDGED_S + 4.0)
        assert quiet_s() - quiet_wedged_s < WEDGED_S + ATTACH_TIMEOUT_S
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        process.kill()
        await process.wait()
