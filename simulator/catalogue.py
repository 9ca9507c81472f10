"""The placement policies that a replay can compare, by name. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvmesh.queue_order import ORDERS
from services.router.index.local_index import LocalPrefixIndex
from services.router.placement.cost_policy import CostPolicy
from services.router.placement.policy import PlacementPolicy
from simulator.rivals.base import PolicySetup
from simulator.rivals.cache_aware import CacheAware, SmgEvents
from simulator.rivals.congestion_aware import CongestionAware
from simulator.rivals.counting import LeastOutstanding, PowerOfTwo, Random, RoundRobin
from simulator.rivals.dynamo import Dynamo
from simulator.rivals.greedy import Mooncake, Ttft, TtftOptimistic
from simulator.rivals.hashing import BoundedHash, ConsistentHash
from simulator.rivals.llm_d import LlmD
from simulator.rivals.preble import Preble


def kvmesh(setup: PolicySetup) -> PlacementPolicy:
    """Return the policy of the router, configured as in the router. Decode runs no prompts here."""
    local_index = LocalPrefixIndex()
    for name in setup.names:
        local_index.add(name)
    return CostPolicy(
        setup.router,
        local_index,
        setup.rng,
        block_tokens=setup.block_tokens,
        dispatch_ahead_s=setup.dispatch_ahead_s,
        local_prefill_tokens_max=0,
        order_key=ORDERS[setup.order.value],
    )


POLICIES: Final[dict[str, Callable[[PolicySetup], PlacementPolicy]]] = {
    "kvmesh": kvmesh,
    "llm-d": LlmD,
    "preble": Preble,
    "dynamo": Dynamo,
    "mooncake": Mooncake,
    "sglang": CacheAware,
    "smg": SmgEvents,
    "ttft-opt": TtftOptimistic,
    "ttft": Ttft,
    "kappa-rho": CongestionAware,
    "hash-bounded": BoundedHash,
    "hash": ConsistentHash,
    "least-outstanding": LeastOutstanding,
    "power-of-two": PowerOfTwo,
    "round-robin": RoundRobin,
    "random": Random,
}
