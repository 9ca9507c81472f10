"""An ADS server as a process that may be killed, frozen and restarted: `python -m ...ads`. It publishes what it is told.

It can spoil resources behind the checks, to show that a real client refuses what the checks refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bench import control
from controlplane.xds import schema
from controlplane.xds.checks import resource_faults
from controlplane.xds.main import KEEPALIVE_S, MESSAGE_BYTES_MAX
from controlplane.xds.publication import Publication
from controlplane.xds.resource_set import ResourceSet
from controlplane.xds.resources import Messages, resources_of
from controlplane.xds.server import SERVICE_NAME, AdsServer
from controlplane.xds.topology import Endpoint, RegionFrontends, Topology
from kvmesh.clock import MonotonicClock
from kvmesh.request_reader import RequestReader
from kvmesh.server import MeshServer


def _gap(messages: Messages) -> None:
    messages.endpoints.endpoints[1].priority = 2


def _weightless(messages: Messages) -> None:
    messages.endpoints.endpoints[0].ClearField("load_balancing_weight")


def _twice(messages: Messages) -> None:
    first = messages.endpoints.endpoints[0]
    first.lb_endpoints.append(first.lb_endpoints[0])


def _policy(messages: Messages) -> None:
    messages.cluster.lb_policy = messages.cluster.LbPolicy.Value("MAGLEV")


def _weights(messages: Messages) -> None:
    (route,) = messages.routes.virtual_hosts[0].routes
    route.route.weighted_clusters.clusters.add(name=route.route.cluster).weight.value = 0


SPOILS: Final[Mapping[str, Callable[[Messages], None]]] = {
    "priority gap": _gap,
    "locality without a weight": _weightless,
    "address twice": _twice,
    "unknown policy": _policy,
    "all weights zero": _weights,
}


class _Spoiled(Publication):
    """Publishes without the checks. `spoil`: a name of SPOILS; empty: nothing is spoiled."""

    spoil = ""
    seen: tuple[str, ...] = ()
    """Faults that the checks find in the spoiled resources."""

    def _made(self, topology: Topology) -> tuple[dict[str, ResourceSet], list[str]]:
        made, faults = super()._made(topology)
        self.seen = ()
        for region in made if self.spoil else ():
            messages = resources_of(topology, region, self._schema)
            SPOILS[self.spoil](messages)
            self.seen = tuple(resource_faults(messages, self._schema))
            made[region] = messages.serialized()
        return made, faults


async def serve(own: str, listen: str) -> None:
    """Serve for the region `own` at `listen` until stdin ends."""
    messages, clock = schema.load(), MonotonicClock()
    reader = RequestReader(MESSAGE_BYTES_MAX, clock=clock)
    publication = _Spoiled(messages, own)
    ads = AdsServer(messages, publication, reader, clock)
    server = MeshServer("xds", "xds-0", (SERVICE_NAME,), keepalive_s=KEEPALIVE_S, request_reader=reader)
    ads.register(server.grpc)
    address = await server.listen(listen)

    async def publish(regions: Sequence[Mapping[str, Any]], spoil: str = "") -> Mapping[str, Any]:
        found = tuple(
            RegionFrontends(
                one["name"],
                tuple(Endpoint(address, is_draining) for address, is_draining in one["endpoints"]),
                one["is_draining"],
                one["is_out"],
            )
            for one in regions
        )
        publication.spoil = spoil
        if spoil:
            publication.topology = None  # to be made again
        is_new = ads.publish(Topology("kvmesh", own, found))
        return {"is_new": is_new, "fault": publication.fault, "seen": publication.seen}

    async def state() -> Mapping[str, Any]:
        return {"streams": len(ads), "nacks": ads.nacks, "answers": ads.answers_total}

    async def stop() -> Mapping[str, Any]:
        await ads.stop()
        return {}

    await control.serve_commands(publish, state, stop, address=address)


if __name__ == "__main__":
    control.main(serve, __doc__)
