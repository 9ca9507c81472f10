"""Opens channels to control processes: inside the allowed networks, and with mutual TLS where the mesh has it."""

from __future__ import annotations

from typing import Final

import grpc

from kvmesh.attach.client import probe
from kvmesh.attach.dialing import Dialer
from kvmesh.clock import Clock
from kvmesh.snapshot.watch import MESSAGE_BYTES_MAX
from kvmesh.trust.networks import Networks
from kvmesh.trust.peers import Trust

CONTROL: Final = "control"
"""Role in the certificates of control processes."""

KEEPALIVE_S: Final = 5.0
"""Time between two pings of a control process. Its heartbeats find a frozen one as fast; pings each second cost it more."""


class ControlDialer:
    """A `Dial` (see `watch`). One dial runs at a time, and `leader_search` sets their rate."""

    def __init__(self, trust: Trust, clock: Clock, networks: Networks) -> None:
        self._trust = trust
        self._dialer = Dialer(clock, networks)

    async def __call__(self, address: str) -> grpc.aio.Channel:
        """Return a channel to "host:port". Raises DialRefused and PeerUnreachable. The caller closes it."""
        resolved = await self._dialer.resolve(address)
        await probe(resolved)
        return self._trust.channel(
            resolved, CONTROL, message_bytes_max=MESSAGE_BYTES_MAX, keepalive_s=KEEPALIVE_S
        )
