"""Rules that resources must keep before they are published. Pure.

gRPC and Envoy refuse (NACK) resources that break most of these rules, and keep the last good ones. Some rules are for
faults that clients take without a word and that end their calls, such as a locality without a weight.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from controlplane.xds.resources import Messages
from controlplane.xds.schema import Schema
from controlplane.xds.topology import Topology

UINT32_MAX: Final = (1 << 32) - 1
PORT_MAX: Final = 65535
NAME_BYTES_MAX: Final = 256
PRIORITIES_MAX: Final = 128
"""Priorities that Envoy accepts."""

ENDPOINTS_MAX: Final = 4_096
"""Endpoints of a topology. A larger answer would not fit into gRPC's default limit of 4 MB for a message."""

ROUTER_FILTER: Final = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"


def topology_faults(topology: Topology) -> Iterator[str]:
    """Yield why `topology` cannot be published: field, value and allowed range."""
    if not _is_name(topology.listener):
        yield f"listener is {topology.listener!r:.80}; allowed are 1 to {NAME_BYTES_MAX} bytes of printable text"
    names = Counter(region.name for region in topology.regions)
    for name, count in names.items():
        if not _is_name(name):
            yield f"a region has the name {name!r:.80}; allowed are 1 to {NAME_BYTES_MAX} bytes of printable text"
        if count > 1:
            yield f'region "{name}" is named {count} times; allowed is once'
    if topology.own not in names:
        yield f'the own region "{topology.own}" is missing; allowed is one of {", ".join(sorted(names))}'
    if not 1 <= len(names) <= PRIORITIES_MAX:
        yield f"{len(names)} regions; allowed are 1 to {PRIORITIES_MAX}"
    total = sum(len(region.endpoints) for region in topology.regions)
    if not 1 <= total <= ENDPOINTS_MAX:
        yield f"{total} frontends in all regions; allowed are 1 to {ENDPOINTS_MAX}"
    for region in topology.regions:
        for one in region.endpoints:
            if not is_dialable(one.address):
                yield f'region "{region.name}" has the frontend {one.address!r:.80}; allowed is IP:PORT (IPv6: [::1]:7000)'


def is_dialable(address: str) -> bool:
    """True if `address` is an IP address and a port of 1 to 65535, as xDS needs it."""
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= PORT_MAX
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return False
    return is_port and _is_ip(host.removeprefix("[").removesuffix("]"))


def resource_faults(messages: Messages, schema: Schema) -> Iterator[str]:
    """Yield why a client would refuse `messages`, or would serve no call by them."""
    yield from _cluster_faults(messages.cluster)
    yield from _endpoint_faults(messages.endpoints)
    yield from _listener_faults(messages.listener, schema, messages.routes.name)
    yield from _route_faults(messages.routes, {messages.cluster.name})
    named = messages.cluster.eds_cluster_config.service_name or messages.cluster.name
    if messages.endpoints.cluster_name != named:
        yield f'the endpoints are of "{messages.endpoints.cluster_name}"; allowed is "{named}", as the cluster says'


def _cluster_faults(cluster: Any) -> Iterator[str]:
    if not cluster.name:
        yield "a cluster has no name; 1 byte or more is needed"
    if cluster.type != cluster.DiscoveryType.Value("EDS"):
        yield f'cluster "{cluster.name}" has the type {cluster.type}; allowed is EDS'
    if not cluster.eds_cluster_config.eds_config.HasField("ads"):
        yield f'cluster "{cluster.name}" takes its endpoints from no ADS; ads is needed'
    if cluster.lb_policy != cluster.LbPolicy.Value("ROUND_ROBIN"):
        yield f'cluster "{cluster.name}" has the lb_policy {cluster.lb_policy}; allowed is ROUND_ROBIN'


def _endpoint_faults(assignment: Any) -> Iterator[str]:
    priorities: dict[int, list[Any]] = {}
    for each in assignment.endpoints:
        where = f'locality "{each.locality.region}"'
        if not each.load_balancing_weight.value:
            yield f"{where} has no load_balancing_weight and would be skipped; 1 or more is needed"
        else:
            priorities.setdefault(each.priority, []).append(each)
        yield from _address_faults(where, each.lb_endpoints)
    if not priorities:
        yield "no priority has a locality; one or more is needed"
    for priority in range(max(priorities, default=-1) + 1):
        if priority not in priorities:
            yield f"priority {priority} is empty; allowed are priorities 0 to {max(priorities)} without a gap"
    for priority, found in sorted(priorities.items()):
        total = sum(each.load_balancing_weight.value for each in found)
        if total > UINT32_MAX:
            yield f"the weights of priority {priority} sum to {total}; allowed is up to {UINT32_MAX}"
        localities = Counter(_locality(each) for each in found)
        for locality, count in localities.items():
            if count > 1:
                yield f"priority {priority} has the locality {locality} {count} times; allowed is once"
    yield from _repeated(assignment.endpoints)


def _address_faults(where: str, endpoints: Iterable[Any]) -> Iterator[str]:
    for one in endpoints:
        dialled = one.endpoint.address.socket_address
        if not _is_ip(dialled.address):
            yield f"{where} has the address {dialled.address!r:.80}; allowed is an IP address"
        if not 1 <= dialled.port_value <= PORT_MAX:
            yield f"{where} has the port {dialled.port_value}; allowed are 1 to {PORT_MAX}"
        if one.HasField("load_balancing_weight") and not one.load_balancing_weight.value:
            yield f"{where} has an endpoint of the weight 0; allowed are 1 or more"


def _repeated(localities: Iterable[Any]) -> Iterator[str]:
    """Yield addresses that two endpoints have (gRFC A27)."""
    addresses = Counter(
        (one.endpoint.address.socket_address.address, one.endpoint.address.socket_address.port_value)
        for each in localities
        for one in each.lb_endpoints
    )
    for (host, port), count in addresses.items():
        if count > 1:
            yield f"the address {host}, port {port}, is named {count} times; allowed is once"


def _listener_faults(listener: Any, schema: Schema, routes: str) -> Iterator[str]:
    if not listener.name:
        yield "a listener has no name; 1 byte or more is needed"
    try:
        manager = schema.unpack(listener.api_listener.api_listener)
    except Exception:  # noqa: BLE001  # the codec may raise any error
        yield f'listener "{listener.name}" has no connection manager in its api_listener; one is needed'
        return
    filters = [each.typed_config.type_url for each in manager.http_filters]
    if filters.count(ROUTER_FILTER) != 1 or filters[-1] != ROUTER_FILTER:
        yield f'listener "{listener.name}" has {len(filters)} filters; the last one, and no other, must be the router'
    if manager.rds.route_config_name != routes:
        yield f'listener "{listener.name}" has the routes "{manager.rds.route_config_name}"; allowed is "{routes}"'
    if not manager.rds.config_source.HasField("ads"):
        yield f'listener "{listener.name}" takes its routes from no ADS; ads is needed'


def _route_faults(routes: Any, clusters: set[str]) -> Iterator[str]:
    if not any("*" in host.domains for host in routes.virtual_hosts):
        yield f'the routes "{routes.name}" have no virtual host for "*"; one is needed'
    for host in routes.virtual_hosts:
        if not host.routes:
            yield f'the virtual host "{host.name}" has no routes; one or more is needed'
        for route in host.routes:
            yield from _action_faults(route.route, clusters)


def _action_faults(action: Any, clusters: set[str]) -> Iterator[str]:
    weights = {each.name: each.weight.value for each in action.weighted_clusters.clusters}
    named = set(weights) or {action.cluster}
    for name in sorted(named - clusters):
        yield f'a route goes to the cluster "{name}"; allowed is one of {", ".join(sorted(clusters))}'
    if weights and not 1 <= sum(weights.values()) <= UINT32_MAX:
        yield f"the weights of a route sum to {sum(weights.values())}; allowed are 1 to {UINT32_MAX}"


def _locality(each: Any) -> str:
    return f"{each.locality.region}/{each.locality.zone}/{each.locality.sub_zone}"


def _is_name(name: str) -> bool:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return False
    return 1 <= size <= NAME_BYTES_MAX and name.isprintable()


def _is_ip(host: str) -> bool:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return not ip.is_unspecified and not ip.is_multicast
