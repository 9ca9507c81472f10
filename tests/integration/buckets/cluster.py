"""A Redis Cluster of three nodes, each in a container of its own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

import redis
from redis.exceptions import ConnectionError as NotThere
from redis.exceptions import ResponseError
from testcontainers.core.config import testcontainers_config

from tests.integration.containers import daemon, ownership
from tests.integration.containers.network import private_network
from tests.integration.containers.part import ContainerPart, Recipe
from tests.integration.containers.plan import IMAGES
from tests.integration.containers.reaper import Reaper
from tests.patience import Patience

NODES: Final = 3
SLOTS: Final = 16384
PORT: Final = 6379
START_S_MAX: Final = 30.0

_COMMAND: Final = (
    *("--cluster-enabled", "yes", "--cluster-config-file", "/tmp/nodes.conf", "--dir", "/tmp"),
    *("--save", "", "--protected-mode", "no", "--bind", "*", "-::*"),
)


class Cluster:
    """A Redis Cluster of three nodes that share all slots."""

    def __init__(self, nodes: Sequence[redis.Redis], hosts: Sequence[str]) -> None:
        self.nodes = nodes
        self.hosts = hosts
        self.url = "redis+cluster://" + ",".join(f"{host}:{PORT}" for host in hosts)

    def form(self) -> None:
        """Assign the slots, connect the nodes to each other, wait until all nodes agree."""
        for index, node in enumerate(self.nodes):
            first, end = SLOTS * index // NODES, SLOTS * (index + 1) // NODES
            ask(node, "CLUSTER", "ADDSLOTS", *range(first, end))
            ask(node, "CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for host in self.hosts[1:]:
            ask(self.nodes[0], "CLUSTER", "MEET", host, PORT)
        bound = Patience(START_S_MAX)
        while not all(self._is_whole(node) for node in self.nodes):
            assert not bound.is_over, "the nodes do not find each other"
            time.sleep(0.05)

    def forget_scripts(self) -> None:
        """Make all nodes forget all scripts."""
        for node in self.nodes:
            ask(node, "SCRIPT", "FLUSH")

    def node_of(self, key: str) -> int:
        """Return the index of the node that has the slot of `key`."""
        return next(index for index, node in enumerate(self.nodes) if self._has_slot(node, key))

    def move(self, keys: Sequence[str]) -> None:
        """Move the slot of `keys`, which has no other keys, to another node."""
        source = self.node_of(keys[0])
        target = (source + 1) % NODES
        slot = int(ask(self.nodes[0], "CLUSTER", "KEYSLOT", keys[0]))
        ids = [_text(ask(node, "CLUSTER", "MYID")) for node in self.nodes]
        ask(self.nodes[target], "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        ask(self.nodes[source], "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        ask(self.nodes[source], "MIGRATE", self.hosts[target], PORT, "", 0, 5000, "KEYS", *keys)
        for index in (target, source):
            ask(self.nodes[index], "CLUSTER", "SETSLOT", slot, "NODE", ids[target])

    def _has_slot(self, node: redis.Redis, key: str) -> bool:
        try:
            ask(node, "EXISTS", key)
        except ResponseError:
            return False
        return True

    def _is_whole(self, node: redis.Redis) -> bool:
        info = _text(ask(node, "CLUSTER", "INFO"))
        known = len(_text(ask(node, "CLUSTER", "NODES")).splitlines())
        return "cluster_state:ok" in info and known == NODES


@contextmanager
def running() -> Iterator[Cluster]:
    """Yield a Cluster; remove its containers and their network afterwards in any case."""
    testcontainers_config.ryuk_disabled = True
    run = f"kvmesh-cluster-{secrets.token_hex(4)}"
    labels = {ownership.RUN: run, ownership.OWNER: ownership.Owner.here().text}
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(NODES, thread_name_prefix="docker"))
        reaper = Reaper(run)
        stack.callback(reaper.dismiss)
        client = stack.enter_context(daemon.connected())
        ownership.sweep(client)
        stack.callback(ownership.remove, client, run)
        subnet = private_network(client, run, labels).subnet
        hosts = [str(subnet[10 + index]) for index in range(NODES)]
        parts = [
            ContainerPart(
                f"node-{index}", f"{run}-{index}", f"{host}:{PORT}",
                Recipe(IMAGES["redis"], _COMMAND, run, host, labels), threads,
            )
            for index, host in enumerate(hosts)
        ]  # fmt: skip
        for part in parts:
            stack.callback(part.close)
        list(threads.map(ContainerPart.start, parts))
        nodes = [stack.enter_context(redis.Redis(host=host, port=PORT, socket_timeout=10)) for host in hosts]
        for node in nodes:
            _wait_for(node)
        cluster = Cluster(nodes, hosts)
        cluster.form()
        yield cluster


def _wait_for(node: redis.Redis) -> None:
    bound = Patience(START_S_MAX)
    while not bound.is_over:
        with suppress(NotThere, redis.TimeoutError):
            ask(node, "PING")
            return
        time.sleep(0.05)
    raise TimeoutError(f"a node of the cluster does not answer within {START_S_MAX} s")


def ask(node: redis.Redis, *command: str | int) -> Any:
    """Run one command on one node."""
    return node.execute_command(*command)  # type: ignore[no-untyped-call]  # the library left it out


def _text(answer: Any) -> str:
    return answer.decode() if isinstance(answer, bytes) else str(answer)
