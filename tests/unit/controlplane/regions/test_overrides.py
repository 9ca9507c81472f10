"""Operators' overrides between regions: every region ends with the highest version of each scope, whatever the order."""

from __future__ import annotations

import random

from controlplane.regions.overrides import ENTRY_BYTES_MAX, SLICE_BYTES_MAX, OverrideExchange
from kvmesh.control.v1 import region_pb2 as pb
from kvmesh.tenants.overrides import Override


def test_regions_converge_to_the_highest_version_of_each_scope() -> None:
    """Random changes in three regions, lost messages, and a Redis that lost its memory once."""
    for seed in range(50):
        chance = random.Random(seed)
        stores: list[dict[str, Override]] = [{} for _ in range(3)]
        exchanges = [OverrideExchange() for _ in range(3)]
        highest: dict[str, Override] = {}

        def settle(at: int) -> None:
            exchanges[at].set_own(stores[at])  # noqa: B023  # called inside the loop only
            for scope, override in exchanges[at].learnt().items():  # noqa: B023
                known = stores[at].get(scope)  # noqa: B023
                if known is None or override.version > known.version:
                    stores[at][scope] = override  # noqa: B023

        for version in range(1, 60):
            at, scope = chance.randrange(3), f"tenant:t{chance.randrange(8)}"
            stores[at][scope] = highest[scope] = Override(version=version, changes={"weight": version})
            for _ in range(chance.randrange(4)):
                to = chance.randrange(3)
                settle(at)
                exchanges[to].learn(exchanges[at].slice())
                settle(to)
        stores[chance.randrange(3)].clear()
        for _ in range(4):
            for at in range(3):
                settle(at)
                for to in range(3):
                    exchanges[to].learn(exchanges[at].slice())
        for at in range(3):
            settle(at)
        kept = [store for store in stores if store == highest]
        assert len(kept) == 3 or all(store == stores[0] for store in stores), f"seed={seed}"


def test_many_overrides_are_sent_in_slices_and_all_arrive() -> None:
    """A message has a bounded size; an override above the bound stays where it is."""
    sender, receiver = OverrideExchange(), OverrideExchange()
    own = {f"tenant:t{at}": Override(version=at, changes={"note": "x" * 1000}) for at in range(1, 501)}
    own["tenant:huge"] = Override(version=1, changes={"note": "x" * ENTRY_BYTES_MAX})
    sender.set_own(own)
    for _ in range(10):
        part = sender.slice()
        assert 0 < sum(each.ByteSize() for each in part) <= SLICE_BYTES_MAX
        receiver.learn(part)
    assert receiver.learnt() == {scope: each for scope, each in own.items() if scope != "tenant:huge"}
    receiver.set_own(receiver.learnt())
    assert receiver.learnt() == {}


def test_unreadable_and_older_overrides_are_ignored() -> None:
    """News are data of another process."""
    exchange = OverrideExchange()
    exchange.set_own({"tenant:a": Override(version=5, changes={"weight": 1.0})})
    exchange.learn(
        [
            pb.TenantOverride(scope="tenant:a", version=5, changes=b'{"weight": 9}'),
            pb.TenantOverride(scope="tenant:b", version=7, changes=b"[1"),
            pb.TenantOverride(scope="tenant:c", version=7, changes=b"[1]"),
        ]
    )
    assert exchange.learnt() == {}
