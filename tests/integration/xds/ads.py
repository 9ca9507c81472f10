"""An ADS server as a process that may be killed, frozen and restarted: `python -m ...ads`. It publishes what it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench import control
from controlplane.xds import schema
from controlplane.xds.main import KEEPALIVE_S, MESSAGE_BYTES_MAX
from controlplane.xds.publication import Publication
from controlplane.xds.server import SERVICE_NAME, AdsServer
from controlplane.xds.topology import Endpoint, RegionFrontends, Topology
from kvmesh.clock import MonotonicClock
from kvmesh.request_reader import RequestReader
from kvmesh.server import MeshServer


async def serve(own: str, listen: str) -> None:
    """Serve for the region `own` at `listen` until stdin ends."""
    messages, clock = schema.load(), MonotonicClock()
    reader = RequestReader(MESSAGE_BYTES_MAX, clock=clock)
    publication = Publication(messages, own)
    ads = AdsServer(messages, publication, reader, clock)
    server = MeshServer("xds", "xds-0", (SERVICE_NAME,), keepalive_s=KEEPALIVE_S, request_reader=reader)
    ads.register(server.grpc)
    address = await server.listen(listen)

    async def publish(regions: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        found = tuple(
            RegionFrontends(
                one["name"],
                tuple(Endpoint(address, is_draining) for address, is_draining in one["endpoints"]),
                one["is_draining"],
                one["is_out"],
            )
            for one in regions
        )
        return {"is_new": ads.publish(Topology("kvmesh", own, found)), "fault": publication.fault}

    async def state() -> Mapping[str, Any]:
        return {"streams": len(ads), "nacks": ads.nacks, "answers": ads.answers_total}

    async def stop() -> Mapping[str, Any]:
        await ads.stop()
        return {}

    await control.serve_commands(publish, state, stop, address=address)


if __name__ == "__main__":
    control.main(serve, __doc__)
