"""Client of a Redis Cluster, for budgets: each operation on a budget uses one node only.

The URL is `redis+cluster://[[user]:[password]@]host[:port][,host[:port]...]`, or rediss+cluster:// for TLS. Each host
knows all nodes, so one reachable host is enough.
"""

from __future__ import annotations

from typing import Any, Final

from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

_MARK: Final = "+cluster://"
_PORT: Final = 6379


def is_cluster(url: str) -> bool:
    """Return True if `url` names a Cluster."""
    return url.partition("?")[0].startswith((f"redis{_MARK}", f"rediss{_MARK}"))


def cluster_client(url: str, *, timeout_s: float, connections_max: int) -> RedisCluster:
    """Return a client for `url` that retries only commands that another node must answer. Raises ValueError."""
    scheme, _, rest = url.partition(_MARK)
    authority, question, query = rest.partition("?")
    user, at, hosts = authority.rpartition("@")
    names = hosts.rstrip("/").split(",")
    others = [_node(name) for name in names[1:]]
    return RedisCluster.from_url(
        f"{scheme}://{user}{at}{names[0]}{question}{query}",
        startup_nodes=others or None,
        retry=Retry(NoBackoff(), 0),
        max_connections=connections_max,
        decode_responses=False,
        protocol=2,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
    )


def _node(name: str) -> Any:
    host, colon, port = name.rpartition(":")
    if not colon:
        return ClusterNode(name, _PORT)
    return ClusterNode(host, int(port))
