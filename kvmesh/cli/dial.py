"""Channels from the command line to the processes of a mesh: with the operator's certificate if TLS is configured."""

from __future__ import annotations

import grpc

from kvmesh.config import MeshConfig
from kvmesh.roles import EDGE, INTERNAL
from kvmesh.server import channel
from kvmesh.trust.edge import Edge
from kvmesh.trust.names import OPERATOR
from kvmesh.trust.peers import Trust


class Dial:
    """Opens channels to processes by their role. The caller closes them."""

    def __init__(self, config: MeshConfig, role: str = OPERATOR) -> None:
        """Read the certificates of `role`, if the configuration names any. Raises ConfigError."""
        self._trust = Trust(config, role)
        self._edge = Edge(config, self._trust)

    def channel(self, address: str, role: str) -> grpc.aio.Channel:
        """Return a channel to the process of `role` at `host:port`."""
        if role in INTERNAL:
            return self._trust.channel(address, role)
        return self._edge.channel(address) if role in EDGE else channel(address)

    async def explain(self, address: str, role: str) -> str:
        """Return the TLS fault between this process and the one of an internal `role` at `address`, or an empty text."""
        return await self._trust.explain(address, role)
