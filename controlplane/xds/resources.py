"""A topology as xDS resources for the callers of one region: cluster, endpoints, listener, routes. Pure.

Each region is one locality in a priority of its own. The cluster, the listener and the routes depend on names alone, so a
change of frontends or regions changes only the endpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from controlplane.xds.resource_set import CLUSTER, ENDPOINTS, LISTENER, ROUTES, ResourceSet
from controlplane.xds.schema import TYPE_PREFIX, Schema
from controlplane.xds.topology import RegionFrontends, Topology

REGION_HEADER: Final = "kvmesh-region"
"""Header of a call with the caller's home region. Envoy adds it by the routes; gRPC ignores that part of them."""

UNLIMITED: Final = (1 << 32) - 1
"""Limit of a circuit breaker that never opens. The default of 1,024 running calls of a client would refuse long streams."""

WEIGHT: Final = 1
"""Weight of each locality. A locality without a weight is skipped. Each priority has one locality."""

PING_EVERY: Final = "5s"
PING_TIMEOUT: Final = "2s"
"""Envoy's keepalive of connections to frontends. gRPC clients set their own as channel options (docs/xds.md)."""

_ADS: Final = {"ads": {}, "resourceApiVersion": "V3"}
_HTTP: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_MANAGER: Final = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER: Final = "envoy.extensions.filters.http.router.v3.Router"


@dataclass(frozen=True, slots=True)
class Messages:
    """The four resources of one caller region, as messages."""

    cluster: Any
    endpoints: Any
    listener: Any
    routes: Any

    def serialized(self) -> ResourceSet:
        """Return the resources as bytes."""
        return ResourceSet(
            {
                CLUSTER: {self.cluster.name: _bytes(self.cluster)},
                ENDPOINTS: {self.endpoints.cluster_name: _bytes(self.endpoints)},
                LISTENER: {self.listener.name: _bytes(self.listener)},
                ROUTES: {self.routes.name: _bytes(self.routes)},
            }
        )


def resources_of(topology: Topology, caller_region: str, schema: Schema) -> Messages:
    """Return the resources for callers of `caller_region`. One of no known region counts as one of the own region.

    Raises ValueError if an address is not "IP:port" or a name is no text of UTF-8.
    """
    name = topology.listener
    order = topology.in_order(caller_region)
    home = order[0].name if order else caller_region
    return Messages(
        schema.build(_full(CLUSTER), _cluster(name)),
        schema.build(_full(ENDPOINTS), _endpoints(name, order)),
        schema.build(_full(LISTENER), _listener(name)),
        schema.build(_full(ROUTES), _routes(name, home)),
    )


def _cluster(name: str) -> Mapping[str, Any]:
    limits = {f"max{what}": UNLIMITED for what in ("Connections", "PendingRequests", "Requests")}
    keepalive = {"interval": PING_EVERY, "timeout": PING_TIMEOUT}
    return {
        "name": name,
        "type": "EDS",
        "edsClusterConfig": {"edsConfig": _ADS},
        "lbPolicy": "ROUND_ROBIN",
        "connectTimeout": "2s",
        "circuitBreakers": {"thresholds": [limits]},
        "typedExtensionProtocolOptions": {
            _HTTP: {
                "@type": f"{TYPE_PREFIX}{_HTTP}",
                "explicitHttpConfig": {"http2ProtocolOptions": {"connectionKeepalive": keepalive}},
            }
        },
    }


def _endpoints(name: str, order: tuple[RegionFrontends, ...]) -> Mapping[str, Any]:
    """Return one priority per region, without gaps. An address is named once, in the first region that has it.

    Callers of a region that recovers stay where they are, as long as another region takes calls.
    """
    may_wait = any(region.takes_calls for region in order)
    seen: set[str] = set()
    localities = []
    for priority, region in enumerate(order):
        is_empty = region.is_out or (region.is_recovering and priority == 0 and may_wait)
        found = [one for one in region.endpoints if one.address not in seen and not is_empty]
        unique = {one.address: one for one in reversed(found)}
        seen |= unique.keys()
        localities.append(
            {
                "locality": {"region": region.name},
                "priority": priority,
                "loadBalancingWeight": WEIGHT,
                "lbEndpoints": [
                    {
                        "endpoint": {"address": {"socketAddress": _socket(address)}},
                        "healthStatus": "DRAINING" if one.is_draining or region.is_draining else "HEALTHY",
                    }
                    for address, one in sorted(unique.items())
                ],
            }
        )
    return {"clusterName": name, "endpoints": localities}


def _listener(name: str) -> Mapping[str, Any]:
    return {
        "name": name,
        "apiListener": {
            "apiListener": {
                "@type": f"{TYPE_PREFIX}{_MANAGER}",
                "rds": {"routeConfigName": name, "configSource": _ADS},
                "httpFilters": [{"name": "router", "typedConfig": {"@type": f"{TYPE_PREFIX}{_ROUTER}"}}],
            }
        },
    }


def _routes(name: str, home: str) -> Mapping[str, Any]:
    header = {"header": {"key": REGION_HEADER, "value": home}, "appendAction": "ADD_IF_ABSENT"}
    # Envoy's default ends each stream after 15 s. gRPC ignores the field: a call has its own deadline.
    route = {"match": {"prefix": ""}, "route": {"cluster": name, "timeout": "0s"}}
    return {
        "name": name,
        "virtualHosts": [{"name": name, "domains": ["*"], "routes": [route]}],
        "requestHeadersToAdd": [header],
    }


def _socket(address: str) -> Mapping[str, Any]:
    host, _, port = address.rpartition(":")
    return {"address": host.removeprefix("[").removesuffix("]"), "portValue": int(port)}


def _full(type_url: str) -> str:
    return type_url.removeprefix(TYPE_PREFIX)


def _bytes(message: Any) -> bytes:
    found: bytes = message.SerializeToString(deterministic=True)
    return found
